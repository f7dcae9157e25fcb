"""One training under many strategies: the same model, the same batches, another number of ranks.

strategies      the strategies by name: what each makes of a model, and how it takes a step
plans           what arithmetic expects of each: what a rank keeps, and what it sends
train           a few steps of one strategy on this rank, measured; and a rank that is alone
demonstrations  small experiments: ideas by hand, lanes of a step, the grid of a pipeline
libraries       the same training by DeepSpeed, on quantized shards, with experts
"""
