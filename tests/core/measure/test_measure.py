from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from recipes_lib.core.measure import PeakMemory, in_turns, measure
from recipes_lib.core.measure.allocator_peak import AllocatorPeak
from recipes_lib.core.model.marks import COMPILED, mark
from recipes_lib.core.ranks.meshes import default_mesh

MIB = 2**20


def tensor(mib):
    return torch.zeros(mib * MIB // 4)


def test_known_pattern_of_allocations():
    """The mistakes: a view that counts twice, a storage that dies unseen, a size from before."""
    with PeakMemory() as start:
        pass
    with PeakMemory() as memory:
        a = tensor(8)
        b = a + 1  # 16 MiB alive
        view = b[10:20]  # a view allocates nothing, and keeps its storage alive
        del a, b
        c = tensor(4)  # 12 MiB alive
        assert memory.current - start.peak == pytest.approx(12 * MIB, rel=0.01)
        c.resize_(2 * MIB)
        assert memory.current - start.peak == pytest.approx(16 * MIB, rel=0.01)
        del view, c
        assert memory.current == start.peak
    assert memory.peak - start.peak == pytest.approx(16 * MIB, rel=0.01)


def part_of_eight_mib():
    """Bytes that a tensor adds of which this rank has a part; and its sum with itself."""
    with PeakMemory() as memory:
        before = memory.current
        # Of its own half: to send parts of a whole, a thread may hold the whole a little longer.
        part = DTensor.from_local(tensor(4), default_mesh(), [Shard(0)])
        added = memory.current - before
        both = part + part
        return added, memory.current - before, len(both)


def test_a_tensor_around_others_counts_what_they_hold():
    """The mistake: fp32 bytes for a state of 8 bits, and for what a compiler keeps of one."""
    subclass = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit
    with PeakMemory() as memory:
        before = memory.current
        state = subclass.zeros((1024, 1024), signed=True, block_size=256, device="cpu")
        assert state.dtype is torch.float32  # what it claims to be
        assert 2**20 < memory.current - before < 1.1 * 2**20


def test_of_a_distributed_tensor_the_part_counts(two_ranks):
    """The mistake: each rank of a sharded model seems to hold all of it."""
    added, with_sum, _ = two_ranks.run(part_of_eight_mib)
    assert added == pytest.approx(4 * MIB, rel=0.01)
    assert with_sum == pytest.approx(8 * MIB, rel=0.01)


def test_error_inside_leaves_nothing_behind():
    """The mistake: an account that goes on after the block that failed."""
    with pytest.raises(RuntimeError, match="mine"), PeakMemory() as memory:
        raise RuntimeError("mine")
    peak = memory.peak
    tensor(8)
    assert memory.peak == peak
    with PeakMemory() as again:
        pass
    assert again.peak == pytest.approx(peak, abs=MIB)


def test_a_limit_ends_the_operator_that_goes_over_it():
    """The mistake: what was alive before the block counts against its limit, or nothing does."""
    with PeakMemory() as memory:
        alive = memory.current
    limited = PeakMemory(limit_bytes=alive + 4 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="emulated"), limited:
        tensor(2)
        tensor(8)


def test_the_fastest_step_on_the_clock_counts(monkeypatch):
    """The step under the account takes much longer, and noise can only add."""
    calls = []
    begins_and_ends = iter([0, 100, 0, 2, 0, 9, 0, 1])
    clock = SimpleNamespace(perf_counter=lambda: next(begins_and_ends))
    monkeypatch.setattr("recipes_lib.core.measure.step_cost.time", clock)
    measured = measure(lambda: calls.append(1) or len(calls), warmup=2, repeats=3)
    assert len(calls) == 2 + 1 + 3 and measured.result == 6
    assert measured.seconds == 1


def test_compiled_blocks_are_measured_as_they_run():
    """Under the account of operators they would run as plain ones, with the plain peak."""
    plain = torch.nn.Linear(4, 4)
    compiled = torch.nn.Linear(4, 4)
    mark(compiled, COMPILED)

    def step_of(model):
        return lambda: model(torch.ones(MIB, 4)).sum().item()

    of_plain = measure(step_of(plain), repeats=0, model=plain)
    of_compiled = measure(step_of(compiled), repeats=0, model=compiled)
    assert of_plain.timeline is not None
    assert of_compiled.timeline is None  # it came from the allocator
    assert of_compiled.peak_bytes == pytest.approx(of_plain.peak_bytes, rel=0.05)


@pytest.mark.gpu
def test_cuda_peaks_nest():
    """The mistake: the inner block restarts the device's counter, and the outer one loses it."""
    with PeakMemory() as outer:
        base = outer.current
        with PeakMemory() as inner:
            torch.zeros(8 * MIB // 4, device="cuda")
        torch.zeros(2 * MIB // 4, device="cuda")
    assert inner.peak - base == outer.peak - base == 8 * MIB


def test_gradients_from_before_count():
    """A gradient has no Python object until someone reads it."""
    weight = torch.nn.Parameter(torch.ones(256, 256))
    with PeakMemory() as before:
        pass
    (weight * 2).sum().backward()
    with PeakMemory() as after:
        pass
    assert after.peak - before.peak == 4 * 256 * 256


def test_fake_tensors_of_the_compiler_do_not_count():
    """They stay in its caches, say that they are on the CPU, and hold nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(1024, 1024)
    assert fake.device.type == "cpu"
    with PeakMemory() as memory:
        fake_inside = fake + 1
        before = memory.current
    del fake, fake_inside
    with PeakMemory() as without:
        pass
    assert before == without.peak


def test_turns_go_forth_and_back():
    """The mistake: the same row is always the first, while the machine is cold."""
    done = []
    seconds = in_turns({name: lambda name=name: done.append(name) for name in "abc"}, rounds=3)
    assert "".join(done) == "abccbaabc"
    assert list(seconds) == ["a", "b", "c"] and all(len(rounds) == 3 for rounds in seconds.values())


class GivesATable(torch.autograd.Function):
    """The loss of an output layer [V, D], which knows its gradient from forward on."""

    @staticmethod
    def forward(ctx, hidden, table, keeps):
        ctx.shape, ctx.gradient, ctx.keeps = hidden.shape, torch.ones_like(table), keeps
        return hidden.sum()

    @staticmethod
    def backward(ctx, gradient):
        of_table = ctx.gradient
        if not ctx.keeps:
            ctx.gradient = None
        return torch.ones(ctx.shape) * gradient, of_table, None


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_of_a_tied_table_are_summed_as_without_an_account(keeps):
    """The mistakes: a third table, which a step without this account does not make; or a sum in
    place where somebody else holds the first one."""
    table = torch.nn.Parameter(torch.ones(2000, 100))
    ids = torch.arange(10)

    def backward():
        hidden = torch.nn.functional.embedding(ids, table)
        GivesATable.apply(hidden, table, keeps).backward()
        found = table.grad.clone()
        table.grad = None
        return found

    without = backward()
    with AllocatorPeak() as allocator:
        backward()
    with PeakMemory() as account:
        before = account.current
        assert torch.equal(backward(), without)
    expected = allocator.peak - allocator.before
    assert account.peak - before == pytest.approx(expected, rel=0.01)
