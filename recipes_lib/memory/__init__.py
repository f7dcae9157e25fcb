"""Activations, gradients and optimizer states that no longer fit.

activation_checkpointing        recompute activations in backward instead of keeping them
activation_offload              move saved activations to host memory or to disk
activation_offload_stores       ... where they go: host memory, or files
chunked_cross_entropy           output layer and loss of a few hundred tokens at a time
chunked_cross_entropy_autograd  ... the loss of a chunk and its gradients
chunked_cross_entropy_hf        ... the glue to a Hugging Face model
chunked_cross_entropy_plan      ... the rows of a chunk and the dtypes
nested_checkpointing            checkpoints inside checkpoints: keep the inputs of groups of blocks
optimizer_in_backward           step each parameter as its gradient arrives, and free the gradient
optimizer_offload               keep AdamW's states in host memory and step there
optimizer_offload_link          ... what stays on the host, and the link to the device
tiled_mlp                       run the MLPs tile by tile along the sequence
tiled_mlp_arithmetic            ... what that saves, and what its backward holds
"""
