"""Tied embeddings: the output layer uses the table of the embedding, and no weights of its own.

Problem    Two tables have a row for each word: the embedding, which is read at the input, and the
           output layer, which is multiplied with at the end. In a small model they are a large
           part of all weights.
Idea       logits = hidden @ embedding.weight.T      [T, D] x [D, V]: one table, used twice
Saves      V x D weights, and their gradient and AdamW states when it trains: 16 bytes each in fp32.
Costs      No time: the output layer is multiplied with as before. In backward the table gets two
           gradients, which are added. In a large model two tables fit the data better.
Use when   A small model is trained from the start: SmolLM2-135M, Llama 3.2 1B and Qwen 2.5 0.5B are
           tied. `untie_embeddings` is for a step that must change one of both only, such as
           quantizing the output layer, or centring the embedding.
Not when   A trained model has two different tables: one of them is lost, and the model has to be
           trained again. Pipeline parallelism puts both on different devices.
In production   `"tie_word_embeddings": true` in config.json.
Source     Press and Wolf, "Using the Output Embedding to Improve Language Models" (arXiv
           1608.05859); Inan et al. (arXiv 1611.01462).

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.causal_lm import without_adapters
from recipes_lib.core.model.probe import Limits, proves

# --- the idea: what a learner can copy ------------------------------------------------------------


def tied_logits(hidden: Tensor, embedding: nn.Embedding) -> Tensor:
    """The score of each word is the product of its embedding with the hidden state.

    hidden [T, D] -> logits [T, V].
    """
    return hidden @ embedding.weight.T


# --- the technique --------------------------------------------------------------------------------

KEEP = ("equal", "embedding", "output")


def _promise_of_tied_table(*, keep: str = "equal") -> Limits:
    promise = "function" if keep == "equal" else "changes"
    return Limits(promise)


@proves(_promise_of_tied_table)
def apply_tied_embeddings(model: Any, *, keep: str = "equal") -> Any:
    """Let the output layer share the weights of the embedding, in place; returns `model`.

    The configuration changes with it, so that the model is saved and loaded with one table. Make
    the optimizer after this: one that holds the old table would train it, and nobody reads it.

    Args:
        keep: which table stays. "equal": either, because they are equal, and the model stays the
            same. "embedding" or "output": that one, and the other is lost. The model must be
            trained then; a model with fresh weights is to be trained in any case.
    """
    check_choice(KEEP, keep=keep)
    causal = without_adapters(model)
    embedding = causal.get_input_embeddings()
    output = causal.get_output_embeddings()
    if output.weight is embedding.weight:
        raise ValueError("the output layer shares the weights of the embedding already")
    if keep == "equal" and not torch.equal(embedding.weight, output.weight):
        raise ValueError(
            "the embedding and the output layer differ: say with keep='embedding' or "
            "keep='output' which table stays, and train the model after that"
        )
    kept = output.weight if keep == "output" else embedding.weight
    _configure(causal, tied=True)
    embedding.weight = kept
    output.weight = kept
    return model


@proves("function")
@torch.no_grad()
def untie_embeddings(model: Any) -> Any:
    """Give the output layer a copy of the embedding's weights, in place; returns `model`.

    The model computes the same. The configuration changes with it: under one that says "tied",
    `model.tie_weights()` would throw the copy away, and `resize_token_embeddings` calls that.
    """
    causal = without_adapters(model)
    shared = causal.get_input_embeddings().weight
    output = causal.get_output_embeddings()
    if output.weight is not shared:
        raise ValueError("the output layer has weights of its own already")
    tied_before = _tied_names(causal)
    output.weight = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
    _configure(causal, tied=False)
    untied = tied_before - _tied_names(causal)
    for name in sorted(untied):
        if causal.get_parameter(name) is not output.weight:
            raise ValueError(
                f"its configuration would untie {name}, too, which comes out of a saved file with "
                f"fresh weights"
            )
    return model


def _configure(causal: Any, *, tied: bool) -> None:
    """Write into the configuration whether tables are tied, and let transformers follow it."""
    causal.config.tie_word_embeddings = tied
    if tied and not _tied_names(causal):
        raise ValueError("this family has no way to tie its output layer, so no file would")
    # What `save_pretrained`, device maps and loading ask; it was made when the model was.
    causal.all_tied_weights_keys = causal.get_expanded_tied_weights_keys(all_submodels=True)
    causal.tie_weights()


def _tied_names(causal: Any) -> set[str]:
    """The weights that the configuration ties to another one."""
    return set(causal.get_expanded_tied_weights_keys(all_submodels=True))
