"""A step that has not run has the bytes of the one that has."""

import gc
import weakref
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes_lib.core.measure import measure
from recipes_lib.core.predict import predict
from recipes_lib.report.ladders.memory import ReadyStep
from recipes_lib.training.compiled_blocks import apply_compiled_blocks
from tests.core.predict.recipes import (
    FAMILIES,
    RECIPES,
    Recipe,
    batch_of,
    build_of,
    checkpointed,
    model_of,
    plain_step,
)

# Another way to fill memory each. All of them on all families: `make survey`.
CASES = [("llama", "gradient accumulation"), ("llama", "selective checkpointing")]
CASES += [("llama", "activations on disk"), ("llama", "in backward, checkpointed")]
CASES += [("llama", "bf16, stochastic rounding"), ("llama", "block sparse"), ("llama", "packing")]
CASES += [("llama", "QLoRA, all of it"), ("llama", "long texts"), ("llama", "fp16 autocast")]
CASES += [("llama", "loss of answers")]
CASES += [("gpt2", "baseline"), ("gpt2", "LoRA, checkpointed")]
NUMBERS = 64  # bytes of a loss scale or a norm: whose they are is not the same twice


def measured(build):
    """A step that has its states."""
    build()  # libraries make tables of codes once, and keep them
    ready = ReadyStep(build)
    of_model = {"model": ready.model, "optimizer": ready.optimizer}
    found = measure(ready.step, warmup=0, repeats=0, **of_model)
    return found.without(ready.alive_before)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_peak_is_the_measured_one_to_the_byte(family, name):
    """The mistake: a recipe that does something else, or nothing, on tensors without data."""
    build = build_of(family, RECIPES[name], num_hidden_layers=2)
    found = measured(build)
    prediction = predict(build)
    assert prediction.peak == found.peak_bytes
    assert prediction.timeline.highest.phase == found.timeline.highest.phase
    assert prediction.at_peak() == pytest.approx(found.timeline.at_peak(), abs=NUMBERS)
    assert prediction.kept == pytest.approx(found.timeline.points[-1].total, abs=NUMBERS)


@pytest.mark.survey
@pytest.mark.parametrize("changes", [(), (checkpointed,)], ids=["alone", "checkpointed"])
def test_compiled_blocks(changes):
    """The mistakes: what the compiler makes again in backward counts as kept; or what its trace
    of a block holds, one tensor [T, D]."""
    step = partial(plain_step, batch_of(rows=8, tokens=128))
    recipe = Recipe((apply_compiled_blocks, *changes), step=lambda ignored: step())
    build = build_of("llama", recipe)
    assert predict(build).peak == pytest.approx(measured(build).peak_bytes, rel=0.005)


@pytest.mark.survey
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_recipe_on_every_family(family, name):
    """Within 0.5 %, or refused by both."""
    build = build_of(family, RECIPES[name])
    try:
        found = measured(build)
    except ValueError:
        with pytest.raises(ValueError):
            predict(build)
        return
    assert predict(build).peak == pytest.approx(found.peak_bytes, rel=0.005)


def test_nothing_of_it_stays_alive():
    """The mistake: a cache keeps a model without data, which later accounts would count."""
    found = []

    def build():
        model, optimizer, step = build_of("llama", RECIPES["QLoRA, all of it"])()
        found.extend(map(weakref.ref, [model, optimizer, *model.parameters()]))
        return model, optimizer, step

    predict(build)
    gc.collect()
    assert found and not any(reference() is not None for reference in found)


def test_a_step_that_fails_leaves_nothing_behind():
    """The mistake: fake tensors for whoever comes next."""

    def fails(batch):
        def step(model, optimizer):
            raise RuntimeError("a reason\nand more")

        return step

    with pytest.raises(ValueError, match=r"RuntimeError \(a reason\)"):
        predict(build_of("llama", Recipe(step=fails)))
    assert torch.zeros(2).sum().item() == 0


def test_a_file_that_is_not_there(tmp_path):
    """The mistake: a traceback of pages out of a library."""

    def build():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "nothing")
        return model, None, plain_step(batch_of())

    with pytest.raises(ValueError, match=r"reads a file .*nothing.*load outside"):
        predict(build)


def test_weights_of_a_file_are_not_read(tmp_path):
    """The mistake: 16 GB are read from the disk to predict a step."""
    model_of("llama", torch.bfloat16).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")

    def from_file():
        model = AutoModelForCausalLM.from_pretrained(tmp_path).train()
        return model, torch.optim.AdamW(model.parameters()), plain_step(batch_of())

    def new():
        model = model_of("llama", torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters()), plain_step(batch_of())

    assert predict(from_file).peak == predict(new).peak


def test_a_tied_table_stays_one_in_another_dtype():
    """Catches a model that is changed as a whole, whose table then counts at both of its places."""

    def build():
        model = model_of("llama", torch.float32, tie_word_embeddings=True).to(torch.bfloat16)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return model, torch.optim.AdamW(model.parameters()), plain_step(batch_of())

    assert predict(build).peak == measured(build).peak_bytes
