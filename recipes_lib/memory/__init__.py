"""Activations, gradients and optimizer states that no longer fit.

activation_checkpointing    recompute activations in backward instead of keeping them
activation_offload          move saved activations to host memory or to disk
optimizer_in_backward       step each parameter as its gradient arrives, and free the gradient
optimizer_offload           keep AdamW's states in host memory and step there
out_of_memory_doctor        what to try, in which order, each with its arithmetic
"""
