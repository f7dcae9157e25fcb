"""`finetune` on two ranks that divide the model: the run of one process, whole when it is saved."""

import contextlib
import dataclasses
import itertools
import re
from unittest import mock

import pytest
import torch

from recipes_lib.core.data import collate
from recipes_lib.core.measure.machine import seed_everything
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape
from recipes_lib.core.ranks.measured_bytes import is_sharded
from recipes_lib.fine_tuning.adapter_files import load_adapter
from recipes_lib.workflows.finetune import command
from tests.workflows.finetune.shared import finetune_here, settings

ALONE = {"dropout": 0.0, "steps": 4, "warmup_steps": 1, "save_steps": 2, "report_to": "none"}
ON_TWO = {"processes": 2, "shard": True}
METHODS = ("full", "lora", "qlora")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small base whose rows are a multiple of what shares a scale in 4 bits."""
    folder = tmp_path_factory.mktemp("base")
    seed_everything(0)
    model = model_of_shape("smollm2-135m", layers=2, device="cpu")
    small = model.config
    small.hidden_size = small.intermediate_size = 64
    small.num_attention_heads, small.num_key_value_heads, small.head_dim = 4, 2, 16
    type(model)(small).save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


def losses_in(printed):
    """The losses of the steps, and the held-out ones before and after."""
    found = re.findall(r"step \d+: loss ([\d.]+)|held-out loss \w+: ([\d.]+)", printed)
    return [float(step or held_out) for step, held_out in found]


def on_ranks(runs):
    """On a rank: what each run prints."""
    return [finetune_here(run)[1] for run in runs]


def stopped_and_resumed(run, steps):
    """On a rank: a run that ends when its step `steps` is done and not kept; then the rest."""

    def some_steps(of_all, run, **_):
        list(itertools.islice(of_all, steps))
        raise KeyboardInterrupt

    with (
        contextlib.suppress(KeyboardInterrupt),
        mock.patch.object(command, "log_steps", some_steps),
    ):
        finetune_here(run)
    return finetune_here(run, resume=True)


@pytest.fixture(scope="module")
def runs(base, pairs, tmp_path_factory, two_ranks):
    """Per method: the folders and what was printed, in one process and on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    alone = [settings(base, pairs, folder / f"{m}-1", method=m, **ALONE) for m in METHODS]
    on_two = [
        dataclasses.replace(run, output_dir=str(folder / f"{run.method}-2"), **ON_TWO)
        for run in alone
    ]
    printed = two_ranks.run(on_ranks, runs=on_two, timeout=300)
    expected = [finetune_here(run)[1] for run in alone]
    return folder, dict(zip(METHODS, zip(expected, printed)))


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_train_what_one_process_trains(runs, method):
    """The mistakes: rows that both ranks read; another base; another verdict."""
    _, printed = runs
    expected, found = map(losses_in, printed[method])
    assert len(expected) == 6
    assert found == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_saved_is_whole(runs, base, method):
    """The mistakes: the part of one rank in the file; tensors that have no data."""
    folder, _ = runs
    rows = collate(
        [{"input_ids": list(range(5, 45)), "labels": list(range(5, 45))}], pad_token_id=0
    )
    losses = []
    for ranks in (1, 2):
        if method == "full":
            model = load_model(str(folder / f"full-{ranks}" / "model"))
        else:
            adapter = folder / f"{method}-{ranks}" / "adapter"
            model = load_adapter(load_model(str(base)), adapter)
            assert any(p.any() for name, p in model.named_parameters() if "lora_B" in name)
        with torch.no_grad():
            losses.append(model.eval()(**rows, use_cache=False).loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_a_stopped_run_goes_on(runs, base, pairs, two_ranks, tmp_path):
    """The mistakes: states of one rank for all; dropout that begins anew."""
    dropping = ALONE | {"dropout": 0.1}
    run = settings(base, pairs, tmp_path / "stopped", **dropping | ON_TWO)
    whole = dataclasses.replace(run, output_dir=str(tmp_path / "whole"))
    (printed,) = two_ranks.run(on_ranks, runs=[whole], timeout=200)
    losses, resumed = two_ranks.run(stopped_and_resumed, run=run, steps=3, timeout=200)
    assert list(losses) == [2, 3]
    assert losses_in(resumed)[1:] == losses_in(printed)[3:]


def in_parts_while_training(run):
    """On a rank: whether the model that trains is in parts, and what is printed."""
    seen = []
    of_all = command.training_steps

    def looking(model, *given, **options):
        seen.append(is_sharded(model))
        return of_all(model, *given, **options)

    with mock.patch.object(command, "training_steps", looking):
        _, printed = finetune_here(run)
    return seen, printed


def test_precision_and_checkpointing_go_along(base, pairs, two_ranks, tmp_path):
    """The mistakes: infinite gradients in fp16 of which one rank knows; blocks that keep all."""
    options = ALONE | {"precision": "fp16", "gradient_checkpointing": True, "method": "full"}
    run = settings(base, pairs, tmp_path / "1", **options)
    _, expected = finetune_here(run)
    on_two = dataclasses.replace(run, output_dir=str(tmp_path / "2"), **ON_TWO)
    in_parts, found = two_ranks.run(in_parts_while_training, run=on_two, timeout=200)
    assert in_parts == [True]
    assert losses_in(found) == pytest.approx(losses_in(expected), abs=2e-3)
