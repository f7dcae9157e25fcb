"""Attention whose memory does not grow with the square of the length; attention that reads less.

block_sparse             local, global and strided blocks of keys only, or documents side by side
flash                    the best exact kernel for this machine under any causal LM
head_groups              one group of heads after the other: less memory in a block
sliding_window           each token reads the last W tokens
_heads                   what kernels have to know of a model, of queries, keys and values
_compiled_flex  FlexAttention, compiled or not at all
"""
