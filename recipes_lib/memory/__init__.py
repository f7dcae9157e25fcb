"""Activations, gradients and optimizer states that no longer fit.

_gradients_in_backward          hooks by which backward hands gradients to an optimizer
_host_and_disk_stores           where tensors wait: pinned host memory, or a file on a disk
activation_checkpointing        recompute activations in backward instead of keeping them
activation_offload              move saved activations to host memory or to disk
chunked_cross_entropy           output layer and loss of a few hundred tokens at a time
layer_streaming                 frozen weights wait on the host and pass through block by block
nested_checkpointing            checkpoints inside checkpoints: keep the inputs of groups of blocks
optimizer_in_backward           step each parameter as its gradient arrives, and free the gradient
optimizer_offload               keep AdamW's states in host memory and step there
tiled_mlp                       run the MLPs tile by tile along the sequence
"""
