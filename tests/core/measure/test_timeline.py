"""The timeline adds up to the account, and calls each tensor what it is."""

import itertools
import threading

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from recipes_lib.attention.block_sparse import apply_block_sparse
from recipes_lib.core.measure import PeakMemory, measure
from recipes_lib.core.measure import timeline as timeline_module
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.measure.timeline import record_timeline
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.bytes_of_tensors import state_tensors, storage_bytes, weight_bytes

ROWS, WIDTH = 32, 64
FULL = 4 * ROWS * WIDTH  # bytes of one [ROWS, WIDTH] tensor


class Known(torch.nn.Module):
    """Three linear layers with a tanh behind each, of which every byte is known."""

    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)
        )
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(self.block, layer, x, use_reentrant=False)
            else:
                x = self.block(layer, x)
        return x.sum()

    @staticmethod
    def block(layer, x):
        return layer(x).tanh()


def known_step(**options):
    model = Known(**options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(ROWS, WIDTH)

    def step():
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # AdamW makes its states
    return model, optimizer, step


def most(timeline, kind, phase):
    return max(point.bytes[kind] for point in timeline.points if point.phase == phase)


def test_kinds_are_exact_on_a_known_step():
    """Catches a tensor under the wrong kind: every number here is known from the shapes."""
    model, optimizer, step = known_step()
    timeline = record_timeline(step, model=model, optimizer=optimizer)
    weights = 4 * 3 * WIDTH * WIDTH
    for point in timeline.points:
        assert point.bytes["weights"] == weights == weight_bytes(model)
        assert point.bytes["states"] == storage_bytes(state_tensors(optimizer))
    assert most(timeline, "gradients", "forward") == 0
    assert most(timeline, "gradients", "backward") == weights
    assert timeline.points[-1].bytes["gradients"] == 0, "zero_grad freed them"
    assert [name for name, _, _ in timeline.phases()] == ["forward", "backward", "step"]
    # Each tanh saves its output; while the last one runs, its input is there as well.
    assert most(timeline, "activations", "forward") == 4 * FULL
    assert timeline.points[-1].bytes["activations"] == 0


def test_a_checkpoint_makes_its_activations_in_backward():
    """Catches recomputed activations that are counted as `other`."""
    model, optimizer, step = known_step(checkpointed=True)
    timeline = record_timeline(step, model=model, optimizer=optimizer)
    # The inputs of blocks 2 and 3 wait, and the last output until its sum is taken.
    assert most(timeline, "activations", "forward") == 4 * FULL
    in_backward = [
        point.bytes["activations"] for point in timeline.points if point.phase == "backward"
    ]
    grew = [after - before for before, after in itertools.pairwise(in_backward)]
    assert max(grew) == FULL, "a block's output exists again"


def test_a_gradient_that_is_used_in_backward_is_a_gradient():
    """Catches a hook that comes after the one which frees the gradient."""
    model = Known()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def use_and_free(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(use_and_free)
    x = torch.randn(ROWS, WIDTH)
    timeline = record_timeline(lambda: model(x).backward(), model=model)
    one = 4 * WIDTH * WIDTH
    assert most(timeline, "gradients", "backward") == one
    assert {name for name, _, _ in timeline.phases()} == {"forward", "backward"}


def test_the_step_of_a_worker_is_not_that_of_the_loop():
    """The mistake: an offloaded optimizer steps beside backward. What the loop does then counts as
    its step, and gradients are read that backward frees, until the process crashes."""
    model, _, _ = known_step()
    begun, forward_done = threading.Event(), threading.Event()

    class Beside(torch.optim.SGD):
        def step(self):
            begun.set()
            forward_done.wait()

    worker = threading.Thread(target=Beside(model.parameters(), lr=0.1).step)

    def step():
        worker.start()
        begun.wait()
        loss = model(torch.randn(ROWS, WIDTH)).sum()
        forward_done.set()
        worker.join()
        loss.backward()

    timeline = record_timeline(step, model=model)
    assert [name for name, _, _ in timeline.phases()] == ["forward", "backward"]


def test_an_error_in_the_step_leaves_no_hook_behind():
    """The mistake: hooks of a recorder that has gone, in every later backward."""
    model, optimizer, _ = known_step()

    def fails():
        model(torch.randn(ROWS, WIDTH))
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        record_timeline(fails, model=model, optimizer=optimizer)
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks


def test_a_model_that_the_block_drops_leaves_no_account_behind():
    """Catches an exit that reads a dead model: the account would go on, in all that follows."""
    model = Known()
    with PeakMemory(model=model) as memory:
        with_weights = memory.current
        del model
    assert _get_current_dispatch_mode() is None
    weights = 4 * 3 * WIDTH * WIDTH
    assert memory.timeline.points[0].bytes["weights"] == weights
    assert memory.timeline.points[-1].total == with_weights - weights


def test_a_tensor_of_vmap_has_no_storage_to_count():
    """Catches an account that asks for it. The compiler keeps such tensors of FlexAttention."""
    kept = []

    def double(row):
        kept.append(row)  # it stands for all rows
        return row.double()

    torch.vmap(double)(torch.randn(ROWS, WIDTH))
    with PeakMemory() as memory:
        assert memory.current >= FULL


def test_a_storage_may_be_freed_at_any_moment(monkeypatch):
    """Catches a sample that mixes two moments: the collector may run in any line of a listener."""
    waiting = [torch.empty(ROWS, WIDTH)]

    def collector_runs():
        waiting.clear()
        return False

    model = Known()
    with PeakMemory(model=model) as memory:
        before = memory.current
        monkeypatch.setattr(timeline_module, "in_backward", collector_runs)
        model.layers[0].weight.detach()  # an operator that makes no storage
    assert memory.timeline.points[0].total == before
    assert memory.timeline.points[-1].total == memory.current == before - FULL


@pytest.mark.gpu
def test_on_cuda_it_follows_the_allocator():
    """The mistake: a timeline that is higher than what the allocator gave out."""
    model = model_of_shape("tiny-llama", device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 128, (4, 64), device="cuda")

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    measured = measure(step, model=model, optimizer=optimizer, repeats=0)
    # The allocator rounds each tensor up to 512 bytes, and libraries have workspaces.
    assert measured.timeline.peak <= measured.peak_bytes
    assert [name for name, _, _ in measured.timeline.phases()] == ["forward", "backward", "step"]


@pytest.mark.gpu
def test_compiled_attention_on_cuda():
    """Catches an account in which FlexAttention is not compiled, or that looks into its mask."""
    torch._dynamo.reset()
    model = model_of_shape("tiny-llama", device="cuda", dtype=machine().compute_dtype)
    apply_block_sparse(model, block_size=128)
    ids = torch.randint(0, 128, (1, 2048), device="cuda")

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    step()  # the compiler tries its kernels on tensors of its own
    with PeakMemory(model=model) as watched:
        step()
    with PeakMemory() as plain:
        step()
    assert watched.peak == pytest.approx(plain.peak, rel=0.05)
