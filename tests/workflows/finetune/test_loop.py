"""The loop of notebook 05 against a plain one, stopped and resumed; bad input is refused."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from recipes_lib.core.data import collate
from recipes_lib.core.data.row_order import rows_of_step
from recipes_lib.core.ranks import rank
from recipes_lib.training.sequence_packing import pack_sequences
from recipes_lib.workflows.finetune.checkpoints import CHECKPOINT, facts_in_checkpoint
from recipes_lib.workflows.finetune.checks import check_run
from recipes_lib.workflows.finetune.loop import training_steps
from recipes_lib.workflows.finetune.shards import in_shards
from tests.workflows.finetune.shared import RUN, apart, change, fresh, losses_of, make_rows

# --- the training -------------------------------------------------------------------------------


def plain_training(model, rows):
    """The run written out on whole batches: loss, gradient norm and learning rate of each step."""
    from transformers import get_cosine_schedule_with_warmup

    optimizer = torch.optim.AdamW(model.parameters(), lr=RUN.learning_rate)
    schedule = get_cosine_schedule_with_warmup(optimizer, RUN.warmup_steps, RUN.steps)
    steps = []
    for number in range(RUN.steps):
        chosen = rows_of_step(number, rows=len(rows), rows_per_step=4, seed=0)
        batch = collate([rows[i] for i in chosen], pad_token_id=0)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), RUN.max_grad_norm).item()
        steps.append((loss.item(), norm, schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return steps


def trained_here(processes, shard=False):
    """On a rank: the losses and the weights of the run, and those in fp16."""
    found = []
    for precision in ("fp32", "fp16"):
        run = change(processes=processes, rows_per_step=8, micro_batch_size=1, precision=precision)
        run = dataclasses.replace(run, shard=shard)
        model = fresh()
        if shard:
            model, _ = in_shards(model if rank() == 0 else None)
        steps = list(training_steps(model, make_rows(16), run=run, pad_token_id=0))
        weights = [full_tensor(weight.detach()) for weight in model.parameters()]
        found.append((losses_of(steps), [step.gradient_norm for step in steps], weights))
    return found


def full_tensor(weight):
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@pytest.mark.parametrize("shard", [False, True])
def test_two_processes_train_what_one_trains(two_ranks, shard):
    """The mistakes: the mean of the ranks' means, where rows have unequal numbers of targets; a
    loss that is one rank's; rows that both read; gradients that are averaged twice."""
    both = two_ranks.run(trained_here, processes=2, shard=shard)
    for (losses, norms, weights), alone in zip(both, trained_here(1), strict=True):
        assert losses == pytest.approx(alone[0], rel=1e-5)
        assert norms == pytest.approx(alone[1], rel=1e-3)
        assert apart(weights, alone[2]) < 1e-3


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-gemma2"])  # without and with a soft cap
def test_loop_equals_a_plain_one_on_the_whole_batch(shape):
    """Accumulation over unequal lengths, answers only, clipping and schedule change nothing."""
    rows = make_rows()
    plain = fresh(shape)
    expected = plain_training(plain, rows)
    assert max(norm for _, norm, _ in expected) > RUN.max_grad_norm  # it did clip

    trained = fresh(shape)
    steps = training_steps(trained, rows, run=RUN, pad_token_id=0)
    ours = [(step.loss, step.gradient_norm, step.learning_rate) for step in steps]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=2e-4, atol=1e-5)
    assert apart(trained.parameters(), plain.parameters()) < 1e-3


@pytest.mark.parametrize(("shape", "method"), [("tiny-gpt2", "lora"), ("tiny-llama", "qlora")])
def test_adapters_learn_under_checkpointing(shape, method):
    """On Conv1D and on linear layers: checkpointing must not cut the gradients of adapters."""
    run = change(method=method, steps=8, learning_rate=2e-2, gradient_checkpointing=True)
    model = fresh(shape, method=method, gradient_checkpointing=True)
    curve = losses_of(training_steps(model, make_rows(4), run=run, pad_token_id=0))
    assert curve[-1] < curve[0] - 0.1


def test_a_step_that_overflowed_says_that_it_changed_nothing(monkeypatch):
    """fp16 ends at 65,504: with this first scale gradients are infinite, until it is halved."""
    monkeypatch.setattr("recipes_lib.precision.mixed_precision.FIRST_SCALE", 2.0**24)
    run = change(precision="fp16", method="lora", steps=12, warmup_steps=0)
    model = fresh("tiny-llama", method="lora")
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    changed = []
    steps = []
    before = [parameter.clone() for parameter in adapters]
    for step in training_steps(model, make_rows(), run=run, pad_token_id=0):
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, adapters)))
        before = [parameter.clone() for parameter in adapters]
        steps.append(step)
    assert [step.updated for step in steps] == changed
    assert not steps[0].updated and steps[-1].updated
    assert steps[1].learning_rate == steps[0].learning_rate, "the schedule waits"


