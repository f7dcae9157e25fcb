"""Fewer bits per number.

awq                  activation-aware scales before rounding to four bits
eight_bit_adam       AdamW with block-wise 8-bit states
int4                 weights in four bits for inference, in groups
int8                 8-bit weights for inference: weight-only, or times activations in 8 bits
mixed_precision      compute in 16 bits, keep fp32 master weights
pure_bf16            16-bit weights and states: nearest or stochastic rounding, or fp32 masters
quantization_aware   train with the rounding that the file of an edge device will have
sixteen_bit_adam     AdamW with bf16 states on fp32 weights
sixteen_bit_weights  bf16 or fp16 weights for inference, on the path that is fast for one token

_adamw_in_bf16       an AdamW with numbers in bf16: chunks, stochastic rounding, exact resuming
_converted_weights   products of many rows with weights stored in another dtype
_packed_linear       layers of few bits: packed for a kernel here, in plain order in a file
_four_bit_grid       weights on 16 levels, with a scale and an offset for each group of a row
"""
