import pytest
import torch

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.allocator_peak import AllocatorPeak
from recipes_lib.core.model import model_of_shape
from tests.training_step import training_step

MIB = 2**20


def mebibytes(count):
    return torch.empty(count * MIB, dtype=torch.uint8)


def test_same_peak_as_the_account_of_operators():
    """In a training step without compiled code both see the same tensors."""
    model = model_of_shape("tiny-llama", layers=6, device="cpu")
    step = training_step(model, rows=8)
    step()  # makes the states of AdamW
    with PeakMemory() as account:
        step()
    with AllocatorPeak() as memory:
        step()
    assert memory.peak == pytest.approx(account.peak, rel=0.01)
    assert memory.current == pytest.approx(account.current, rel=0.01)


def test_scratch_memory_of_an_operator_does_not_count():
    """The mistake: copies inside a product, which the account of plain blocks does not see."""
    weight = torch.ones(2048, 2048, dtype=torch.bfloat16)
    rows = torch.ones(256, 2048, dtype=torch.bfloat16)
    product = rows @ weight.T  # libraries set themselves up
    with AllocatorPeak() as memory:
        again = rows @ weight.T
    assert memory.peak - memory.before == again.nbytes == product.nbytes


def test_what_was_alive_before_can_be_released_inside():
    """The profiler does not report it. Left out, everything after it would look too large."""
    before = [mebibytes(50)]
    with AllocatorPeak() as first:
        kept = mebibytes(20)  # allocated in one account and released in the next
    with AllocatorPeak() as memory:
        before.clear()
        del kept
        later = mebibytes(30)
    assert first.peak - first.before == pytest.approx(20 * MIB, rel=0.01)
    assert memory.peak - memory.before == pytest.approx(0, abs=MIB)
    assert memory.current - memory.before == pytest.approx(-40 * MIB, rel=0.01)
    assert later.numel() == 30 * MIB


def test_another_profiler_is_not_ended():
    """PyTorch has one at a time: the user's would lose what it has seen, with no error."""
    with torch.profiler.profile() as users:
        with pytest.raises(RuntimeError, match="a profiler of PyTorch is active"), AllocatorPeak():
            pass
        torch.ones(3).sum()
    assert "aten::sum" in {event.key for event in users.key_averages()}
    with AllocatorPeak():
        pass
