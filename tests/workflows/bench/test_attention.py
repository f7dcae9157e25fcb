import pytest

from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.bench.attention import measure_attention


@pytest.fixture(scope="module")
def model():
    return model_of_shape("tiny-llama", device="cpu")


def test_one_layer_measured(model):
    short = measure_attention(model, seq_len=256, rounds=1)
    long = measure_attention(model, seq_len=512, rounds=1)
    assert short.keys() == {"eager", "fused"}
    assert long["eager"].peak_bytes > 3.8 * short["eager"].peak_bytes  # S^2
    assert long["fused"].peak_bytes == pytest.approx(2 * short["fused"].peak_bytes, rel=0.01)  # S
    cost = long["fused"]
    seconds = cost.forward_seconds + cost.backward_seconds
    operations = 3.5 * 4 * 512 * 512 / 2 * 64
    assert cost.tflops * 1e12 * seconds == pytest.approx(operations, rel=0.01)


def test_without_eager_only_the_kernel_runs(model):
    """At lengths where the scores do not fit, they must not be tried."""
    assert measure_attention(model, seq_len=64, eager=False, rounds=1).keys() == {"fused"}


def test_bad_input(model):
    with pytest.raises(ValueError, match="seq_len=0"):
        measure_attention(model, seq_len=0)
    with pytest.raises(ValueError, match="rounds=0"):
        measure_attention(model, seq_len=64, rounds=0)
