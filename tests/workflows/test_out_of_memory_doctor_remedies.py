from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import chunked_loss, model_of_shape
from recipes_lib.core.predict.budget import Shape, compose
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.fine_tuning.lora import estimate_lora
from recipes_lib.fine_tuning.qlora import estimate_qlora, nf4_bytes
from recipes_lib.memory.activation_checkpointing import estimate_activation_checkpointing
from recipes_lib.memory.chunked_cross_entropy import estimate_chunked_cross_entropy
from recipes_lib.memory.optimizer_offload import estimate_optimizer_offload
from recipes_lib.precision.eight_bit_adam import estimate_eight_bit_adam
from recipes_lib.training.gradient_accumulation import estimate_gradient_accumulation
from recipes_lib.workflows.out_of_memory_doctor.remedies import (
    remedies_for,
    smallest_without_rows,
)

MIB, GIB = 2**20, 2**30
MICRO_BATCHES = (estimate_gradient_accumulation, {})
CHUNKS = (estimate_chunked_cross_entropy, {})
CHECKPOINTS = (estimate_activation_checkpointing, {})


@pytest.fixture(scope="module")
def eight_b():
    return model_of_shape("llama-3.1-8b", device="meta")


def by_name(remedies):
    return {remedy.name: remedy for remedy in remedies}


def names(remedies):
    return list(by_name(remedies))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b", "tiny-gpt2"])
def test_no_row_has_a_larger_peak_than_the_row_above(name, dtype):
    """The mistakes: LoRA without the offload below a row with it, under "includes those above";
    and a row that changes nothing, as advice."""
    model = model_of_shape(name, layers=3, dtype=dtype, device="meta")
    for shape in (Shape(batch=1, seq=128), Shape(batch=8, seq=128), Shape(batch=4, seq=4096)):
        for gib in (1, 8, 24):
            remedies = remedies_for(model, shape, memory_bytes=gib * GIB)
            pairs = pairwise(remedies)
            assert all(low.peak < high.peak for high, low in pairs), (shape, gib, remedies)


# Each memory is enough for the remedy behind it, and not for the one before.
FIRST_FIT = {
    500: "as it is",
    200: "4 micro-batches of 2",
    160: "8 micro-batches of 1",
    140: "checkpointing",
    90: "8-bit AdamW",
    48: "optimizer offload",
    24: "LoRA, 16-bit base",
    12: "QLoRA",
}


@pytest.mark.parametrize("gib", FIRST_FIT)
def test_the_first_fit_follows_the_memory(eight_b, gib):
    """The mistake: a remedy that is not needed yet, or that is too late."""
    remedies = remedies_for(eight_b, Shape(batch=8, seq=2048), memory_bytes=gib * GIB)
    fitting = [remedy.name for remedy in remedies if remedy.fits]
    assert fitting[0] == FIRST_FIT[gib]


def test_a_recipe_that_changes_nothing_waits_for_the_one_that_needs_it():
    """One row of a 1B model: the peak is that of the last gradient, and neither chunks nor
    checkpoints change it. Without the states, the activations are the peak."""
    model = model_of_shape("llama-3.2-1b", device="meta")
    shape = Shape(batch=1, seq=1024)
    remedies = remedies_for(model, shape, memory_bytes=16 * GIB)
    assert names(remedies)[:3] == ["as it is", "8-bit AdamW", "checkpointing + optimizer offload"]
    both = by_name(remedies)["checkpointing + optimizer offload"]
    assert both.where == "memory/activation_checkpointing.py, memory/optimizer_offload.py"
    recipes = [
        (estimate_eight_bit_adam, {}),
        CHECKPOINTS,
        (estimate_optimizer_offload, {}),
    ]
    plain = budget_of(model, shape)
    assert both.peak == compose(plain, model, shape, recipes).peak
    alone = compose(plain, model, shape, [recipes[0], recipes[2]])
    assert alone.peak > both.peak


def test_the_smallest_budget_is_that_of_one_short_row(eight_b):
    """The mistake: shorter rows as advice where the weights are too much."""
    smallest = smallest_without_rows(eight_b)
    assert smallest.shape == Shape(batch=1, seq=2)
    remedies = remedies_for(eight_b, Shape(batch=1, seq=512), memory_bytes=GIB)
    assert smallest.weights < smallest.peak < remedies[-1].peak


