import time

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from recipes_lib.core.measure import operator_profile
from recipes_lib.core.measure.operator_profile import KINDS, profile_operators
from recipes_lib.core.model import model_of_shape
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from tests.training_step import training_step


def test_kinds_add_up_to_the_step():
    """And each operator is in the kind that a reader would look for it in."""
    model = apply_chunked_cross_entropy(model_of_shape("tiny-llama", device="cpu"))
    step = training_step(model, rows=4)
    step()  # makes the states of AdamW
    start = time.perf_counter()
    kinds = profile_operators(step)
    took = time.perf_counter() - start
    assert tuple(kinds) == KINDS
    assert 0 < sum(kinds.values()) <= took
    here = {kind for kind, seconds in kinds.items() if seconds > 0}
    assert here == set(KINDS) - {"unpacking of 4 bits"}


def test_the_largest_kind_is_what_the_step_does():
    """Would catch seconds of an operator that count again in the one that called it."""
    left = torch.randn(700, 700, requires_grad=True)

    def products():
        torch.nn.functional.linear(left, left).sum().backward()

    kinds = profile_operators(products)
    assert kinds["matrix products"] > 0.5 * sum(kinds.values())
    kinds = profile_operators(lambda: time.sleep(0.05))
    assert kinds["other"] == pytest.approx(sum(kinds.values()))


def test_on_a_gpu_each_kernel_counts_once():
    """It has an event of its own beside its operator's, and a step has one that spans kernels."""

    def event(name, device, *, kernel=None):
        made = FunctionEvent(
            0, name, thread=1, start_us=0, end_us=90, use_device="cuda", device_type=device
        )
        if kernel is not None:
            made.append_kernel(name, 0, kernel)
        return made

    events = [
        event("aten::mm", DeviceType.CPU, kernel=50),
        event("triton_poi_fused_add", DeviceType.CPU, kernel=30),
        event("triton_poi_fused_add", DeviceType.CUDA),
        event("Optimizer.step#AdamW.step", DeviceType.CPU, kernel=10),
        event("Optimizer.step#AdamW.step", DeviceType.CUDA),
    ]
    kinds = operator_profile._seconds_by_kind(events, on_cuda=True)
    found = {kind: round(seconds * 1e6) for kind, seconds in kinds.items() if seconds}
    assert found == {"matrix products": 50, "elementwise and norms": 30, "optimizer": 10}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("bitsandbytes::dequantize_4bit", "unpacking of 4 bits"),
        ("aten::_to_copy", "casts and copies"),
        ("aten::mul", "elementwise and norms"),
        ("aten::tanh", "elementwise and norms"),  # begins with the name of a view, aten::t
        ("## Call CompiledFxGraph f3ab ##", "elementwise and norms"),
        ("aten::_log_softmax_backward_data", "loss"),
        ("aten::transpose", "other"),
        ("autograd::engine::evaluate_function: MmBackward0", "other"),
    ],
)
def test_kind_by_name(name, kind):
    assert operator_profile._kind_by_name(name) == kind


@pytest.mark.gpu
def test_seconds_of_the_device_on_gpu():
    """Those of the CPU are of launches. A step of one large product is the product."""
    left = torch.randn(4096, 4096, device="cuda")

    def product():
        for _ in range(8):
            left @ left

    product()
    kinds = profile_operators(product)
    assert kinds["matrix products"] > 0.5 * sum(kinds.values())
    assert min(kinds.values()) >= 0
