"""Attention whose memory grows with the sequence, not with its square; and attention that looks at less.

block_sparse      local, global and strided blocks of keys only, or documents side by side
flash             the best exact kernel for this machine under any causal LM
sliding_window    each token reads the last W tokens
"""
