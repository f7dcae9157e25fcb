import pytest
import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import SHAPES, load_model, model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.core.sizes import weight_bytes
from tests.conftest import FAMILIES


def measured_peak(model, batch_size, seq_len):
    ids = torch.randint(0, model.config.vocab_size, (batch_size, seq_len))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    with PeakMemory() as before:
        pass
    for _ in range(2):  # the first step creates the states
        with PeakMemory() as memory:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak - before.peak + weight_bytes(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(4, 64), (1, 37), (3, 5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_prediction_of_five_families(family, size, dtype):
    model = model_of_shape(family, layers=8, dtype=dtype, device="cpu")
    predicted = budget_of(model, batch_size=size[0], seq_len=size[1]).peak
    assert predicted == pytest.approx(measured_peak(model, *size), rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_prediction_of_eager_attention_on_a_long_row(family, dtype):
    model = model_of_shape(family, layers=4, dtype=dtype, device="cpu")
    model.set_attn_implementation("eager")
    predicted = budget_of(model, batch_size=1, seq_len=400).peak
    assert predicted == pytest.approx(measured_peak(model, 1, 400), rel=0.03)


def test_prediction_of_the_real_model():
    model = load_model(device="cpu")
    assert budget_of(model, batch_size=2, seq_len=64).peak == pytest.approx(
        measured_peak(model, 2, 64), rel=0.01
    )


@pytest.mark.parametrize(
    "shape, billions", [("llama-3.1-8b", 8.03), ("llama-3.2-3b", 3.21), ("qwen2.5-32b", 32.8)]
)
def test_public_shapes_without_memory(shape, billions):
    """A meta model costs nothing: the published parameter counts, and the budget of an 8B model on a laptop."""
    model = model_of_shape(shape, dtype=torch.bfloat16, device="meta")
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
    assert (
        budget_of(model, batch_size=1, seq_len=2048).peak > 7.9 * billions * 1e9
    )  # bf16: 2 + 2 + 4 bytes


def test_every_shape_builds():
    for shape in SHAPES:
        assert model_of_shape(shape, layers=1, device="meta") is not None


def test_change_and_text():
    budget = Budget(1, 2, 3, 0, 5, 6, 4, 1, 1, 7)
    assert budget.peak == 1 + 2 + 11  # as backward begins
    budget = budget.change(activations=0, loss=0)
    assert budget.peak == 1 + 2 + 3 + 7  # as the last gradient arrives
    budget = budget.change(one_block=20)
    assert budget.peak == 1 + 2 + (3 - 1) + 20 + 1  # in the first block
    assert "predicted peak" in str(budget)


def test_unknown_architecture():
    class Strange(torch.nn.Module):
        config = type("Config", (), {"hidden_size": 8, "num_attention_heads": 2})()

        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8)])

    from recipes_lib.core.plain_step import block_bytes

    with pytest.raises(ValueError, match="no memory formula"):
        block_bytes(Strange(), seq_len=8)


@pytest.mark.parametrize("size", [(0, 8), (8, 0)])
def test_bad_sizes(size):
    with pytest.raises(ValueError, match="1 or more"):
        budget_of(model_of_shape("tiny-llama", device="meta"), batch_size=size[0], seq_len=size[1])
