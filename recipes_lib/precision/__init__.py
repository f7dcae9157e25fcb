"""Fewer bits per number.

awq                  activation-aware scales before rounding to four bits
awq_sites            where these scales can be folded exactly
eight_bit_adam       AdamW with block-wise 8-bit states
int4                 weights in four bits for inference, in groups
int4_kernel          PyTorch's 4-bit kernels: packing, and whether this machine has one
int8                 8-bit weights for inference: weight-only, or times activations in 8 bits
int8_kernels         its products with a plain tensor of weights, and what slows them silently
int8_packed          its products on a CPU's instructions for whole numbers, with packed weights
int8_sensitivity     which layers suffer from 8 bits, by measurement
mixed_precision      compute in 16 bits, keep fp32 master weights
pure_bf16            16-bit weights and states: nearest or stochastic rounding, or fp32 masters
quantization_aware   train with the rounding that the file of an edge device will have
quantization_aware_layers    its linear layers, embeddings and convolutions, in training and after
quantization_aware_plan      which layers get which grid, and what is refused
quantization_aware_rounding  rounding that trains: forward on the grid, gradients straight through
sixteen_bit_adam     AdamW with bf16 states on fp32 weights
sixteen_bit_weights  bf16 or fp16 weights for inference, on the path that is fast for one token
"""
