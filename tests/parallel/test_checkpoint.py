import os
import time
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.ranks import world_size
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.weighted_step import counted_tokens, rank_rows
from recipes_lib.parallel.checkpoint import (
    latest_checkpoint,
    load_by_hand,
    load_checkpoint,
    save_by_hand,
    save_checkpoint,
    save_checkpoint_async,
)
from recipes_lib.parallel.checkpoint.export import export_safetensors
from tests.core.refusal import refusal
from tests.parallel import parity

RUN = {"lr": 1e-3, "rows": 8}
SAVED_AFTER = 2
STEPS = 4
DISK_SECONDS = 0.15  # what a file takes on the slow disk of a test


# --- on ranks -------------------------------------------------------------------------------------


class Training:
    """A model, divided as `kind` says, its optimizer and schedule, and the steps of the run."""

    def __init__(self, kind="plain", seed=0, **changes):
        self.model = parity.tiny_model(seed=seed, **changes)
        if kind == "sharded":
            for block in self.model.model.layers:
                fully_shard(block)
            fully_shard(self.model)
        elif kind in ("copies", "zero"):
            self.model = DistributedDataParallel(self.model)
        if kind == "zero":
            self.optimizer = ZeroRedundancyOptimizer(
                self.model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2, eps=1e-3
            )
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))

    @property
    def state(self):
        """The arguments of save_checkpoint and load_checkpoint."""
        parts = {"schedule": self.schedule}
        return {"model": self.model, "optimizer": self.optimizer, "run": RUN, "parts": parts}

    def steps(self, first, last):
        """Losses over the tokens of all ranks."""
        losses = []
        for step in range(first, last):
            batch = parity.global_batch(step)
            mine = {name: tensor[rank_rows(parity.ROWS)] for name, tensor in batch.items()}
            logits = self.model(input_ids=mine["input_ids"], use_cache=False).logits
            tokens = counted_tokens(mine["labels"])
            loss = parity.loss_sum(logits, mine["labels"]) / tokens
            (loss * world_size()).backward()  # ranks are averaged
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses += sums_over_ranks(loss.item())
        return losses


def save_and_go_on(folder, kind):
    """Losses of the whole run, and the random number that is drawn after the save."""
    training = Training(kind)
    training.steps(0, SAVED_AFTER)
    save_checkpoint(folder, step=SAVED_AFTER, **training.state)
    drawn = torch.rand(()).item()
    return training.steps(SAVED_AFTER, STEPS), drawn


def load_and_go_on(folder, kind):
    """Losses after the checkpoint, and the random number that is drawn after loading."""
    training = Training(kind, seed=1)
    assert load_checkpoint(folder, **training.state) == SAVED_AFTER
    drawn = torch.rand(()).item()
    return training.steps(SAVED_AFTER, STEPS), drawn


def load_in_two_kinds(folder):
    return {kind: load_and_go_on(folder, kind) for kind in ("sharded", "zero")}


def save_beside_the_training(folder):
    """Stalls on a slow disk, and what the checkpoint holds that was written while training."""
    training = Training("sharded")
    training.steps(0, 1)
    stalls = {}
    fsync = os.fsync

    def slowly(number):
        time.sleep(DISK_SECONDS)
        fsync(number)

    with mock.patch.object(dcp.filesystem.os, "fsync", slowly):
        began = time.perf_counter()
        save_checkpoint(f"{folder}/sync", step=1, **training.state)
        stalls["sync"] = time.perf_counter() - began
        pending = None
        for step in (1, 2):
            training.steps(step, step + 1)
            began = time.perf_counter()
            pending = save_checkpoint_async(
                f"{folder}/async", step=step, after=pending, **training.state
            )
            if step == 1:
                stalls["async"] = time.perf_counter() - began
                early = latest_checkpoint(f"{folder}/async")
        # Collectives of the training meet those of the thread, and weights change under its hands.
        losses = training.steps(3, 5)
        pending.wait()
    again = Training("sharded", seed=1)
    done = load_checkpoint(f"{folder}/async", **again.state)
    return stalls, early, done, losses, again.steps(3, 5)


