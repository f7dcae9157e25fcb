"""The glue between a chunked loss and a Hugging Face causal LM.

Part of chunked_cross_entropy. The mixin below takes the hidden states away in front of the output
layer, as `core.output_layer` describes, and gives them to another loss. It knows nothing of chunks:
any function of (hidden, weight, labels) would do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from recipes_lib.core.data.chat import IGNORED
from recipes_lib.core.model.output_layer import (
    OutputLayer,
    beside_weight_and_bias,
    makes_plain_logits,
    options_by_name,
    output_layer_of,
    run_to_the_output_layer,
    targets_of,
    with_loss,
)


class LossFromHidden:
    """What is mixed into the class of a causal LM: a loss without all logits.

    Attributes:
        chunked_loss: a function of hidden [B, S, D], weight [V, D] and the labels [B, S], which are
            shifted already; with the keywords bias, softcap, num_items and ignore_index.
    """

    chunked_loss: Callable[..., torch.Tensor]

    def forward(self, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        """As ever; but with labels in training mode, or with `skip_logits`, there are no logits."""
        if skip_logits is None:
            skip_logits = self.training
        kwargs = options_by_name(super().forward, args, kwargs)
        if kwargs.get("labels") is None or not skip_logits:
            return super().forward(**kwargs)

        without_loss = kwargs | {"labels": None, "return_dict": True}
        run = partial(super().forward, **without_loss)
        output, hidden = run_to_the_output_layer(self, run)
        layer = output_layer_of(self)
        problem = _why_not(self, output, hidden, layer)
        if problem:
            raise ValueError(
                f"{type(self).__name__} {problem}, which a chunked loss would leave out: "
                f"call remove_chunked_cross_entropy(model) and train on its own loss"
            )

        loss = self.chunked_loss(
            hidden,
            layer.weight,
            targets_of(kwargs).to(hidden.device),
            bias=layer.bias,
            softcap=layer.softcap,
            num_items=kwargs.get("num_items_in_batch"),
            ignore_index=kwargs.get("ignore_index", IGNORED),
        )
        return with_loss(self, output, loss, kwargs)


def _why_not(model: Any, output: Any, hidden: torch.Tensor, layer: OutputLayer) -> str | None:
    """What the model does with its logits or its loss beside the output layer and its soft cap."""
    others = beside_weight_and_bias(model.get_output_embeddings())
    if any(parameter.requires_grad for parameter in others):
        return "has adapters on its output layer"
    if "aux_loss" in output:
        return "adds a router's loss"
    if not makes_plain_logits(output, hidden, layer):
        return "scales its logits or changes them otherwise"
    return None
