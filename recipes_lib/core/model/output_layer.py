"""A causal LM up to its output layer: the entry for losses that make the logits themselves.

    hidden [B, S, D]  ->  output layer  ->  logits [B, S, V]  ->  loss

Such a loss reads the hidden states and the weight of the output layer. The model's own forward
brings them: its output layer runs on two tokens instead of all, and what comes in front of it is
kept. The logits of the two tokens show whether the model makes its logits as the loss will do:

    output, hidden = run_to_the_output_layer(causal, forward)
    makes_plain_logits(output, hidden, output_layer_of(causal))

Shapes: B batch, S sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from recipes_lib.core.data.tokens_and_labels import IGNORED
from recipes_lib.core.measure import dry
from recipes_lib.core.model.loss import next_tokens


class OutputLayer(NamedTuple):
    """What makes logits of hidden states: `c tanh((hidden @ weight.T + bias) / c)`, c the cap.

    Where a model multiplies its logits by a factor, hidden and bias are multiplied by it already.
    """

    weight: torch.Tensor  # [V, D]
    bias: torch.Tensor | None = None  # [V]
    softcap: float | None = None


def output_layer_of(causal: Any) -> OutputLayer:
    """The output layer of a causal LM, as its configuration describes it."""
    head = causal.get_output_embeddings()
    bias = getattr(head, "bias", None)
    factor = logit_factor(causal)
    if bias is not None and factor != 1:
        bias = bias * factor
    softcap = getattr(causal.config.get_text_config(), "final_logit_softcapping", None)  # Gemma 2
    return OutputLayer(head.weight, bias, softcap)


def logit_factor(causal: Any) -> float:
    """f, if the model makes its logits f times what its output layer returns; 1 otherwise.

    Cohere and Falcon-H1 multiply by a factor of their configuration, Granite divides by it.
    """
    config = causal.config.get_text_config()
    factor = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if value is not None:
            factor *= value
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None or config.model_type == "minicpm3":  # divides the hidden states by it
        return factor
    if config.model_type == "hyperclovax":
        return factor * scaling
    return factor / scaling


# --- the forward ----------------------------------------------------------------------------------


def run_to_the_output_layer(causal: Any, forward: Callable[[], Any]) -> tuple[Any, torch.Tensor]:
    """Run `forward`, that of a causal LM, without all logits: its output, and hidden [B, S, D].

    The logits of the output are [1, 2, V], those of `two_tokens`. Hidden is what the output layer
    reads, times the factor of the logits, if the model has one.
    """
    seen: list[torch.Tensor] = []
    with _shortened(causal.get_output_embeddings(), seen):
        output = forward()
    (hidden,) = seen
    factor = logit_factor(causal)
    if factor != 1:  # f (W h) is W (f h), and h is smaller than the logits
        hidden = hidden * factor
    return output, hidden


@contextlib.contextmanager
def _shortened(head: nn.Module, seen: list[torch.Tensor]) -> Iterator[None]:
    """Let the output layer run on two tokens of the hidden states, and put all of them in `seen`.

    Autocast is off for that: for two tokens it would copy the weight.
    """
    no_autocast = contextlib.ExitStack()

    # torch.compile cannot follow an autocast that begins in one hook and ends in another.
    @torch.compiler.disable
    def before(head: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        hidden = inputs[0]  # [B, S, D]
        seen.append(hidden)
        no_autocast.enter_context(torch.autocast(hidden.device.type, enabled=False))
        return two_tokens(hidden, head.weight)  # [1, 2, D]: what the output layer sees

    @torch.compiler.disable
    def after(*_: Any) -> None:
        no_autocast.close()

    with head.register_forward_pre_hook(before), head.register_forward_hook(after), no_autocast:
        yield


def options_by_name(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a causal LM's `forward` by name: labels may come by position."""
    if not args:
        return dict(kwargs)
    signature = inspect.signature(forward)
    signature.bind_partial(*args, **kwargs)  # raises TypeError for too many, or the same twice
    return dict(zip(signature.parameters, args)) | dict(kwargs)


def targets_of(options: Mapping[str, Any]) -> torch.Tensor:
    """For a loss behind the output layer: the token that each position has to predict, [B, S]."""
    targets = options.get("shift_labels")
    if targets is None:
        targets = next_tokens(options["labels"], ignored=options.get("ignore_index", IGNORED))
    return targets


def with_loss(causal: Any, output: Any, loss: torch.Tensor, options: Mapping[str, Any]) -> Any:
    """The output with this loss and no logits, in the form that the options of a forward ask for.

    They ask with `return_dict` for a tuple; otherwise the configuration does.
    """
    output = type(output)(**dict(output) | {"loss": loss, "logits": None})
    if options.get("return_dict", causal.config.return_dict) is False:
        return output.to_tuple()
    return output


# --- does the model make its logits and its loss as expected? -------------------------------------


def two_tokens(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """To try an output layer: one token of hidden [B, S, D], and 64 times that: [1, 2, D].

    What a model does with its logits shows in them. A factor that nobody expects changes the
    logits of both. A soft cap c tanh(logits / c) hardly changes small logits, such as those of an
    untrained model; those of 64 times the token it does change.
    """
    factors = weight.new_tensor([[1.0], [64.0]])  # [2, 1]
    return (hidden[:1, :1] * factors).to(weight.dtype)


@torch.no_grad()
def makes_plain_logits(output: Any, hidden: torch.Tensor, layer: OutputLayer) -> bool:
    """Whether the logits of the two tokens in `output` are what `layer` makes of them.

    In a dry run nothing has a value to compare, and the answer is yes.
    """
    if dry():
        return True
    tokens = two_tokens(hidden, layer.weight)  # [1, 2, D]
    with torch.autocast(hidden.device.type, enabled=False):  # as for the tokens in the forward
        expected = nn.functional.linear(tokens, layer.weight, layer.bias)  # [1, 2, V]
    expected = expected.to(output.logits.dtype)
    if layer.softcap:
        expected = layer.softcap * torch.tanh(expected / layer.softcap)
    # The tolerance is that of bf16. NaN equals NaN: that a run has diverged is another problem.
    return torch.allclose(output.logits, expected, rtol=0.02, atol=1e-3, equal_nan=True)


def beside_weight_and_bias(head: nn.Module) -> list[nn.Parameter]:
    """Parameters of an output layer that an `OutputLayer` leaves out, as those of adapters."""
    own = {id(head.weight), id(getattr(head, "bias", None))}
    return [parameter for parameter in head.parameters() if id(parameter) not in own]