def half_frozen(kind="plain", *, seed):
    """Only the head trains, as an adapter does."""
    training = Training(kind, seed=seed)
    training.model.model.requires_grad_(False)
    training.optimizer = torch.optim.AdamW(training.model.lm_head.parameters(), lr=1e-2)
    training.schedule = torch.optim.lr_scheduler.ConstantLR(training.optimizer)
    return training


def refusals(folder):
    """What each rank is told, for one mistake after the other."""
    mine = distributed.get_rank()
    training = Training("sharded")
    state = training.state
    told = {}

    def expect(name, function, **arguments):
        before = [p.detach().to_local().clone() for p in training.model.parameters()]
        told[name] = refusal(function, **arguments)
        after = [p.detach().to_local() for p in training.model.parameters()]
        assert all(map(torch.equal, before, after)), name

    expect("empty", load_checkpoint, folder=folder, **state)
    save_checkpoint(folder, step=3, **state)
    expect("older", save_checkpoint, folder=folder, step=3, **state)
    expect("run", load_checkpoint, folder=folder, **state | {"run": {**RUN, "lr": 1.0}})
    expect("one_rank", load_checkpoint, folder=folder, **state | {"run": {**RUN, "rows": 8 + mine}})
    frozen = half_frozen("sharded", seed=0)
    save_checkpoint(f"{folder}/frozen", step=1, **frozen.state)
    load_checkpoint(f"{folder}/frozen", **frozen.state)
    other_base = half_frozen("sharded", seed=1)
    expect("base", load_checkpoint, folder=f"{folder}/frozen", **other_base.state)
    expect("not_shared", latest_checkpoint, folder=folder if mine == 0 else f"{folder}/other")
    broken = mock.Mock(side_effect=OSError("the disk is full"))
    with mock.patch.object(dcp.FileSystemWriter, "write_data", broken) if mine else nullcontext():
        expect("parts", save_checkpoint, folder=f"{folder}/parts", step=1, **state)
    return parity.of_all_ranks(told)


def export_from_shards(folder):
    model = Training("sharded").model
    export_safetensors(f"{folder}/one", model=model)
    assert "holds model" in refusal(export_safetensors, f"{folder}/one", model=model)
    tied = Training("sharded", tie_word_embeddings=True).model
    export_safetensors(f"{folder}/tied", model=tied)


# --- as many ranks as there are -------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_four(four_ranks, tmp_path_factory):
    """A folder that four ranks have saved in, and their losses."""
    folder = tmp_path_factory.mktemp("of_four")
    losses, drawn = four_ranks.run(save_and_go_on, timeout=120, folder=str(folder), kind="sharded")
    return folder, losses, drawn


def assert_same(got, expected):
    assert got == pytest.approx(expected, abs=1e-6)


def test_four_ranks_save_and_one_two_and_four_go_on(of_four, four_ranks, two_ranks):
    """The mistake: as many ranks as have saved, and no others, go on with the same losses."""
    folder, expected, drawn = of_four
    losses, again = four_ranks.run(load_and_go_on, timeout=120, folder=str(folder), kind="sharded")
    assert losses == expected  # to the last bit
    assert again == drawn
    for losses, _ in two_ranks.run(load_in_two_kinds, timeout=120, folder=str(folder)).values():
        assert_same(losses, expected)
    assert_same(load_and_go_on(folder, "plain")[0], expected)


def test_zero_on_two_ranks_saves_for_one(two_ranks, tmp_path):
    """The mistake: with ZeRO stage 1 each rank has other states, and DDP has other names."""
    expected, _ = two_ranks.run(save_and_go_on, timeout=120, folder=str(tmp_path), kind="zero")
    assert_same(load_and_go_on(tmp_path, "plain")[0], expected)


def test_a_save_in_the_background_stalls_less_and_holds_the_state_of_its_step(two_ranks, tmp_path):
    """The mistake: the thread writes weights that the next step has changed, or waits for ever."""
    stalls, early, done, losses, again = two_ranks.run(
        save_beside_the_training, timeout=120, folder=str(tmp_path)
    )
    assert stalls["async"] < stalls["sync"] - DISK_SECONDS
    assert early is None  # LATEST names nothing that is not written yet
    assert done == 2
    assert again == losses


