"""One training under many strategies: the same model, the same batches, another number of ranks.

strategies      the strategies by name: what each makes of a model, and how it takes a step
plans           what arithmetic expects of each: the budget of a rank, and what it sends
train           a few steps of one strategy on this rank, measured
peaks           the peak of one rank of many under FSDP2 or in a pipeline, predicted and counted
batches         rows of text as bytes, of which each counts another number of tokens
by_hand         the ideas in plain lines, run on real ranks beside the real thing
demonstrations  small experiments: lanes of a step, the grid of a pipeline, a checkpoint
libraries       the same training by DeepSpeed, on quantized shards, with experts
transformers_ranks  the same step and the same training by transformers' own parallelism
"""