def test_a_twentieth_of_the_memory_stays_free():
    """A plan that fills it to the last byte fits on paper, and fails beside the CUDA context."""
    model = model_of_shape("tiny-llama", device="meta")
    shape = Shape(batch=1, seq=64)
    peak = budget_of(model, shape).peak
    for share, fits in ((0.96, False), (0.94, True)):
        as_it_is = remedies_for(model, shape, memory_bytes=int(peak / share))[0]
        assert as_it_is.fits == fits


@pytest.mark.parametrize("family", ["tiny-qwen3", "tiny-gpt2"])
def test_a_family_without_a_recipe(family):
    """The mistake: advice that the technique then refuses, or no row at all."""
    model = model_of_shape(family, device="cpu")
    remedies = remedies_for(model, Shape(batch=6, seq=64), memory_bytes=MIB)
    assert names(remedies)[:2] == ["as it is", "6 micro-batches of 1"]
    assert "optimizer offload" not in names(remedies)  # a CPU has nowhere to move them to
    assert ("QLoRA" in names(remedies)) == (family != "tiny-gpt2")  # whose layers it refuses


def test_the_peaks_are_those_of_the_recipes_own_estimates():
    """A remedy that forgets one above it, or a model in 16 bits that is still counted in 32."""
    model = model_of_shape("smollm2-135m", layers=4, device="cpu")
    shape = Shape(batch=4, seq=256, micro_batches=4)
    found = by_name(remedies_for(model, shape.whole(), memory_bytes=1))
    assert found["4 micro-batches of 1"].where == "training/gradient_accumulation.py"

    plain = budget_of(model, shape)
    states = (estimate_eight_bit_adam, {})
    for recipes, name in [
        ([MICRO_BATCHES], "4 micro-batches of 1"),
        ([MICRO_BATCHES, states], "8-bit AdamW"),
    ]:
        assert found[name].peak == compose(plain, model, shape, recipes).peak, name

    # Checkpoints change nothing before the adapters, so they are in one row with LoRA.
    base = model_of_shape("smollm2-135m", layers=4, dtype=torch.bfloat16, device="cpu")
    lora = "checkpointing + LoRA, 16-bit base"
    for adapters, name in [(estimate_lora, lora), (estimate_qlora, "QLoRA")]:
        recipes = [MICRO_BATCHES, (adapters, {}), CHECKPOINTS]
        assert found[name].peak == compose(budget_of(base, shape), base, shape, recipes).peak


def test_a_model_without_weights_stands_for_another_machine(monkeypatch):
    """The chunks that this machine would take do not count: in 16 bits, a CPU without native bf16
    would need an fp32 copy of the output layer, 2 GiB of an 8B model."""
    model = model_of_shape("smollm2-135m", device="meta")
    shape = Shape(batch=1, seq=512)
    expected = remedies_for(model, shape, memory_bytes=1)
    for native in (True, False):
        here = replace(machine(), native_bf16=native)
        monkeypatch.setattr(chunked_loss, "machine", lambda here=here: here)
        assert remedies_for(model, shape, memory_bytes=1) == expected

    recipes = [CHUNKS, CHECKPOINTS, (estimate_eight_bit_adam, {}), (estimate_optimizer_offload, {})]
    plan = compose(budget_of(model, shape), model, shape, recipes)
    offloaded = by_name(expected)["optimizer offload"]
    assert offloaded.peak == pytest.approx(plan.peak, rel=0.1)


def test_a_model_keeps_its_configuration():
    """Asking how a 16-bit copy would do must not write its dtype into the model's configuration."""
    model = model_of_shape("tiny-llama", device="meta")
    remedies_for(model, Shape(batch=1, seq=64), memory_bytes=MIB)
    assert model.dtype == model.config.dtype == torch.float32


def test_the_base_below_adapters_is_quantized():
    """As `estimate_qlora` counts it, when the adapters are not there yet."""
    peft = pytest.importorskip("peft")
    shape = Shape(batch=1, seq=512)
    base = model_of_shape("llama-3.2-1b", layers=2, device="meta")
    full = sum(p.numel() * 4 for p in base.model.layers.parameters() if p.ndim == 2)
    saved = full - nf4_bytes(base)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear", r=8))
    remedies = remedies_for(model, shape, memory_bytes=1)
    before, quantized = remedies[-2:]
    assert quantized.name == "QLoRA"
    assert "LoRA, 16-bit base" not in names(remedies), "there are adapters already"
    assert before.peak - quantized.peak == pytest.approx(saved, rel=0.01)