def test_mistakes_raise_on_every_rank(two_ranks, tmp_path):
    """The mistake: one rank raises, and the others wait for it for ever."""
    told = two_ranks.run(refusals, timeout=60, folder=str(tmp_path / "a"))
    messages = {
        "empty": "there is no checkpoint in",
        "older": "holds a checkpoint of step-00000003, and this is step-00000003",
        "run": "another run (run lr: 0.001 there, 1.0 here",
        "one_rank": "the ranks differ in run rows",
        "base": "base model.embed_tokens.weight: '",
        "not_shared": "latest_checkpoint: rank 0 gives",
        "parts": "the disk is full",
    }
    for of_rank in told:
        assert of_rank.keys() == messages.keys()
        for name, message in messages.items():
            assert message in of_rank[name], name
    # The same base is known on another number of ranks.
    assert load_checkpoint(tmp_path / "a" / "frozen", **half_frozen(seed=0).state) == 1


# --- one process ----------------------------------------------------------------------------------


def test_by_hand_the_same_state_comes_back(tmp_path):
    """The mistake: the idea is not what the technique does."""
    training = Training()
    training.steps(0, SAVED_AFTER)
    save_by_hand(tmp_path, training.model, training.optimizer)
    expected = training.steps(SAVED_AFTER, STEPS)
    again = Training(seed=1)
    load_by_hand(tmp_path, again.model, again.optimizer)
    again.schedule.last_epoch = SAVED_AFTER
    assert again.steps(SAVED_AFTER, STEPS) == expected


def test_an_interrupted_save_leaves_the_checkpoint_before(tmp_path):
    """The mistakes: LATEST names a folder of which a part is missing; the disk runs full."""
    training = Training()
    save_checkpoint(tmp_path, step=1, **training.state)
    finish = mock.patch.object(dcp.FileSystemWriter, "finish", side_effect=OSError("killed"))
    with finish, pytest.raises(ValueError, match="killed"):
        save_checkpoint(tmp_path, step=2, **training.state)
    with finish:
        pending = save_checkpoint_async(tmp_path, step=2, **training.state)
        with pytest.raises(ValueError, match="killed"):
            pending.wait()
    assert (tmp_path / "step-00000002" / "run.json").exists()
    assert load_checkpoint(tmp_path, **training.state) == 1
    save_checkpoint(tmp_path, step=2, **training.state)
    assert load_checkpoint(tmp_path, **training.state) == 2
    save_checkpoint(tmp_path, step=3, keep=1, **training.state)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]
    (tmp_path / "LATEST").write_text("step-00000009")
    with pytest.raises(ValueError, match="names step-00000009, which is not there or not whole"):
        latest_checkpoint(tmp_path)


def test_only_what_trains_is_saved(tmp_path):
    """The mistake: leftover gradients keep the states of a fresh optimizer away."""
    training = half_frozen(seed=0)
    training.steps(0, 1)
    # torch.load takes no number of NumPy from a file, and schedules by numpy.cos have them.
    training.schedule.base_lrs = [np.float64(1e-2)]
    training.optimizer.param_groups[0]["lr"] = np.float64(5e-3)
    save_checkpoint(tmp_path, step=1, **training.state)
    metadata = dcp.FileSystemReader(latest_checkpoint(tmp_path)).read_metadata()
    names = [name for name in metadata.state_dict_metadata if name.startswith("model.")]
    assert names == ["model.lm_head.weight"]
    again = half_frozen(seed=0)
    again.model.lm_head.weight.grad = torch.ones_like(again.model.lm_head.weight)
    load_checkpoint(tmp_path, **again.state)
    assert again.model.lm_head.weight.grad is None
    assert again.optimizer.param_groups[0]["lr"] == 5e-3
    assert again.steps(1, 3) == training.steps(1, 3)


# --- the export -----------------------------------------------------------------------------------


def test_the_export_is_the_model_bit_for_bit(two_ranks, tmp_path):
    """The mistake: the folder holds the part of one rank, or a tied weight twice."""
    two_ranks.run(export_from_shards, timeout=60, folder=str(tmp_path))
    model = parity.tiny_model()
    load = transformers.AutoModelForCausalLM.from_pretrained
    again = load(tmp_path / "one")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    tied = load(tmp_path / "tied")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    expected = parity.tiny_model(tie_word_embeddings=True).lm_head.weight
    assert torch.equal(tied.lm_head.weight, expected)
