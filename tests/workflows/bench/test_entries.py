"""Each entry: its plan is what the step needs, and the step trains."""

import pytest

from recipes_lib.core.measure import PeakMemory, measure
from recipes_lib.workflows.bench.entries import ENTRIES
from recipes_lib.workflows.bench.run import Bench

# It moves the states of a GPU to the host: on a CPU they are there already.
ON_A_GPU = "optimizer_offload"
# Relative; without the technique, the step would need more than this beside its plan. Blocks are
# written to the disk while others are computed: how many wait in memory depends on the clock.
TOLERANCE = {"activation_offload": 0.2}


@pytest.fixture(scope="module")
def bench():
    return Bench("tiny-llama", 8, 64, micro_batches=8, layers=8)


@pytest.mark.parametrize("name", ["baseline", *sorted(ENTRIES.keys() - {ON_A_GPU})])
def test_the_plan_is_what_the_step_needs(bench, name):
    """An entry may estimate one thing and apply another, or give its optimizer other weights."""
    with PeakMemory() as memory:
        others = memory.current  # tensors that other tests have left
    arranged = bench.arrange(name, bench.fresh())
    first = arranged.step()
    named = {"model": arranged.model, "optimizer": arranged.optimizer}
    measured = measure(arranged.step, warmup=0, repeats=0, **named)
    tolerance = TOLERANCE.get(name, 0.02)
    assert measured.peak_bytes - others == pytest.approx(arranged.plan.peak, rel=tolerance)
    assert measured.result < first, "the second step starts where the first one has ended"


def test_the_chunked_loss_is_on(bench):
    """It hardly moves the peak of a model with 128 tokens in its vocabulary."""
    arranged = bench.arrange("chunked_cross_entropy", bench.fresh())
    output = arranged.model(**bench.batch(arranged.model), use_cache=False)
    assert output.loss.requires_grad
    assert output.logits is None


def test_the_step_in_backward_is_on(bench):
    """It does not move the peak while activations are the largest part."""
    arranged = bench.arrange("optimizer_in_backward", bench.fresh())
    arranged.model(**bench.batch(arranged.model), use_cache=False).loss.backward()
    assert all(parameter.grad is None for parameter in arranged.model.parameters())


def test_what_a_technique_refuses_reaches_the_user():
    small = Bench("tiny-gpt2", 4, 32, micro_batches=4)
    with pytest.raises(ValueError, match="in host memory already"):
        small.arrange(ON_A_GPU, small.fresh())


@pytest.mark.gpu
def test_the_offloaded_optimizer_on_gpu():
    bench = Bench("smollm2-135m", 4, 256, micro_batches=4)
    arranged = bench.arrange(ON_A_GPU, bench.fresh())
    first = arranged.step()
    measured = measure(arranged.step, warmup=0, repeats=0, model=arranged.model)
    assert measured.peak_bytes == pytest.approx(arranged.plan.peak, rel=0.15)
    assert measured.result < first
