"""Whole numbers in the graph: PT2E quantization, calibrated or trained, for 8-bit kernels.

Problem    Phones multiply whole numbers of 8 bits, and 4 bytes per weight make a file large. A
           kernel needs to know the grid of each tensor before it runs: the activations' as well.
Idea       Write the model down as a graph, and put a rounding behind every tensor that a kernel
           will hold in 8 bits. Run some images, and note the smallest and the largest number that
           come by: they set the steps of each grid. (The library cuts off rare outliers.)

               q = round(x / scale) + zero        from -128 to 127
               x ≈ (q - zero) scale

           Weights are symmetric: zero is 0, and the scale is max |W| / 127 for each channel. With
           `train`, the model learns weights that survive these roundings (quantization-aware
           training, QAT). Rounding has no gradient, so the gradient passes straight through.
Saves      3 of the 4 bytes of a weight in the file, and time where the kernels for whole numbers
           are the faster ones.
Costs      A calibration set. Accuracy, more of it with one scale for a whole weight, and much with
           3 or 4 bits. QAT costs epochs of training at some three times the price.
Use when   The .pte goes to a device with 8-bit kernels, or must be small. QAT where calibration
           alone loses too much: 3 and 4 bits, or one scale per weight.
Not when   Speed on x86 is what counts: XNNPACK gains size there, `onnx_export` speed. Fewer than 8
           bits are simulated here: they use fewer levels, and take a byte in the file.
In production   torchao `prepare_pt2e`, `prepare_qat_pt2e` and `convert_pt2e` with the quantizer of
           a backend (XNNPACK, Core ML, Qualcomm, X86Inductor).
Source     Jacob et al., arXiv 1712.05877; Bengio et al., arXiv 1308.3432 (straight through);
           torchao documentation, "PyTorch 2 Export Quantization".

Needs torchao and, for its quantizer, ExecuTorch: `pip install executorch`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import check_whole
from recipes_lib.core.measure.machine import require
from recipes_lib.edge._graph import capture_graph, check_calibration
from recipes_lib.edge._noise import noise_to

LAYERS = ("aten.conv", "aten.linear")  # of a graph, with weights

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_grid(smallest: float, largest: float) -> tuple[float, int]:
    """Scale and zero of 256 levels between two numbers; 0 is one of the levels."""
    smallest = min(smallest, 0.0)
    largest = max(largest, 0.0)
    scale = (largest - smallest) / 255
    zero = round(-128 - smallest / scale)
    return scale, max(-128, min(zero, 127))


def plain_fake_quantize(x: Tensor, scale: Tensor | float, zero: int, most: int) -> Tensor:
    """x on its grid up to `most`, still in fp32; the gradient passes as if nothing had happened."""
    least = -128
    if zero == 0:
        least = -most  # weights: as many levels below 0 as above
    levels = ((x / scale).round() + zero).clamp(least, most)
    rounded = (levels - zero) * scale
    return x + (rounded - x).detach()


def plain_weight(weight: Tensor, bits: int) -> Tensor:
    """A weight [N, ...] on its grid, with a scale for each of the N channels."""
    most = 2 ** (bits - 1) - 1
    largest = weight.detach().flatten(1).abs().amax(dim=1)  # [N]
    scale = (largest / most).view(-1, *[1] * (weight.dim() - 1))
    return plain_fake_quantize(weight, scale, zero=0, most=most)


# --- the technique --------------------------------------------------------------------------------


def quantize_pt2e(
    model: nn.Module,
    calibration: Tensor,
    *,
    train: Callable[[nn.Module], Any] | None = None,
    weight_bits: int = 8,
    per_channel: bool = True,
    batch_size: int = 64,
    log: Path | str | None = None,
) -> GraphWithModes:
    """A graph of `model` with activations in 8 bits and weights in `weight_bits`, for inference.

    The model stays as it is. The graph computes the roundings in fp32, so its accuracy can be
    measured at once; `export_to_executorch` makes a .pte of it whose kernels hold whole numbers.

    Args:
        model: in fp32 on a CPU, with one input. Of a Hugging Face model the graph returns logits.
        calibration: inputs [N, ...] as the model will see them; some hundred are enough.
        train: a function that trains the module it is given, in place: QAT. That module has the
            roundings in it, takes any batch size, and can be put into train and eval mode. Images
            that it sees in eval mode still move the ranges of activations a little: test with the
            graph that is returned. None: calibration alone (PTQ).
        weight_bits: from 2 to 8. Fewer than 8 are simulated.
        per_channel: a scale for each channel of a weight; False: one for the whole of it.
        batch_size: of the calibration.
        log: a file for what the libraries print. None: it is not kept.
    Raises ValueError for a calibration set that is empty, zero everywhere or not finite, bits out
    of range, a model without layers to quantize or quantized already, and a training that leaves
    weights which are not finite. Raises ImportError without ExecuTorch and torchao.
    """
    check_whole(least=2, most=8, weight_bits=weight_bits)
    check_whole(batch_size=batch_size)
    check_calibration(calibration)
    with noise_to(log):
        require("executorch")
        require("torchao")
        from torchao.quantization.pt2e.quantize_pt2e import (
            convert_pt2e,
            prepare_pt2e,
            prepare_qat_pt2e,
        )

        prepare = prepare_pt2e
        if train is not None:
            prepare = prepare_qat_pt2e
        graph = _graph_of(model, calibration, training=train is not None)
        quantizer = _quantizer(weight_bits, per_channel=per_channel, training=train is not None)
        prepared = GraphWithModes(prepare(graph, quantizer)).eval()  # batch norms must not move
        # The ranges of the calibration are where a training starts.
        with torch.no_grad():
            for batch in calibration.split(batch_size):
                prepared(batch)
    if train is not None:
        train(prepared.train())
        _check_trained(prepared)
    with noise_to(log):
        converted = GraphWithModes(convert_pt2e(prepared.eval().graph))
        return converted.requires_grad_(False).eval()


def _graph_of(model: nn.Module, calibration: Tensor, *, training: bool) -> nn.Module:
    """The operators of `model`, which has something to quantize, and is not quantized yet."""
    # A graph has the very weights of its model, and training would change them there.
    model = copy.deepcopy(model)
    # Twice the same: a batch of one would be taken for a fixed size.
    example = torch.cat([calibration[:1], calibration[:1]])
    graph = capture_graph(model, (example,), any_batch=True, training=training).module()
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    if any(name.startswith("quantized_decomposed.") for name in names):
        raise ValueError(
            "this graph is quantized already, and a second rounding would use another grid: give "
            "the model as it was before"
        )
    if not any(name.startswith(LAYERS) for name in names):
        raise ValueError(
            "the model has no convolution and no linear layer: there is nothing to quantize"
        )
    return graph


def _quantizer(weight_bits: int, *, per_channel: bool, training: bool) -> Any:
    """XNNPACK's: it says which tensors of a graph its kernels hold in 8 bits."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    most = 2 ** (weight_bits - 1) - 1
    settings = get_symmetric_quantization_config(
        is_per_channel=per_channel, is_qat=training, weight_qmin=-most, weight_qmax=most
    )
    if training:
        settings = _with_exact_weight_grid(settings, per_channel=per_channel)
    return XNNPACKQuantizer().set_global(settings)


