"""Faster answers from a model that is trained already.

batching            several prompts at once, padded on the left; the weights are read once for all
compiled_decode     the step of one token as one CUDA graph: torch.compile and a static cache
decode_loop         a decoder with a static KV cache and fused projections, equal to `generate`
kv_cache            int8 keys and values, with a scale per token and head
speculative         a cheap draft of a few tokens, checked in one call of the model
"""
