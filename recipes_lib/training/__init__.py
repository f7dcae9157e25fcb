"""The training loop.

dynamic_batch            halve the micro-batch on out-of-memory, keep the effective batch
gradient_accumulation    a large effective batch in the memory of a small one
sequence_packing         several short documents in one row, each blind to the others
"""
