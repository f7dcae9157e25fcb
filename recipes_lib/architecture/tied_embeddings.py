"""Tied embeddings: the output layer uses the table of the embedding, and no weights of its own.

Problem    Two tables have a row for each word: the embedding, which is read at the input, and the
           output layer, which is multiplied with at the end. In a small model they are a large
           part of all weights.
Idea       logits = hidden @ embedding.weight.T      [T, D] x [D, V]: one table, used twice
Saves      V x D weights, and their gradient and AdamW states when it trains: 16 bytes each in fp32.
Costs      No time: the output layer is multiplied with as before. In backward the table gets two
           gradients, which are added. In a large model two tables fit the data better.
Use when   A small model is trained from the start: SmolLM2-135M, Llama 3.2 1B and Qwen 2.5 0.5B are
           tied.
Not when   A trained model has two different tables: one of them is lost, and the model has to be
           trained again. Pipeline parallelism puts both on different devices.
In production   `"tie_word_embeddings": true` in config.json.
Source     Press and Wolf, "Using the Output Embedding to Improve Language Models" (arXiv
           1608.05859); Inan et al. (arXiv 1611.01462).

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.causal_lm import require_causal_lm, without_adapters
from recipes_lib.core.model.probe import proves

# --- the idea: what a learner can copy ------------------------------------------------------------


def tied_logits(hidden: Tensor, embedding: nn.Embedding) -> Tensor:
    """The score of each word is the product of its embedding with the hidden state.

    hidden [T, D] -> logits [T, V].
    """
    return hidden @ embedding.weight.T


# --- the technique --------------------------------------------------------------------------------

KEEP = ("embedding", "output")


@proves("changes")
def apply_tied_embeddings(model: Any, *, keep: str = "embedding") -> Any:
    """Let the output layer share the weights of the embedding, in place; returns `model`.

    The configuration changes with it, so that the model is saved and loaded with one table. Make
    the optimizer after this: one that holds the old table would train it, and nobody reads it.

    Args:
        keep: which table stays, "embedding" or "output". The other one is lost, and the model must
            be trained then.
    Raises ValueError for a model that is tied already, and for a family that cannot be.
    """
    require_causal_lm(model)
    check_choice(KEEP, keep=keep)
    causal = without_adapters(model)
    embedding, output = causal.get_input_embeddings(), causal.get_output_embeddings()
    if output.weight is embedding.weight:
        raise ValueError("the output layer shares the weights of the embedding already")
    causal.config.tie_word_embeddings = True
    keys = causal.get_expanded_tied_weights_keys(all_submodels=True)
    if not keys:
        raise ValueError("this family has no way to tie its output layer, so no file would")
    kept = output.weight if keep == "output" else embedding.weight
    for table in (embedding, output):
        table.weight = kept
    # What `save_pretrained`, device maps and loading ask; it was made when the model was.
    causal.all_tied_weights_keys = keys
    causal.tie_weights()
    return model
