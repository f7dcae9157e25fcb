"""Attention whose memory does not grow with the square of the length; attention that reads less.

block_sparse             local, global and strided blocks of keys only, or documents side by side
block_sparse_cpu         its kernel for CPUs
block_sparse_hf          what transformers calls for it
flash                    the best exact kernel for this machine under any causal LM
flash_hf                 what transformers calls for it
head_groups              one group of heads after the other: less memory in a block
sliding_window           each token reads the last W tokens
sliding_window_banded    its kernel for any device
sliding_window_hf        what transformers calls for it
"""
