"""Attention whose memory does not grow with the square of the length; attention that reads less.

block_sparse             local, global and strided blocks of keys only, or documents side by side
flash                    the best exact kernel for this machine under any causal LM
head_groups              one group of heads after the other: less memory in a block
sliding_window           each token reads the last W tokens
_unsupported             what models do in their own attention, and another kernel would leave out
_compiled_flex           FlexAttention, compiled or not at all
"""
