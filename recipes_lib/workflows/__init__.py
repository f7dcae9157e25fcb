"""Techniques put together, with their estimates: what a user runs as one thing.

longest_sequence               the longest sequence that fits in memory: predicted, then searched
out_of_memory_doctor           what to try against an out-of-memory error, in which order
which_strategy                 the simplest way to share a model among GPUs that fits
on_ranks                       one training under many strategies, on several ranks
on_device                      links of the chain to a device, beside libraries that do the same
finetune                       adapt a pretrained model, from pairs to an adapter that is proven
bench                          measure one technique beside the plain step
"""
