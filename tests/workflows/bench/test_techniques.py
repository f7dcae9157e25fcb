"""Each entry: its prediction is what the step needs, and the step trains."""

from functools import partial

import pytest

from recipes_lib.core.measure import bytes_alive, measure
from recipes_lib.workflows.bench.run import Bench
from recipes_lib.workflows.bench.techniques import ENTRIES

# It moves the states of a GPU to the host: on a CPU they are there already.
ON_A_GPU = "optimizer_offload"
COMPILED = "compiled_blocks"


@pytest.fixture(scope="module")
def bench():
    return Bench("tiny-llama", 4, 64, micro_batches=4, layers=4)


def trained(bench, name):
    """The bytes that the second step takes, which must have a lower loss than the first one."""
    alive = bytes_alive()  # tensors that other tests have left
    model, optimizer, step = bench.arrange(name, bench.fresh())
    first = step(model, optimizer)
    named = {"model": model, "optimizer": optimizer}
    measured = measure(partial(step, model, optimizer), warmup=0, repeats=0, **named)
    assert measured.result < first, "the second step starts where the first one has ended"
    return measured.peak_bytes - alive


@pytest.mark.parametrize("name", ["baseline", *sorted(ENTRIES.keys() - {ON_A_GPU, COMPILED})])
def test_the_prediction_is_what_the_step_needs(bench, name):
    """The mistake: on tensors without data a technique does another thing, or nothing."""
    assert bench.predict(name).peak == pytest.approx(trained(bench, name), rel=0.005)


def test_the_chunked_loss_is_on(bench):
    """It hardly moves the peak of a model with 128 tokens in its vocabulary."""
    model, _, _ = bench.arrange("chunked_cross_entropy", bench.fresh())
    output = model(**bench.batch(model), use_cache=False)
    assert output.loss.requires_grad
    assert output.logits is None


def test_the_step_in_backward_is_on(bench):
    """It does not move the peak while activations are the largest part."""
    model, _, _ = bench.arrange("optimizer_in_backward", bench.fresh())
    model(**bench.batch(model), use_cache=False).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.gpu
def test_the_offloaded_optimizer_on_gpu():
    bench = Bench("smollm2-135m", 4, 256, micro_batches=4)
    assert bench.predict(ON_A_GPU).peak == pytest.approx(trained(bench, ON_A_GPU), rel=0.15)
