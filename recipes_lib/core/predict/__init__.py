"""How many bytes a step will need, before it runs.

block_bytes  what each block of a model costs in a step, where no formula holds for all
budget  the terms of a step's memory, and the protocol by which recipes change them
closed_formula  whether the formula of a plain step holds for all blocks of a model
dry_ranks  the memory of one rank among many, without the others and without GPUs
dry_step  a step on tensors without data: what it allocates, block by block
operations  how many operations of matrix products a step needs
plain_step  the arithmetic of a plain training step, before any recipe
"""
