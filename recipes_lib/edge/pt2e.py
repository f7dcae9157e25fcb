"""Whole numbers in the graph: PT2E quantization for 8-bit kernels.

Problem    Phones multiply whole numbers of 8 bits, and 4 bytes per weight make a file large. A
           kernel needs to know the grid of each tensor before it runs: the activations' as well.
Idea       Write the model down as a graph, and put a rounding behind every tensor that a kernel
           will hold in 8 bits. Run some images, and note the smallest and the largest number that
           come by: they set the steps of each grid. (The library cuts off rare outliers.)

               q = round(x / scale) + zero        from -128 to 127
               x ≈ (q - zero) scale

           Weights are symmetric: zero is 0, and the scale is max |W| / 127 for each channel.
Saves      3 of the 4 bytes of a weight in the file, and time where the kernels for whole numbers
           are the faster ones.
Costs      A calibration set; a small loss of accuracy.
Use when   The .pte goes to a device with 8-bit kernels, or must be small.
Not when   8 bits lose too much: `precision/quantization_aware` trains on a grid.
In production   torchao `prepare_pt2e` and `convert_pt2e` with the quantizer of a backend (XNNPACK,
           Core ML, Qualcomm, X86Inductor); `prepare_qat_pt2e` for a training on the grid.
Source     Jacob et al., arXiv 1712.05877; torchao documentation, "PyTorch 2 Export Quantization".

Needs torchao and, for its quantizer, ExecuTorch: `pip install executorch`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.measure.machine import require
from recipes_lib.edge._graph import capture_graph, sparing_the_collector
from recipes_lib.edge._silenced_libraries import noise_to

BATCH = 64  # of the calibration

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_grid(smallest: float, largest: float) -> tuple[float, int]:
    """PT2E's grid: scale and zero of 256 levels between two numbers; 0 is one of the levels."""
    smallest = min(smallest, 0.0)
    largest = max(largest, 0.0)
    scale = (largest - smallest) / 255
    zero = round(-128 - smallest / scale)
    return scale, max(-128, min(zero, 127))


# --- the technique --------------------------------------------------------------------------------


def quantize_pt2e(model: nn.Module, calibration: Tensor) -> EvalGraph:
    """A graph of `model` with activations and weights in 8 bits, for inference.

    The model stays as it is. The graph computes the roundings in fp32, so its accuracy can be
    measured at once; `export_to_executorch` makes a .pte of it whose kernels hold whole numbers.

    Args:
        model: in fp32 on a CPU, with one input. Of a Hugging Face model the graph returns logits.
        calibration: inputs [N, ...] as the model will see them; some hundred are enough.
    """
    with noise_to():
        require("executorch")
        require("torchao")
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )
        from torchao.quantization.pt2e import move_exported_model_to_eval
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        settings = get_symmetric_quantization_config(is_per_channel=True)
        with sparing_the_collector():
            graph = _graph_for_pt2e(model, calibration)
            prepared = prepare_pt2e(graph, XNNPACKQuantizer().set_global(settings))
            with torch.no_grad():
                for batch in calibration.split(BATCH):
                    prepared(batch)
            converted = convert_pt2e(prepared)
        move_exported_model_to_eval(converted)
        return EvalGraph(converted).requires_grad_(False).eval()


def _graph_for_pt2e(model: nn.Module, calibration: Tensor) -> nn.Module:
    # A graph has the very weights of its model, and the conversion would round them there.
    model = copy.deepcopy(model)
    # Twice the same: a batch of one would be taken for a fixed size.
    example = torch.cat([calibration[:1], calibration[:1]])
    return capture_graph(model, (example,), any_batch=True).module()


class EvalGraph(nn.Module):
    """A graph that torch.export made, with `train()` and `eval()`, which it refuses by itself."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, x: Tensor) -> Any:
        return self.graph(x)

    def train(self, mode: bool = True) -> EvalGraph:
        self.training = mode
        return self
