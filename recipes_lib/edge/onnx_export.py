"""Export to ONNX: a model for ONNX Runtime, in fp32 and in whole numbers of 8 bits.

Problem    A product has a runtime already, and it reads ONNX. On x86 servers and laptops, kernels
           for whole numbers are much faster than those for fp32, if a file asks for them.
Idea       Write the model down in the operators of ONNX. Then show it some images, note the range
           of each tensor, and store weights as whole numbers. The kernel multiplies and sums whole
           numbers, and the scales multiply the sum at the end:

               y[n] = scale_x scale_w[n] sum_k (Qx[k] - zero) Qw[n, k]      sums of 32 bits

Saves      3 of the 4 bytes of a weight. Time, where a CPU sums four products of 8 bits at once
           (VNNI): in layers that sum over many channels, so not in depthwise convolutions.
Costs      A calibration set; a small loss of accuracy. Without VNNI, pairs of products overflow in
           16 bits without a word: weights get 7 bits there. VNNI wants activations without a sign
           and weights with one: with other types 8 bits gain little time or none.
Use when   The model goes to Windows, a server without PyTorch, a browser, or an NPU with a provider
           for ONNX Runtime.
Not when   The images are tiny: then much of the time is that of calling operators, and 8 bits gain
           less. A phone app has ExecuTorch or Core ML already.
In production   `optimum-cli export onnx` and `optimum-cli onnxruntime quantize`; ONNX Runtime with
           its providers (OpenVINO, CoreML, QNN, TensorRT); OpenVINO's NNCF.
Source     ONNX Runtime documentation, "Quantize ONNX models"; Jacob et al., arXiv 1712.05877.

Optional: `pip install onnx onnxscript onnxruntime`. Shapes: M rows, K inputs, N outputs of a layer.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.measure.machine import require
from recipes_lib.edge._exported_file import ExportedFile, whole_or_none
from recipes_lib.edge._graph import capture_graph, sparing_the_collector
from recipes_lib.edge._silenced_libraries import noise_to

# What a quantized file must not do in fp32.
LAYERS = ("Conv", "Gemm", "MatMul")
# An instruction sums four products of 8 bits. An image has one channel or three.
PRODUCTS_AT_ONCE = 4

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_whole_number_layer(x: Tensor, weight: Tensor) -> Tensor:
    """As ONNX Runtime does: x [M, K] times `weight` [N, K] in whole numbers, then the scales."""
    scale_w = weight.abs().amax(dim=1) / 127  # [N]
    whole_w = (weight / scale_w[:, None]).round().int()
    smallest = x.min().clamp(max=0)  # 0 is one of the levels
    scale_x = (x.max().clamp(min=0) - smallest) / 255
    zero = (-smallest / scale_x).round()
    whole_x = (x / scale_x + zero).round().clamp(0, 255).int() - zero.int()  # [M, K]
    sums = whole_x @ whole_w.T  # [M, N], exact
    return scale_x * scale_w * sums


# --- the technique --------------------------------------------------------------------------------


def export_to_onnx(
    model: nn.Module,
    example: tuple[Tensor, ...],
    *,
    path: Path | str,
    any_batch: bool = False,
) -> ExportedFile:
    """Write `model` as an .onnx file with its weights in it. The model stays as it is.

    A Hugging Face model becomes a graph that returns its logits.

    Args:
        model: in fp32 on a CPU.
        example: the inputs of one call. The file takes inputs of these shapes.
        path: of the file, such as "model.onnx". Its folder is made where it does not exist.
        any_batch: the first dimension of all inputs may differ from call to call. Give an example
            of 2 or more then.
    """
    path = Path(path)
    started = time.perf_counter()
    with noise_to():
        require("onnx")
        require("onnxscript")
        graph = capture_graph(model, example, any_batch=any_batch)
        names = [f"input_{number}" for number in range(len(example))]
        with sparing_the_collector():
            program = torch.onnx.export(
                graph, dynamo=True, verbose=False, input_names=names, output_names=["output"]
            )
        _save_onnx(_without_remarks(program.model_proto), path)
    seconds = time.perf_counter() - started
    return ExportedFile(path, path.stat().st_size, seconds)


def quantize_onnx(
    path: Path | str,
    *,
    calibration: Tensor,
    to: Path | str,
    per_channel: bool = True,
    first_in_fp32: bool = True,
) -> ExportedFile:
    """Write the .onnx file `path` once more, with weights and activations in 8 bits.

    Args:
        path: what `export_to_onnx` wrote for a model with one input.
        calibration: inputs [N, ...] as the model will see them; some hundred are enough.
        to: the new file.
        per_channel: a scale for each channel of a weight; False: one for the whole of it.
        first_in_fp32: a convolution that reads an image, so less than four channels, stays as it
            is. It gains no time in 8 bits, for the fast kernels take four channels at once. False:
            it gets 8 bits as well, for a device that has nothing else.
    """
    to = Path(to)
    started = time.perf_counter()
    session = load_onnx(path)
    with noise_to(), tempfile.TemporaryDirectory() as folder:
        onnx = require("onnx")
        from onnxruntime.quantization import QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

        ready = Path(folder) / "ready.onnx"
        result = Path(folder) / "quantized.onnx"
        # Infer shapes and fold batch norms: what is calibrated is what will run.
        quant_pre_process(str(path), str(ready))
        in_fp32 = []
        if first_in_fp32:
            in_fp32 = _layers_that_read_an_image(onnx.load(str(ready)))
        quantize_static(
            str(ready),
            str(result),
            _CalibrationBatches(session, calibration),
            per_channel=per_channel,
            reduce_range=overflows_in_16_bits(),
            # Only this pair of types reaches VNNI: its instruction multiplies unsigned by signed.
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=in_fp32,
        )
        model = onnx.load(str(result))
        _check_layers_are_whole_numbers(model, in_fp32=in_fp32)
        _save_onnx(model, to)
    seconds = time.perf_counter() - started
    return ExportedFile(to, to.stat().st_size, seconds)


class _CalibrationBatches:
    """The calibration set as ONNX Runtime asks for it, in batches that the file takes."""

    def __init__(self, session: OnnxModel, calibration: Tensor) -> None:
        """Images for ONNX Runtime to calibrate with, in batches that the graph takes."""
        [(self.name, shape)] = session.inputs.items()
        batch_size = 32
        if not isinstance(shape[0], str):  # not the name of a size that may differ
            batch_size = shape[0]
            calibration = calibration[: max(1, len(calibration) // batch_size) * batch_size]
        self.rest = iter(calibration.split(batch_size))

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self.rest, None)
        if batch is None:
            return None
        return {self.name: batch.numpy()}


def _layers_that_read_an_image(model: Any) -> list[str]:
    """In the .onnx file: convolutions over less than four channels, depthwise ones aside."""
    shapes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    found = []
    for node in model.graph.node:
        groups = [attribute.i for attribute in node.attribute if attribute.name == "group"]
        if node.op_type != "Conv" or groups not in ([], [1]) or node.input[1] not in shapes:
            continue
        channels = shapes[node.input[1]][1]  # of [K, C / groups, H, W]
        if channels < PRODUCTS_AT_ONCE:
            found.append(node.name)
    return found


class OnnxModel:
    """A loaded .onnx file: call it with tensors of the shapes and dtypes of its export."""

    def __init__(self, session: Any, *, load_seconds: float) -> None:
        self._session = session
        self.load_seconds = load_seconds
        # Each size is a number, or the name of one that may differ.
        self.inputs = {info.name: tuple(info.shape) for info in session.get_inputs()}

    def __call__(self, *inputs: Tensor) -> Any:
        """One forward of the .onnx file: a tensor, or a tuple where the graph returns several."""
        arrays = [part.detach().numpy() for part in inputs]
        outputs = self._session.run(None, dict(zip(self.inputs, arrays, strict=True)))
        tensors = [torch.from_numpy(array) for array in outputs]
        if len(tensors) == 1:
            return tensors[0]
        return tuple(tensors)


def load_onnx(path: Path | str) -> OnnxModel:
    """Load an .onnx file into ONNX Runtime, on one thread of the CPU."""
    with noise_to():
        require("onnxruntime")
        started = time.perf_counter()
        session = _session_of_onnx(path)
        seconds = time.perf_counter() - started
    return OnnxModel(session, load_seconds=seconds)


def operators_that_run(path: Path | str) -> dict[str, int]:
    """How often each operator runs in one forward of the .onnx file `path`.

    ONNX Runtime fuses operators when it loads a file: a convolution between numbers of 8 bits and
    its activation become one `QLinearConv`. A `Conv` that is left runs in fp32. Transposes are not
    counted: which of them come on top depends on the processor. Errors as in `load_onnx`.
    """
    with noise_to(), tempfile.TemporaryDirectory() as folder:
        runtime = require("onnxruntime")
        onnx = require("onnx")
        fused = Path(folder) / "fused.onnx"
        # One level below the highest, which arranges numbers for this processor.
        level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        _session_of_onnx(path, optimized_model_filepath=str(fused), graph_optimization_level=level)
        graph = onnx.load(str(fused)).graph
    return dict(Counter(node.op_type for node in graph.node))


def _session_of_onnx(path: Path | str, **settings: Any) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    for name, value in settings.items():
        setattr(options, name, value)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def overflows_in_16_bits() -> bool:
    """Whether ONNX Runtime sums pairs of 8-bit products in 16 bits here: on x86 without VNNI."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    return not torch.cpu._is_vnni_supported()


def _check_layers_are_whole_numbers(model: Any, *, in_fp32: list[str]) -> None:
    """Every layer of the .onnx file reads its weight in whole numbers, but those that are named."""
    nodes = model.graph.node
    whole = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    layers = [node for node in nodes if node.op_type in LAYERS and node.name not in in_fp32]
    left = [node.name for node in layers if node.input[1] not in whole]
    if not layers or left:
        raise ValueError(
            f"{len(layers)} layers could be quantized (a convolution needs four channels), and "
            f"these of them stay in fp32, as their weights are no constants: {left[:5]}"
        )


def _without_remarks(model: Any) -> Any:
    """In ONNX each node remembers its line in Python: a tenth of the file of a small model."""
    for part in [*model.graph.node, *model.graph.value_info, *model.graph.input]:
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    for part in (model, model.graph):
        part.ClearField("metadata_props")
    return model


def _save_onnx(model: Any, path: Path) -> None:
    with whole_or_none(path) as unfinished:
        unfinished.write_bytes(model.SerializeToString())
