"""Export to ONNX: a model for ONNX Runtime, in fp32 and in whole numbers of 8 bits.

Problem    A product has a runtime already, and it reads ONNX. On x86 servers and laptops, kernels
           for whole numbers are much faster than those for fp32, if a file asks for them.
Idea       Write the model down in the operators of ONNX. Then show it some images, note the range
           of each tensor, and store weights as whole numbers. The kernel multiplies and sums whole
           numbers, and the scales multiply the sum at the end:

               y[n] = scale_x scale_w[n] sum_k (Qx[k] - zero) Qw[n, k]      sums of 32 bits

Saves      3 of the 4 bytes of a weight. Time, where a CPU has instructions for four products of 8
           bits at once (VNNI) and the layers are large enough to be limited by arithmetic. The four
           products are summed, so a layer gains that sums over many channels: a 1 x 1 convolution
           or a matrix product. A depthwise convolution sums over none, and takes as long as before.
Costs      A calibration set; a small loss of accuracy. Without VNNI, pairs of products are summed
           in 16 bits and overflow without a word: weights get 7 bits there. Activations have to be
           without a sign and weights with one, as the instruction of VNNI wants them: with other
           types ONNX Runtime takes other kernels, and 8 bits gain little time or none.
Use when   The model goes to Windows, a server without PyTorch, a browser, or an NPU with a provider
           for ONNX Runtime.
Not when   The images are tiny: then the time is that of calling operators, and 8 bits gain none.
           A phone app has ExecuTorch or Core ML already.
In production   `optimum-cli export onnx` and `optimum-cli onnxruntime quantize`; ONNX Runtime with
           its providers (OpenVINO, CoreML, QNN, TensorRT); OpenVINO's NNCF.
Source     ONNX Runtime documentation, "Quantize ONNX models"; Jacob et al., arXiv 1712.05877.

Optional: `pip install onnx onnxscript onnxruntime`. What they print goes to a file.

Shapes: M rows, K inputs, N outputs of a layer.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import check_existing_file, check_file, check_flag, check_whole
from recipes_lib.core.measure.machine import require
from recipes_lib.core.model.linears import require_module
from recipes_lib.edge._exported_file import ExportedFile
from recipes_lib.edge._graph_capture import (
    capture_graph,
    check_calibration,
    check_example,
    explained,
)
from recipes_lib.edge._noise import noise_to

# What a quantized file must not do in fp32.
LAYERS = ("Conv", "Gemm", "MatMul")
# An instruction sums four products of 8 bits. An image has one channel or three.
PRODUCTS_AT_ONCE = 4
INPUT_TYPES = {"tensor(float)": torch.float32, "tensor(int64)": torch.int64}

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_whole_number_layer(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times `weight` [N, K] in whole numbers; the scales multiply the sums."""
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
    log: Path | str | None = None,
) -> ExportedFile:
    """Write `model` as an .onnx file with its weights in it. The model stays as it is.

    A Hugging Face model becomes a graph that returns its logits.

    Args:
        model: in fp32 on a CPU.
        example: the inputs of one call. The file takes inputs of these shapes.
        path: of the file, such as "model.onnx". Its folder is made where it does not exist.
        any_batch: the first dimension of all inputs may differ from call to call. Give an example
            of 2 or more then.
        log: a file for what the libraries print. None: it is not kept.
    Raises ValueError for a path that is none, a model that cannot be written down as a graph, an
    example that it does not take, and an operator without a counterpart in ONNX. No file is written
    then. Raises ImportError without onnx and onnxscript.
    """
    check_file(example="model.onnx", path=path)
    check_flag(any_batch=any_batch)
    require_module(model)
    example = check_example(example)
    path = Path(path)
    started = time.perf_counter()
    with noise_to(log):
        require("onnx")
        require("onnxscript")
        graph = capture_graph(model, example, any_batch=any_batch)
        names = [f"input_{number}" for number in range(len(example))]
        try:
            program = torch.onnx.export(
                graph, dynamo=True, verbose=False, input_names=names, output_names=["output"]
            )
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} uses an operator that ONNX does not have: replace it by "
                f"ordinary ones ({explained(error)})"
            ) from error
        _save(_without_remarks(program.model_proto), path)
    seconds = time.perf_counter() - started
    return ExportedFile(path, path.stat().st_size, seconds)