def _with_exact_weight_grid(settings: Any, *, per_channel: bool) -> Any:
    """Training rounds weights to the grid that the conversion has.

    The fused fake quantization, which is the default, takes the levels from -3 to 3 for a grid that
    goes down to -4, and its scale is another one. With 8 bits that is hardly seen. With 3 bits the
    model learns a grid that it does not get, and ends up worse than without training.
    """
    from torchao.quantization.pt2e import (
        FakeQuantize,
        MovingAverageMinMaxObserver,
        MovingAveragePerChannelMinMaxObserver,
    )

    observer = MovingAverageMinMaxObserver
    if per_channel:
        observer = MovingAveragePerChannelMinMaxObserver
    # 1: the range of the weights as they are now, with no memory of earlier ones.
    rounding = FakeQuantize.with_args(observer=observer, averaging_constant=1.0)
    weight = dataclasses.replace(settings.weight, observer_or_fake_quant_ctr=rounding)
    return dataclasses.replace(settings, weight=weight)


class GraphWithModes(nn.Module):
    """A graph that torch.export made, with `train()` and `eval()` for every training loop.

    The graph itself refuses both: dropout and batch norm of one mode are written into it. Here they
    are exchanged for those of the other.
    """

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, x: Tensor) -> Any:
        """As the graph's."""
        return self.graph(x)

    def train(self, mode: bool = True) -> GraphWithModes:
        """Also called by `eval()`."""
        self.training = mode
        return self

    @property
    def training(self) -> bool:
        """Whether dropout and batch norm are those of training."""
        return self._training

    @training.setter
    def training(self, mode: bool) -> None:
        # Also who sets the attribute alone, as `core.classify` does, changes the mode. Otherwise a
        # look at the accuracy would run with dropout, and move the statistics of batch norms.
        from torchao.quantization.pt2e import (
            move_exported_model_to_eval,
            move_exported_model_to_train,
        )

        self._training = mode
        if "graph" not in vars(self).get("_modules", {}):
            return  # nn.Module sets it before there is a graph
        if mode:
            move_exported_model_to_train(self.graph)
        else:
            move_exported_model_to_eval(self.graph)


def _check_trained(prepared: nn.Module) -> None:
    """The conversion makes whole numbers of a NaN, and nobody would see it any more."""
    for name, weight in prepared.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(
                f"{name} is not finite after the training: it has diverged, train with a smaller "
                f"learning rate"
            )
