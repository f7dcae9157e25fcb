"""What the doctor says of an error and of a model."""

import pytest
import torch
import transformers

from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.out_of_memory_doctor import (
    _lines_that_apply,
    diagnose,
    predicted_steps,
)
from recipes_lib.workflows.out_of_memory_doctor.message import read_message
from recipes_lib.workflows.out_of_memory_doctor.remedies import LORA, RECIPES, in_order_of_advice
from tests.workflows.test_out_of_memory_doctor_message import (
    FORMS,
    GRAPHS_AND_CAP,
    KERNEL_LOG,
    MPS,
    TORCH_2_0,
    TORCH_2_6,
)

GIB = 2**30
MIB = 2**20
NO_ROOM = 517 * MIB  # CUDA's own context and workspaces take all of it


@pytest.fixture
def tiny_on_meta():
    return model_of_shape("tiny-llama", device="meta")


def names(diagnosis):
    return [remedy.name for remedy in diagnosis.remedies]


def test_names_the_causes_that_no_recipe_cures():
    """The mistake: recipes for memory that another process holds, or that is in pieces."""
    in_pieces = diagnose(error=TORCH_2_0).remedies[0]
    assert in_pieces.where.endswith("expandable_segments:True")
    assert in_pieces.name == "memory in one piece: 2.3 GiB are in pieces"
    others = "stop other processes, which hold 44.1 GiB"
    assert names(diagnose(error=TORCH_2_6)) == [others, *RECIPES]


def test_an_error_alone_ends_with_the_next_question():
    """The mistakes: several GPUs advised to somebody who has one; a list without a next step."""
    found = diagnose(error=TORCH_2_0)
    assert names(found)[-1] == "FSDP"
    assert "costs: several GPUs, weights over the network" in str(found)
    assert str(found).endswith("--batch-size ROWS --seq-len TOKENS --dtype bf16 --memory 6.0")
    assert "--memory" not in str(diagnose(error="Killed"))
    assert "python -m" not in str(diagnose(error="Bus error"))  # no recipe helps there


@pytest.mark.parametrize("form", FORMS, ids=[form.error[:60] for form in FORMS])
def test_what_a_text_says_and_the_first_advice(form):
    """The mistakes: a number under the name of another; recipes for a GPU where /dev/shm is full,
    an offload to a host that is full, a variable of CUDA for another brand."""
    message = read_message(form.error.replace(" ", "\n", 20))  # as a terminal wraps it
    assert message.place == form.place
    for name, gib in form.fields.items():
        expected = None if gib is None else pytest.approx(gib * GIB, rel=1e-3, abs=0.01 * GIB)
        assert getattr(message, name) == expected, name
    found = diagnose(error=form.error)
    first = found.remedies[0]
    assert form.first in f"{first.name} {first.where}"
    listed = [remedy for remedy in found.remedies if remedy.name in RECIPES]
    assert bool(listed) == (form.place in ("CUDA", "ROCm", "XPU", "MPS", "host"))
    if form.place in ("host", "MPS"):
        assert not any("offload" in remedy.name for remedy in listed)
    if form.place != "CUDA":
        assert "PYTORCH_CUDA_" not in str(found)
        assert "nvidia-smi" not in str(found)


def test_says_what_was_assumed_and_the_first_that_fits(tiny_on_meta):
    """The mistakes: advice for a batch, a dtype or a card that nobody can read; a line that a
    terminal breaks."""
    sizes = {"model": tiny_on_meta, "batch_size": 4, "seq_len": 2048}
    on_card = " ".join(str(diagnose(**sizes, card="H100")).split())
    assert "AdamW on 4 x 2,048 tokens, weights in float32, on H100 (capability 9.0)" in on_card
    sizes["model"] = model_of_shape("tiny-llama", dtype=torch.bfloat16, device="meta")
    diagnosis = diagnose(**sizes, memory_bytes=560 * MIB)
    assert not diagnosis.remedies[0].fits
    text = str(diagnosis)
    first = diagnosis.first_fit
    words = " ".join(text.split())
    assert f"{first.name}: {first.outcome} costs: {first.costs}" in words
    assert f"First that fits: {first.name}." in words
    imports = [RECIPES[name].where for name in first.stack]
    assert text.splitlines()[-len(imports) :] == imports
    assert max(len(line) for line in text.splitlines() if line not in imports) <= 80
    with pytest.raises(ValueError, match="card='X1': choose one of"):
        diagnose(**sizes, card="X1")


@pytest.mark.parametrize(("error", "refused"), [(KERNEL_LOG, "offload"), (MPS, "8-bit AdamW")])
def test_the_models_remedies_fit_the_place_too(tiny_on_meta, error, refused):
    """The mistake: an offload to the memory of the host, which is what has run out."""
    sizes = {"batch_size": 1, "seq_len": 64, "memory_bytes": NO_ROOM}
    together = diagnose(error=error, model=tiny_on_meta, **sizes)
    assert len(together.remedies) > 1
    assert not any(refused in name for name in names(together))
    assert not any("offload" in name for name in names(together))


def test_a_model_that_should_fit_points_at_a_leak(tiny_on_meta):
    """The mistake: recipes where tensors stay from step to step."""
    sizes = {"model": tiny_on_meta, "batch_size": 1, "seq_len": 8}
    assert "loss.item()" in str(diagnose(error=TORCH_2_0, **sizes))
    assert "loss.item()" not in str(diagnose(**sizes))  # nothing has failed