def quantize_onnx(
    path: Path | str,
    *,
    calibration: Tensor,
    to: Path | str,
    per_channel: bool = True,
    first_in_fp32: bool = True,
    batch_size: int = 32,
    log: Path | str | None = None,
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
        batch_size: of the calibration, in a file that takes any batch size. Others are given
            batches of the size that they take.
        log: a file for what the libraries print. None: it is not kept.
    Raises ValueError for a calibration set without examples, of zeros alone or with numbers that
    are not finite, examples of another shape, a file that does not exist or is quantized already, a
    path that is none, and where another layer stays in fp32.
    Raises ImportError without onnx and onnxruntime.
    """
    check_whole(batch_size=batch_size)
    check_flag(per_channel=per_channel, first_in_fp32=first_in_fp32)
    check_file(example="quantized.onnx", to=to)
    path = _existing(path)
    to = Path(to)
    started = time.perf_counter()
    session = load_onnx(path)
    batches = _batches(session, calibration, batch_size=batch_size)
    with noise_to(log), tempfile.TemporaryDirectory() as folder:
        onnx = require("onnx")
        _check_not_quantized(onnx.load(str(path)), path)
        ready = Path(folder) / "ready.onnx"
        result = Path(folder) / "quantized.onnx"
        _prepared_file(path, ready)
        in_fp32 = []
        if first_in_fp32:
            in_fp32 = _layers_that_read_an_image(onnx.load(str(ready)))
        _quantized_file(ready, result, batches, per_channel=per_channel, in_fp32=in_fp32)
        model = onnx.load(str(result))
        _check_layers(model, in_fp32=in_fp32)
        _save(model, to)
    seconds = time.perf_counter() - started
    return ExportedFile(to, to.stat().st_size, seconds)


def _prepared_file(path: Path, ready: Path) -> None:
    """Infer shapes and fold batch norms: what is calibrated is what will run."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(str(path), str(ready))


def _quantized_file(
    ready: Path,
    result: Path,
    batches: list[dict[str, Any]],
    *,
    per_channel: bool,
    in_fp32: list[str],
) -> None:
    """Calibrate, and quantize all layers but those that are named in `in_fp32`."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rest = iter(batches)

        def get_next(self) -> dict[str, Any] | None:
            return next(self.rest, None)

    quantize_static(
        str(ready),
        str(result),
        Reader(),
        per_channel=per_channel,
        reduce_range=overflows_in_16_bits(),
        # Only this pair of types reaches VNNI: its instruction multiplies unsigned by signed.
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=in_fp32,
    )


def _layers_that_read_an_image(model: Any) -> list[str]:
    """Names of the convolutions that sum over less than four channels, depthwise ones aside."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    found = []
    for node in model.graph.node:
        if node.op_type != "Conv" or node.input[1] not in weights:
            continue
        groups = 1  # what ONNX means where a node does not say it
        for attribute in node.attribute:
            if attribute.name == "group":
                groups = attribute.i
        channels = weights[node.input[1]].dims[1]  # of [K, C / groups, H, W]
        if groups == 1 and channels < PRODUCTS_AT_ONCE:
            found.append(node.name)
    return found


class OnnxModel:
    """A loaded .onnx file: call it with tensors of the shapes of its export.

    `load_seconds` is the time from the file to a session that can run, libraries not counted.
    """

    def __init__(self, session: Any, *, path: Path, threads: int, load_seconds: float) -> None:
        self._session = session
        self.path = path
        self.threads = threads
        self.load_seconds = load_seconds
        inputs = session.get_inputs()
        self.input_names = tuple(info.name for info in inputs)
        # A number, or the name of a size that may differ.
        self.input_shapes = tuple(tuple(info.shape) for info in inputs)
        self._dtypes = tuple(INPUT_TYPES.get(info.type) for info in inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        """One forward: a tensor, or a tuple where the graph returns several.

        Raises ValueError for another number of inputs, other shapes and other dtypes than those of
        the export.
        """
        self.check(inputs)
        arrays = [part.detach().numpy() for part in inputs]
        outputs = self._session.run(None, dict(zip(self.input_names, arrays)))
        tensors = [torch.from_numpy(array) for array in outputs]
        if len(tensors) == 1:
            return tensors[0]
        return tuple(tensors)

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raises ValueError for inputs that the graph does not take."""
        fits = len(inputs) == len(self.input_shapes)
        for part, shape, dtype in zip(inputs, self.input_shapes, self._dtypes):
            if not isinstance(part, Tensor):
                raise ValueError(f"{type(part).__name__} is no tensor: give tensors")
            fits = fits and part.dtype is dtype and part.dim() == len(shape)
            # A size with a name takes any number.
            fits = fits and all(
                isinstance(size, str) or size == given for size, given in zip(shape, part.shape)
            )
        if not fits:
            given = ", ".join(f"{list(part.shape)} in {part.dtype}" for part in inputs)
            takes = ", ".join(
                f"{list(shape)} in {dtype}" for shape, dtype in zip(self.input_shapes, self._dtypes)
            )
            raise ValueError(
                f"{self.path.name} takes {takes}, not {given}: give inputs of these shapes, or "
                f"export with another example"
            )


def load_onnx(path: Path | str, *, threads: int = 1) -> OnnxModel:
    """Load an .onnx file into ONNX Runtime, on the CPU. What it prints is kept away.

    Args:
        threads: of this session. `torch.set_num_threads` does not change them.
    Raises ValueError for a file that does not exist or is no ONNX, and for a number of threads
    below 1. Raises ImportError without onnxruntime.
    """
    check_whole(threads=threads)
    path = _existing(path)
    with noise_to():
        require("onnxruntime")
        started = time.perf_counter()
        session = _session(path, _options(threads))
        seconds = time.perf_counter() - started
    return OnnxModel(session, path=path, threads=threads, load_seconds=seconds)


def operators_that_run(path: Path | str) -> dict[str, int]:
    """How often each operator runs in one forward of the .onnx file `path`.

    ONNX Runtime fuses operators when it loads a file: a convolution between numbers of 8 bits and
    its activation become one `QLinearConv`. A `Conv` that is left runs in fp32. Transposes are not
    counted: which of them come on top depends on the processor. Errors as in `load_onnx`.
    """
    path = _existing(path)
    with noise_to(), tempfile.TemporaryDirectory() as folder:
        runtime = require("onnxruntime")
        onnx = require("onnx")
        fused = Path(folder) / "fused.onnx"
        options = _options(threads=1)
        options.optimized_model_filepath = str(fused)
        # One level below the highest, which arranges numbers for this processor.
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        _session(path, options)
        graph = onnx.load(str(fused)).graph
    return dict(Counter(node.op_type for node in graph.node))


def _existing(path: Path | str) -> Path:
    check_existing_file(made_by="export_to_onnx", path=path)
    return Path(path)


def _options(threads: int) -> Any:
    """Of a session that uses so many threads; everything that ONNX Runtime can fuse is fused."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return options


def _session(path: Path, options: Any) -> Any:
    import onnxruntime

    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ValueError(
            f"{path.name} cannot be loaded: give a file of ONNX ({explained(error)})"
        ) from error


# --- guards ---------------------------------------------------------------------------------------


def overflows_in_16_bits() -> bool:
    """Whether this machine sums pairs of 8-bit products in 16 bits: x86 without VNNI."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    return not torch.cpu._is_vnni_supported()


def _batches(session: OnnxModel, calibration: Any, *, batch_size: int) -> list[dict[str, Any]]:
    """The calibration set as ONNX Runtime wants it, in batches that the file takes."""
    check_calibration(calibration)
    fixed = session.input_shapes[0][0]
    if not isinstance(fixed, str):
        batch_size = fixed
    batches = list(calibration.split(batch_size))
    if not isinstance(fixed, str) and len(batches) > 1 and len(batches[-1]) != fixed:
        batches.pop()  # what is left over fills no batch
    for batch in batches:
        session.check([batch])
    return [{session.input_names[0]: batch.numpy()} for batch in batches]


def _check_not_quantized(model: Any, path: Path) -> None:
    """A second rounding uses another grid, and the file becomes larger."""
    if any(node.op_type == "QuantizeLinear" for node in model.graph.node):
        raise ValueError(
            f"{path.name} is quantized already, and a second rounding would use another grid: give "
            f"the file that export_to_onnx has written"
        )


def _check_layers(model: Any, *, in_fp32: list[str]) -> None:
    """Every layer reads its weight in whole numbers, but those that are named."""
    whole = {
        output
        for node in model.graph.node
        if node.op_type == "DequantizeLinear"
        for output in node.output
    }
    layers = [
        node for node in model.graph.node if node.op_type in LAYERS and node.name not in in_fp32
    ]
    left = [node.name for node in layers if node.input[1] not in whole]
    if not layers:
        raise ValueError(
            "the file has no convolution of four channels or more and no matrix product: nothing "
            "to quantize"
        )
    if left:
        raise ValueError(
            f"{len(left)} of {len(layers)} layers stay in fp32: {', '.join(left[:5])}. Their "
            f"weights must be constants of the graph"
        )


def _without_remarks(model: Any) -> Any:
    """Each node remembers its line in Python: a tenth of the file of a small model."""
    for part in [*model.graph.node, *model.graph.value_info, *model.graph.input]:
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    for part in (model, model.graph):
        part.ClearField("metadata_props")
    return model


def _save(model: Any, path: Path) -> None:
    """A file that is whole, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(model.SerializeToString())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_onnx_bytes(
    model: nn.Module, *, quantized: bool = False, first_in_fp32: bool = True
) -> int:
    """Bytes of the weights in the .onnx file of `model`, whose batch norms are folded.

    In fp32 a weight takes four bytes, and each output channel four for its bias. Quantized, a
    weight takes one byte; a channel takes four for its bias in 32 bits, four for its scale, one for
    its zero, and five more for scale and zero of its bias. The graph comes on top, some hundred
    bytes per operator. `first_in_fp32` as in `quantize_onnx`. Raises ValueError for what is no
    module.
    """
    check_flag(quantized=quantized, first_in_fp32=first_in_fp32)
    require_module(model)
    total = 0
    for part in model.modules():
        if not isinstance(part, nn.Conv2d | nn.Linear):
            continue
        per_weight = 4
        per_channel = 4
        if quantized and not (first_in_fp32 and _reads_an_image(part)):
            per_weight = 1
            per_channel = 4 + 4 + 1
        total += per_weight * part.weight.numel() + per_channel * len(part.weight)
    return total


def _reads_an_image(layer: nn.Module) -> bool:
    """The same layers as `_layers_that_read_an_image` finds in a graph."""
    if not isinstance(layer, nn.Conv2d):
        return False
    return layer.groups == 1 and layer.in_channels < PRODUCTS_AT_ONCE
