"""QLoRA beside the Trainer: every way trains the same, and a failure costs only its row."""

import dataclasses
import importlib.util
import math

import pytest
import torch
from transformers import masking_utils
from transformers.models.llama import modeling_llama

from benchmarks import finetune, gpu, parts, record
from benchmarks.finetune import Sizes, Way, our_loop
from recipes_lib.core.data.chat import IGNORED
from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.bench.run import Bench
from recipes_lib.workflows.finetune.loop import adapt, micro_batches

SIZES = Sizes(
    "tiny-llama", 2, documents=3, max_tokens=60, packs=2, steps=2, gradient_checkpointing=False
)


@pytest.fixture
def short_pairs(monkeypatch):
    """Made-up pairs of unequal length: the standard library takes longer than these tests."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in torch.randint(8, 60, (24,), generator=generator).tolist():
        ids = torch.randint(1, 128, (length,), generator=generator).tolist()
        half = length // 2
        rows.append({"input_ids": ids, "labels": [IGNORED] * half + ids[half:]})
    monkeypatch.setattr(finetune, "load_tokenizer", lambda: None)
    monkeypatch.setattr(finetune, "load_instructions", lambda *_, **__: rows)


def rows_of(monkeypatch, sizes=SIZES, **ways):
    """What `compare_ways` finds when these are the ways."""
    monkeypatch.setattr(finetune, "ways", lambda sizes: ways)
    *_, last = finetune.compare_ways(sizes)
    return last["ways"]


def test_the_part_in_small_sizes(short_pairs, monkeypatch, tmp_path):
    """What a GPU machine runs, with the same code, and what it keeps."""
    monkeypatch.setenv("RECIPES_RESULTS", str(tmp_path))
    parts.finetune()
    part = record.newest("finetune", folder=tmp_path).facts
    found = {name: way for name, way in part.items() if "ours" in name or "Trainer" in name}
    assert set(found) == {
        "Trainer",
        "ours",
        "Trainer, packed rows",
        "Trainer + Liger",
        "Trainer + Liger, packed rows",
    }
    theirs = found["Trainer, packed rows"]
    assert found["ours"]["losses"] == pytest.approx(theirs["losses"], abs=1e-4)
    for name in ("Trainer", "ours", "Trainer, packed rows"):
        row = found[name]
        assert row["tokens_per_second"] > 0
        assert row["peak_bytes"] > row["before_bytes"] + 2**19
        assert row["before_bytes"] < found["Trainer"]["before_bytes"] + 2**16, name
    assert part["useful_share"]["padded"] < part["useful_share"]["packed"] <= 1
    states = {name: row["bytes_per_parameter"] for name, row in part["updates"].items()}
    assert states["fp32, fused"] == pytest.approx(8, abs=0.01)
    assert states["8 bits, bitsandbytes"] < 3


def test_an_update_that_fails_costs_only_its_row(monkeypatch):
    def fail(model, **_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(finetune, "eight_bit_adamw", fail)
    *_, last = finetune.compare_updates(Bench("tiny-llama", 2, 16, micro_batches=2))
    assert last["updates"]["8 bits, bitsandbytes"] == {"failed": "RuntimeError: out of luck"}
    assert last["updates"]["fp32, fused"]["seconds"] > 0


def test_every_call_takes_less_than_ten_minutes():
    assert all(sum(call.values()) < 600 for call in gpu.CALLS)
    assert gpu.SECONDS.keys() == gpu.PARTS.keys()


def test_a_way_that_fails_costs_only_its_row(short_pairs, monkeypatch):
    seen = []

    class Other(modeling_llama.LlamaRMSNorm):
        """What Liger does: it replaces a class of transformers."""

    def replace(model, batch):
        monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Other)

    def fail(model, rows, **_):
        raise RuntimeError("out of luck")

    def watch(model, rows, **options):
        seen.append(type(model.get_base_model().model.norm))
        return our_loop(model, rows, **options)

    found = rows_of(
        monkeypatch,
        first=Way(our_loop, "packed"),
        missing=Way(our_loop, "packed", (finetune.liger,)),
        failing=Way(fail, "packed", (replace,)),
        last=Way(watch, "packed"),
    )
    assert found["failing"] == {"failed": "RuntimeError: out of luck"}
    if importlib.util.find_spec("liger_kernel") is None:
        reason = "ImportError: this recipe needs liger_kernel"
        assert found["missing"]["failed"].startswith(reason)
    assert seen[0] is not Other, "the patched class stayed"
    before = found["first"]["before_bytes"]
    assert found["last"]["before_bytes"] <= before + 2**16, "the failing way's model stayed"
    assert found["last"]["losses"] == found["first"]["losses"]


def test_a_way_that_trains_something_else_is_refused(short_pairs, monkeypatch):
    def disturb(model, batch):
        model.get_base_model().lm_head.weight.data.mul_(3)

    found = rows_of(
        monkeypatch,
        ours=Way(our_loop, "packed"),
        other=Way(our_loop, "packed", (disturb,)),
        # The first of its layout has nothing to agree with.
        padded=Way(our_loop, "padded", (disturb,)),
    )
    assert "does not train as others do" in found["other"]["failed"]
    # Its numbers are kept beside the reason.
    assert found["other"]["losses"] != found["ours"]["losses"]
    assert "failed" not in found["ours"]
    assert "failed" not in found["padded"]


def test_losses_that_are_no_numbers_agree_with_nothing(short_pairs, monkeypatch):
    """A way that diverges must not become what the others are compared with."""

    def diverge(model, rows, **options):
        steps = our_loop(model, rows, **options)
        return [dataclasses.replace(step, loss=math.nan) for step in steps]

    found = rows_of(monkeypatch, first=Way(diverge, "packed"), ours=Way(our_loop, "packed"))
    assert "does not train as others do" in found["first"]["failed"]
    assert "failed" not in found["ours"]


def test_flex_attention_keeps_documents_apart(short_pairs, monkeypatch):
    rows, run = finetune.layouts(SIZES)["one row"]
    batch = micro_batches(rows[:1], run=run, pad_token_id=0, device="cpu")[0]
    model = adapt(model_of_shape("tiny-llama", device="cpu"), run=run)
    with torch.compiler.set_stance("force_eager"):  # the mask is the same, compiled or not
        finetune.flex_attention(model, batch)
        monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
        with pytest.raises(RuntimeError, match="a document sees its neighbour"):
            finetune.flex_attention(model, batch)


def test_compiled_blocks_train_the_same_in_one_graph_each(short_pairs, monkeypatch):
    """`fullgraph` makes a graph break an error; tracing alone shows it."""
    compile_module = torch.nn.Module.compile

    def compile_whole(self, **options):
        compile_module(self, backend="eager", fullgraph=True, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_whole)
    rows, run = finetune.layouts(SIZES)["packed"]
    losses = []
    for change in (lambda model, batch: None, finetune.compiled_blocks):
        finetune.seed_everything(0)
        model = adapt(model_of_shape("tiny-llama", device="cpu"), run=run)
        change(model, None)
        losses.append([step.loss for step in our_loop(model, rows, run=run, pad_token_id=0)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


@pytest.mark.gpu
def test_every_way_runs_on_a_gpu():
    *_, last = finetune.compare_ways(Sizes("llama-3.2-1b", 2, 4, 128, 3, 3, False))
    failed = {name: row["failed"] for name, row in last["ways"].items() if "failed" in row}
    for name, error in failed.items():
        assert "Liger" in name
        assert error.startswith("ImportError")
    for name, row in last["ways"].items():
        assert name in failed or row["before_bytes"] < 2**26, name
    *_, last = finetune.compare_updates(Bench("llama-3.2-1b", 2, 64, micro_batches=2, layers=2))
    assert not [name for name, row in last["updates"].items() if "failed" in row], last