def test_the_memory_is_that_given_else_that_allowed_else_the_machines(tiny_on_meta):
    """The mistake: all of a card where a part of it was allowed."""
    sizes = {"model": tiny_on_meta, "batch_size": 1, "seq_len": 8}
    assert "a GPU of 7.0 GiB" in diagnose(**sizes, memory_bytes=7 * GIB).findings[0]
    assert "tensors may take 2.5 GiB" in diagnose(error=TORCH_2_6, **sizes).findings[1]
    assert "a GPU of 20.0 GiB" in diagnose(error=GRAPHS_AND_CAP, **sizes).findings[1]
    here = machine()
    assert (here.device == "cpu") == ("on a CPU" in diagnose(**sizes).findings[0])


def test_a_size_that_is_sold_is_the_smallest_card_of_it():
    """The mistake: 24 GB are taken for 24 GiB, of which PyTorch sees 22 on an L4."""
    model = model_of_shape("qwen2.5-32b", dtype=torch.bfloat16, device="meta")
    sizes = {"model": model, "batch_size": 1, "seq_len": 2048}
    sold = " ".join(str(diagnose(**sizes, card="24GB")).split())
    assert "on L4 (capability 8.9)" in sold
    assert "First that fits: none" in sold
    seen = " ".join(str(diagnose(**sizes, memory_bytes=24 * GIB)).split())
    assert "loss in chunks + checkpointing + QLoRA." in seen
    assert "Not on L4, which is sold with as much and has 22.0 GiB." in seen


def test_several_gpus_share_rows_and_weights():
    """The mistakes: all rows on each GPU; a base in parts for which no file is named."""
    model = model_of_shape("llama-3.1-70b", dtype=torch.bfloat16, device="meta")
    found = diagnose(model=model, batch_size=2, seq_len=1024, card="24GB", gpus=4)
    assert "FSDP + QLoRA" in found.first_fit.name
    assert "micro-batches" not in found.first_fit.name
    said = " ".join(str(found).split())
    assert "on 4 times L4" in said
    assert "131.4 GiB of files" in said
    assert found.lines[-1].endswith("llama-3-70b-qlora-fsdp.yaml")
    smaller = model_of_shape("llama-3.1-8b", dtype=torch.bfloat16, device="meta")
    found = diagnose(model=smaller, batch_size=2, seq_len=1024, memory_bytes=13 * GIB, gpus=2)
    adapted = next(row for row in found.remedies if row.stack[-2:] == ("FSDP", LORA))
    assert "--method lora --shard" in _lines_that_apply(found.tried.question, adapted)[-1]
    small = model_of_shape("llama-3.2-1b", dtype=torch.bfloat16, device="meta")
    shared = diagnose(model=small, batch_size=8, seq_len=1024, card="T4", gpus=4)
    assert shared.remedies[0].peak == shared.tried.peak((), 1024)
    alone = diagnose(model=small, batch_size=2, seq_len=1024, card="T4")
    assert shared.remedies[0].peak == alone.remedies[0].peak
    assert "T4 does not compute in bf16" in str(alone)


def test_the_least_time_is_that_of_the_products():
    """The mistake: hours for a million tokens by the rows of one GPU."""
    model = model_of_shape("llama-3.1-8b", dtype=torch.bfloat16, device="meta")
    found = diagnose(model=model, batch_size=4, seq_len=2048, card="H200", gpus=2)
    # 6 operations for each of 7.5 billion weights of products, half of them for a frozen base
    per_token = 6 * 7.5e9 + 6 * 32 * 4096 * 2048
    hours = 1e6 * per_token / (2 * 989.4e12) / 3600
    said = " ".join(str(found).split())
    assert float(said.split(" hours for")[0].split()[-1]) == pytest.approx(hours, rel=0.1)


def test_the_ready_line_has_the_recipes_or_says_which_it_lacks():
    """The mistake: a command that runs out of memory beneath the peak of another step."""
    large = model_of_shape("llama-3.1-8b", dtype=torch.bfloat16, device="meta")
    said = str(diagnose(model=large, batch_size=1, seq_len=32_768, card="RTX 4090"))
    assert "--method lora --learning_rate 2e-4 --length 32768 --inputs host" in said
    said = str(diagnose(model=large, batch_size=4, seq_len=8192, card="24GB"))
    assert "finetune" in said
    assert "no loss in chunks and no tiled MLP and no activation offload." in said


def test_the_step_itself_checks_what_is_advised(monkeypatch):
    """The mistakes: advice that the step refutes; a recipe that refuses ends the check."""
    assert diagnose(error=TORCH_2_0).check() == ""
    model = model_of_shape("llama-3.2-1b", dtype=torch.bfloat16, device="meta")
    found = diagnose(model=model, batch_size=4, seq_len=512, memory_bytes=8 * GIB)
    advised = [remedy.stack for remedy in in_order_of_advice(found.remedies)]
    assert len(advised) >= 3

    def dry_peak(question, stack):
        if stack == advised[0]:
            return question.limit + 1
        if stack == advised[1]:
            raise ValueError("not for this model")
        return question.limit

    monkeypatch.setattr(predicted_steps, "dry_peak", dry_peak)
    lines = found.check().replace("\n  ", " ").splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "Checked by the step itself",
        "Checked",
        "Checked by the step itself",
    ]
    assert lines[0].endswith("too much.")
    assert "not for this model" in lines[1]
    assert lines[2].endswith("fits.")


def test_nothing_to_diagnose(llama):
    """The mistake: advice on a step of no rows, or of rows that teach nothing."""
    with pytest.raises(ValueError, match="nothing to diagnose"):
        diagnose()
    with pytest.raises(ValueError, match="seq_len=1: give"):
        diagnose(model=llama, batch_size=1, seq_len=1)
    sizes = transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=128)
    with pytest.raises(ValueError, match="MambaForCausalLM has no attention"):
        diagnose(model=transformers.MambaForCausalLM(sizes), batch_size=1, seq_len=16)
