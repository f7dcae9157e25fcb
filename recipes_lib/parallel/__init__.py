"""Training on several ranks: GPUs of one machine or of many, or processes on a CPU.

bandwidth           how fast ranks exchange tensors, and what that predicts for a step
checkpoint          each rank writes its part, and any number of ranks goes on
context_parallel    some tokens on each rank: ring attention and Ulysses
data_parallel       the whole model on each rank, its own rows: buckets sent beside backward
fully_sharded       one N-th of weights, gradients and states on each rank: FSDP2, HSDP
pipeline_parallel   some blocks on each rank: GPipe, 1F1B, interleaved; the bubble
quantized_shards    FSDP with QLoRA: a frozen 4-bit base in parts, scales included
tensor_parallel     a part of each layer on each rank, with sequence and loss parallelism
zero                states, gradients, weights in parts over ranks: ZeRO 1, 2 and 3
_moments  the clock of a CPU, or events in the stream of a GPU
_predicted_bytes  what a rank will keep, by arithmetic: bytes of weights, gradients, states
_sharding  what the techniques that copy or divide a model among ranks have in common

What one rank is refused, all are refused, with the same ValueError: the ranks compare first.
"""
