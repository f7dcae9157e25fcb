"""Faster answers from a model that is trained already.

compiled_decode    the step of one token as one CUDA graph: torch.compile and a static cache
decode_loop        a decoder with a static KV cache and fused projections, equal to `generate`
decode_loop_hf     its Hugging Face glue: reading the weights, and refusing what is not reproduced
"""
