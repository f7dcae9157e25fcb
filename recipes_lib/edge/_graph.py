"""A model as a graph of operators: what every exporter starts from.

`torch.export` runs the model once on an example and writes down the operators, with no Python in
between. What Python decides while it runs, it decides for good: the sizes of the example are part
of the graph, and an `if` on the numbers of a tensor cannot be written down at all.

A Hugging Face model returns an object with many entries; a device gets the logits alone.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from recipes_lib.core.model.evaluating import evaluating
from recipes_lib.core.model.linears import refuse_quantized

LARGEST_BATCH = 1024  # of a graph with `any_batch`


class LogitsOnly(nn.Module):
    """A model that returns its logits where it would return an object of Hugging Face."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, *inputs: Tensor) -> Any:
        """What a graph returns: logits, and not the object of transformers."""
        output = self.model(*inputs)
        return getattr(output, "logits", output)


def capture_graph(
    model: nn.Module,
    example: tuple[Tensor, ...],
    *,
    any_batch: bool = False,
) -> torch.export.ExportedProgram:
    """The operators of one forward of `model` in eval mode, as torch.export writes them down.

    The model itself stays as it is, with its mode and its statistics.

    Args:
        example: the inputs of one call. Their shapes are those of the graph.
        any_batch: the first dimension of all inputs may change from call to call, together. Give
            an example of 2 or more then: torch.export takes a 1 for a fixed size.
    """
    _require_plain_weights(model)
    shapes = None
    if any_batch:
        batch = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
        of_each_input = tuple({0: batch} for _ in example)
        shapes = (of_each_input,)  # of one argument, `*inputs`
    with evaluating(model):
        return torch.export.export(LogitsOnly(model), tuple(example), dynamic_shapes=shapes)


@contextlib.contextmanager
def sparing_the_collector() -> Iterator[None]:
    """While a graph is made, the garbage collector looks at nothing that was there before.

    An export makes so many objects that the collector comes again and again. Each time it would
    look through all that the imports have made, which takes as long as the export itself.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _require_plain_weights(model: nn.Module) -> None:
    """An exporter of graphs rounds by itself, and takes a weight for what it computes with."""
    refuse_quantized(
        model,
        way_out="the export would round it again; export the model as it was before "
        "(after apply_quantization_aware: remove_quantization_aware)",
    )
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            raise ValueError(
                f"a weight of {name} is computed of others in each forward, and the device would "
                f"do it in each call: call remove_pruning(model) for masks"
            )
    for name, weight in model.named_parameters():
        another_dtype = weight.is_floating_point() and weight.dtype is not torch.float32
        if another_dtype or weight.device.type != "cpu":
            raise ValueError(
                f"{name} is stored in {weight.dtype} on {weight.device}: call "
                f"model.float().cpu() before the export"
            )
