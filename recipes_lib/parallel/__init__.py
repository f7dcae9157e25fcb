"""Training on several ranks: GPUs of one machine or of many, or processes on a CPU.

bandwidth           how fast ranks exchange tensors, and what that predicts for a step
checkpoint          each rank writes its part, and any number of ranks goes on
checkpoint_base     which frozen weights were trained on, the same on any number of ranks
checkpoint_export   safetensors files from shards, for every other program
checkpoint_files    are the files what was written: checksums, and no code
checkpoint_guards   no rank waits for one that has failed, and what does not fit is refused
checkpoint_latest   which folder is the last whole checkpoint
checkpoint_restarts  what a rank has to know of torchrun, which starts it again
checkpoint_state    what is saved: each rank's parts of weights and states, by name
context_parallel    some tokens on each rank: ring attention and Ulysses
context_parallel_hf  what transformers calls, and what is refused
context_parallel_kernels  attention with its log-sum-exp, and the backward that takes it
context_parallel_ring  keys and values go round, forward and backward
context_parallel_ulysses  all-to-all between tokens and heads
data_parallel       the whole model on each rank, its own rows: buckets sent beside backward
data_parallel_lanes  what computes when, and what is sent meanwhile, in one step
data_parallel_threads  what came before: replicas in threads of one process
fully_sharded       one N-th of weights, gradients and states on each rank: FSDP2, HSDP
fully_sharded_compile  compile and shard in both orders, timed in turns
fully_sharded_precision  what stays in fp32 when a sharded model computes in bf16
fully_sharded_strategies  the four sharding strategies, measured on real ranks
pipeline_parallel   some blocks on each rank: GPipe, 1F1B, interleaved; the bubble
pipeline_parallel_arithmetic  what a rank keeps, by the order of its actions and its stages
pipeline_parallel_clock  when each action of a pipeline began and ended
pipeline_parallel_run  the stages of one rank, run by PyTorch's schedule
pipeline_parallel_stage  some blocks of a model as a module of their own
quantized_shards    FSDP with QLoRA: a frozen 4-bit base in parts, scales included
quantized_shards_dry_run  the memory of one rank for a model of any size, without a GPU
quantized_shards_ends  a frozen embedding and output layer, gathered a few rows at a time
quantized_shards_layer  a 4-bit linear layer whose codes and scales are parameters
quantized_shards_libraries  what bitsandbytes and torchao shard of a 4-bit layer, and what not
tensor_parallel     a part of each layer on each rank, with sequence and loss parallelism
tensor_parallel_arithmetic  what stays whole on each rank, and how many bytes it sends
tensor_parallel_loss  the loss of logits that are cut by the vocabulary
tensor_parallel_simulated  four ranks in one process, with every part to print
tensor_parallel_styles  a table of tokens that is cut, and norms that are whole
zero                states, gradients, weights in parts over ranks: ZeRO 1, 2 and 3
zero_deepspeed      the same stages by DeepSpeed, from launch/deepspeed
"""
