"""Measure techniques beside the plain step, and beside the libraries that do the same.

run           one technique and the plain step on one batch: `python -m recipes_lib bench <name>`
entries       one entry per technique: its shortest use in a training step, and its predicted budget
losses        output layer and loss: all logits, chunks, PyTorch's and Liger's fused kernels
attention     attention alone: seconds and bytes of one kernel beside another
curriculum    short rows first beside rows of one length, at equal compute
clock         the time that this thread has computed, or that of the GPU
norms         one norm: plain, compiled, PyTorch's and Liger's, in bytes per second
small_models  a small model trained both ways: norm, gate, heads of keys, tied tables
depths        small models of equal weights, from wide and shallow to deep and thin
byte_models   text, steps and held-out loss of small models that train side by side
"""
