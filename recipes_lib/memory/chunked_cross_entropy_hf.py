"""The glue between a chunked loss and a Hugging Face causal LM.

Part of chunked_cross_entropy. Such a model makes all logits and gives them to a loss:

    hidden [B, S, D]  ->  output layer  ->  logits [B, S, V]  ->  loss

The mixin below takes the hidden states away in front of the output layer, and gives them to another
loss. It knows nothing of chunks: any function of (hidden, weight, labels) would do.

The output layer still runs, on two tokens instead of all. Their logits show whether the model makes
its logits as the other loss does: see `two_tokens`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recipes_lib.core.causal_lm import final_softcap
from recipes_lib.core.measure import dry


def require_plain_loss(causal: Any) -> None:
    """Raise ValueError unless the model leaves its loss to `self.loss_function`, the usual one."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    names_in_forward = inspect.unwrap(type(causal).forward).__code__.co_names
    if "loss_function" in names_in_forward and causal.loss_function is ForCausalLMLoss:
        return
    raise ValueError(
        f"{type(causal).__name__} computes its loss itself: "
        f"only the loss of a model that uses ForCausalLMLoss can be replaced"
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
        if kwargs.get("labels") is None or not skip_logits:
            return super().forward(*args, **kwargs)

        head = self.get_output_embeddings()
        probe = _Probe()
        with head.register_forward_pre_hook(probe), head.register_forward_hook(probe.end), probe:
            without_loss = kwargs | {"labels": None, "return_dict": True}
            output = super().forward(*args, **without_loss)
        problem = _why_not(self, output, probe.hidden)
        if problem:
            raise ValueError(
                f"{type(self).__name__} {problem}, which a chunked loss would leave out: "
                f"call remove_chunked_cross_entropy(model) and train on its own loss"
            )

        loss = self._loss_of(probe.hidden, kwargs)
        output = type(output)(**dict(output) | {"loss": loss, "logits": None})
        if kwargs.get("return_dict", self.config.return_dict) is False:
            return output.to_tuple()
        return output

    def _loss_of(self, hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """The loss of hidden [B, S, D] with the labels and options that `forward` was given."""
        head = self.get_output_embeddings()
        ignore_index = options.get("ignore_index", -100)
        targets = options.get("shift_labels")
        if targets is None:
            # The model predicts token t + 1 from token t, and from the last token nothing.
            next_tokens = options["labels"][..., 1:]  # [B, S - 1]
            targets = nn.functional.pad(next_tokens, (0, 1), value=ignore_index)  # [B, S]
        return self.chunked_loss(
            hidden,
            head.weight,
            targets.to(hidden.device),
            bias=getattr(head, "bias", None),
            softcap=final_softcap(self),
            num_items=options.get("num_items_in_batch"),
            ignore_index=ignore_index,
        )


# --- the probe: does the model make its logits as expected? ---------------------------------------


class _Probe(contextlib.ExitStack):
    """A hook in front of the output layer: it keeps what comes, and lets two tokens pass.

    Autocast is off until `end`, the hook behind the layer: for two tokens it would copy the weight.
    """

    hidden: torch.Tensor

    def __call__(self, head: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        self.hidden = inputs[0]  # [B, S, D]
        self.enter_context(torch.autocast(self.hidden.device.type, enabled=False))
        return two_tokens(self.hidden, head.weight)  # [1, 2, D]: what the output layer sees

    def end(self, *_: Any) -> None:
        self.close()


def two_tokens(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One token of hidden [B, S, D], and 64 times that token: [1, 2, D].

    What a model does with its logits shows in them. A factor (Cohere, Granite) changes the logits
    of both. A soft cap c tanh(logits / c) hardly changes small logits, such as those of an
    untrained model; those of 64 times the token it does change.
    """
    factors = weight.new_tensor([[1.0], [64.0]])  # [2, 1]
    return (hidden[:1, :1] * factors).to(weight.dtype)


def _why_not(model: Any, output: Any, hidden: torch.Tensor) -> str | None:
    """What the model does with its logits or its loss beside the output layer and its soft cap."""
    if _has_trained_adapters(model.get_output_embeddings()):
        return "has adapters on its output layer"
    if "aux_loss" in output:
        return "adds a router's loss"
    if dry():  # nothing has a value to compare
        return None
    expected = _expected_logits(model, hidden, dtype=output.logits.dtype)
    # The tolerance is that of bf16. NaN equals NaN: that a run has diverged is another problem.
    if torch.allclose(output.logits, expected, rtol=0.02, atol=1e-3, equal_nan=True):
        return None
    return "scales its logits or changes them otherwise"


def _has_trained_adapters(head: nn.Module) -> bool:
    """Whether more trains in the output layer than its weight and bias."""
    own = (head.weight, getattr(head, "bias", None))
    for parameter in head.parameters():
        if parameter.requires_grad and not any(parameter is each for each in own):
            return True
    return False


def _expected_logits(model: Any, hidden: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """What a linear layer and the configuration's soft cap make of the two tokens: [1, 2, V]."""
    head = model.get_output_embeddings()
    tokens = two_tokens(hidden, head.weight)  # [1, 2, D]
    with torch.autocast(hidden.device.type, enabled=False):  # as in the probe
        logits = nn.functional.linear(tokens, head.weight, getattr(head, "bias", None)).to(dtype)
    cap = final_softcap(model)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return logits