def test_packed_rows_give_the_loss_of_the_padded_ones():
    """The mistake: packed rows in a plain batch, where documents see each other."""
    rows = make_rows(8)
    packed = pack_sequences(rows, length=64)
    short = {"steps": 1, "warmup_steps": 0}
    whole = change(**short, rows_per_step=8)
    in_packs = change(**short, rows_per_step=len(packed), micro_batch_size=1)
    expected = losses_of(training_steps(fresh(), rows, run=whole, pad_token_id=0))
    found = losses_of(training_steps(fresh(), packed, run=in_packs, pad_token_id=0))
    assert found == pytest.approx(expected, rel=1e-5)


# --- stopped and resumed ------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_bnb_8bit"])
def test_a_run_that_stops_goes_on_with_the_identical_losses(tmp_path, optimizer):
    """A step is logged before it is kept, so the last one that was seen is done again."""
    adapters = {"method": "lora", "dropout": 0.1}
    options = {"run": change(optimizer=optimizer, save_steps=1, **adapters), "pad_token_id": 0}
    rows = make_rows()
    whole = losses_of(training_steps(fresh(**adapters), rows, **options))

    first = training_steps(fresh(**adapters), rows, **options, folder=tmp_path)
    begun = [next(first).loss for _ in range(3)]
    first.close()
    resumed = training_steps(fresh(**adapters), rows, **options, folder=tmp_path, resume=True)
    rest = list(resumed)
    assert rest[0].number == 2
    assert begun == whole[:3]
    assert begun[:2] + losses_of(rest) == whole


@pytest.mark.parametrize(("save_steps", "taken", "kept"), [(1, 1, None), (2, 5, 4), (10, 5, None)])
def test_checkpoint_of_a_step_comes_after_it_was_taken(tmp_path, save_steps, taken, kept):
    """Otherwise a kill would leave a step in the checkpoint that is missing in the log."""

    def step_of_checkpoint():
        if not (tmp_path / CHECKPOINT).exists():
            return None
        return facts_in_checkpoint(RUN, tmp_path)["done"]

    run = change(save_steps=save_steps)
    steps = training_steps(fresh(), make_rows(), run=run, pad_token_id=0, folder=tmp_path)
    for _ in range(taken):
        next(steps)
    assert step_of_checkpoint() == kept
    list(steps)
    assert step_of_checkpoint() == RUN.steps


# --- bad input ----------------------------------------------------------------------------------


def test_what_cannot_train_is_refused():
    """The mistake: the base is loaded and measured, and then the optimizer fails."""
    nothing = {"folder": Path("nothing"), "resume": False}
    with pytest.raises(ValueError, match="12 rows are fewer than rows_per_step=16"):
        check_run(make_rows(), run=change(rows_per_step=16), **nothing)
    with mock.patch("recipes_lib.workflows.finetune.checks.machine") as here:
        here.return_value.device = "cpu"
        with pytest.raises(ValueError, match="needs a GPU"):
            check_run(make_rows(), run=change(optimizer="paged_adamw_8bit"), **nothing)


def test_the_checkpoint_of_another_run_is_refused(tmp_path):
    """The mistake: a run that goes on with another rate, other data, or on another base."""
    rows = make_rows()
    run = change(save_steps=1)
    begun = training_steps(fresh(), rows, run=run, pad_token_id=0, folder=tmp_path, base="a")
    next(begun)
    next(begun)  # the second step keeps the first
    with pytest.raises(ValueError, match="resume it, or choose another folder"):
        check_run(rows, run=run, folder=tmp_path, resume=False)
    goes_on = {"folder": tmp_path, "resume": True}
    check_run(rows, run=run, **goes_on)  # before its base is loaded
    for name, value in {"learning_rate": 1.0, "rows_per_step": 2}.items():
        other = dataclasses.replace(run, **{name: value})
        with pytest.raises(ValueError, match=rf"another run .*{name}"):
            check_run(rows, run=other, **goes_on)
    whole_texts = [row | {"labels": row["input_ids"]} for row in rows]
    for other_rows in (rows[1:], whole_texts):
        with pytest.raises(ValueError, match=r"another run .*data"):
            check_run(other_rows, run=run, **goes_on)
    with pytest.raises(ValueError, match=r"another run .*base"):
        check_run(rows, run=run, **goes_on, base="b")
