"""The training loop.

compiled_blocks          torch.compile for each decoder block, for training
curriculum               short rows first, long ones later, the same tokens in every step
data_loading             the next batches are made by other processes while this one trains
dynamic_batch            halve the micro-batch on out-of-memory, keep the effective batch
exact_resume             go on after a kill with the identical losses
gradient_accumulation    a large effective batch in the memory of a small one
muon                     the matrices of the blocks by Muon, the rest by AdamW: half the states
sequence_packing         several short documents in one row, each blind to the others
tracking                 loss, speed and memory of a run, in TensorBoard, MLflow or W&B
"""
