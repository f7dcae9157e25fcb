"""Fewer bits per number.

eight_bit_adam     AdamW with block-wise 8-bit states
mixed_precision    compute in 16 bits, keep fp32 master weights
pure_bf16          16-bit weights and states: rounding to nearest, stochastic rounding, fp32 masters
sixteen_bit_adam   AdamW with bf16 states on fp32 weights
"""
