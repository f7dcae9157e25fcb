import os
import pickle
import time
from pathlib import Path
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
from recipes_lib.core.ranks.rank_rows import counted_tokens, rank_rows
from recipes_lib.parallel.checkpoint import (
    latest_checkpoint,
    load_by_hand,
    load_checkpoint,
    predicted_interval_seconds,
    predicted_lost_share,
    predicted_written_bytes,
    save_by_hand,
    save_checkpoint,
    save_checkpoint_async,
)
from recipes_lib.parallel.checkpoint.base import frozen_values
from recipes_lib.parallel.checkpoint.export import export_safetensors
from recipes_lib.parallel.checkpoint.latest import set_latest
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


def save_two_stages(folder):
    """Each rank has one layer of two, under the name that it has in the whole model."""
    number = distributed.get_rank()
    stage = torch.nn.Module()
    stage.add_module(str(number), torch.nn.Linear(4, 4))
    torch.nn.init.constant_(stage.get_parameter(f"{number}.weight"), number + 1.0)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1 * (number + 1))
    for parameter in stage.parameters():
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    save_checkpoint(folder, step=1, model=stage, optimizer=optimizer, run=RUN)
    load_checkpoint(folder, model=stage, optimizer=optimizer, run=RUN)


def half_frozen(kind="plain", *, seed):
    """Only the head trains, as an adapter does."""
    training = Training(kind, seed=seed)
    training.model.model.requires_grad_(False)
    head = training.model.lm_head.parameters()
    training.optimizer = torch.optim.AdamW(head, lr=1e-2)
    training.schedule = torch.optim.lr_scheduler.ConstantLR(training.optimizer)
    return training


def reads_of_single_numbers():
    """How many frozen weights there are, and how often one number was asked for."""
    model = half_frozen("sharded", seed=0).model
    read = []
    item = torch.Tensor.item

    def counted(tensor):
        read.append(item(tensor))
        return read[-1]

    with mock.patch.object(torch.Tensor, "item", counted):
        values = frozen_values(model)
    return len(values), len(read)


def refusals(folder):
    """What each rank is told, for one mistake after the other."""
    mine = distributed.get_rank()
    training = Training("sharded")
    state = training.state
    told = {}

    def expect(name, function, **arguments):
        before = [p.detach().to_local().clone() for p in training.model.parameters()]
        try:
            function(**arguments)
            told[name] = "nothing"
        except ValueError as error:
            told[name] = str(error)
        after = [p.detach().to_local() for p in training.model.parameters()]
        assert all(map(torch.equal, before, after)), name

    expect("empty", load_checkpoint, folder=folder, **state)
    expect("step", save_checkpoint, folder=folder, step=2.5, **state)
    expect("disagree", save_checkpoint, folder=folder, step=1 + mine, **state)
    save_checkpoint(folder, step=3, **state)
    expect("older", save_checkpoint, folder=folder, step=3, **state)
    expect("run", load_checkpoint, folder=folder, **state | {"run": {**RUN, "lr": 1.0}})
    expect("one_rank", load_checkpoint, folder=folder, **state | {"run": {**RUN, "rows": 8 + mine}})
    expect("parts", load_checkpoint, folder=folder, **state | {"parts": {}})
    other = {"optimizer": torch.optim.SGD(training.model.parameters(), lr=0.1)}
    expect("optimizer", load_checkpoint, folder=folder, **state | other)
    lower = Training("sharded", num_hidden_layers=3)
    expect("layers", load_checkpoint, folder=folder, **lower.state)
    wider = Training("sharded", intermediate_size=192)
    expect("shape", load_checkpoint, folder=folder, **wider.state)
    frozen = half_frozen("sharded", seed=0)
    save_checkpoint(f"{folder}/frozen", step=1, **frozen.state)
    load_checkpoint(f"{folder}/frozen", **frozen.state)
    other_base = half_frozen("sharded", seed=1)
    expect("base", load_checkpoint, folder=f"{folder}/frozen", **other_base.state)
    expect("not_shared", latest_checkpoint, folder=folder if mine == 0 else f"{folder}/other")
    if mine == 0:
        (Path(folder) / "LATEST").write_text("step-9")
    distributed.barrier()
    expect("not_whole", latest_checkpoint, folder=folder)
    broken = mock.Mock(side_effect=OSError("the disk is full"))
    if mine == 1:
        with mock.patch.object(torch, "save", broken):
            expect("full", save_checkpoint, folder=f"{folder}/full", step=1, **state)
    else:
        expect("full", save_checkpoint, folder=f"{folder}/full", step=1, **state)
    everybody = [None] * distributed.get_world_size()
    distributed.all_gather_object(everybody, told)
    return everybody


def export_from_shards(folder):
    model = Training("sharded").model
    export_safetensors(f"{folder}/one", model=model)
    export_safetensors(f"{folder}/bf16", model=model, dtype=torch.bfloat16, file_bytes=200_000)
    told = []
    for given, path in ((model, "one"), (torch.nn.Linear(2, 2), "other")):
        try:
            export_safetensors(f"{folder}/{path}", model=given)
        except ValueError as error:
            told.append(str(error))
    tied = Training("sharded", tie_word_embeddings=True).model
    export_safetensors(f"{folder}/tied", model=tied)
    return told


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
    """With the same losses, and on as many ranks with the same random numbers."""
    folder, expected, drawn = of_four
    losses, again = four_ranks.run(load_and_go_on, timeout=120, folder=str(folder), kind="sharded")
    assert losses == expected  # to the last bit
    assert again == drawn
    for losses, _ in two_ranks.run(load_in_two_kinds, timeout=120, folder=str(folder)).values():
        assert_same(losses, expected)
    assert_same(load_and_go_on(folder, "plain")[0], expected)


@pytest.mark.parametrize("kind", ["copies", "zero"])
def test_whole_models_on_two_ranks_save_for_one(kind, two_ranks, tmp_path):
    """With DDP all ranks hold the same, and with ZeRO stage 1 each one has other states."""
    expected, _ = two_ranks.run(save_and_go_on, timeout=120, folder=str(tmp_path), kind=kind)
    assert_same(load_and_go_on(tmp_path, "plain")[0], expected)


def tensor_bytes_by_file(place):
    """Bytes of tensors in each file of a checkpoint, without what PyTorch writes around them."""
    metadata = dcp.FileSystemReader(place).read_metadata()
    found = {}
    for index, where in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        for chunk in getattr(entry, "chunks", []):
            if chunk.offsets == index.offset:
                size = chunk.sizes.numel() * entry.properties.dtype.itemsize
                found[where.relative_path] = found.get(where.relative_path, 0) + size
    return found


def test_each_rank_writes_the_predicted_bytes(of_four):
    place = latest_checkpoint(of_four[0])
    predicted = predicted_written_bytes(parity.tiny_model(), ranks=4)
    written = tensor_bytes_by_file(place)
    assert len(written) == 4
    for name, size in written.items():
        assert size == pytest.approx(predicted, rel=0.01)
        # Entries of this model are small, and a kilobyte around each of them is as much again.
        assert predicted <= (place / name).stat().st_size < 3 * predicted


def test_every_part_of_the_checkpoint_is_needed(of_four):
    """The losses differ if one thing is not restored: the tests above are not vacuous."""
    folder, expected, _ = of_four
    for forget in ("model", "optimizer", "schedule"):
        training = Training(seed=1)
        load_checkpoint(folder, **training.state)
        fresh = Training(seed=1)
        if forget == "model":
            training.model.load_state_dict(fresh.model.state_dict())
        elif forget == "optimizer":
            training.optimizer.state.clear()
        else:
            training.optimizer.param_groups[0]["lr"] = 1e-2
            training.schedule.last_epoch = 0
        losses = training.steps(SAVED_AFTER, STEPS)
        assert abs(losses[-1] - expected[-1]) > 1e-4, forget


def test_a_save_in_the_background_stalls_less_and_holds_the_state_of_its_step(two_ranks, tmp_path):
    stalls, early, done, losses, again = two_ranks.run(
        save_beside_the_training, timeout=120, folder=str(tmp_path)
    )
    assert stalls["sync"] > DISK_SECONDS
    assert stalls["async"] < stalls["sync"] - DISK_SECONDS
    assert early is None  # LATEST names nothing that is not written yet
    assert done == 2
    assert again == losses


def test_mistakes_raise_on_every_rank(two_ranks, tmp_path):
    told = two_ranks.run(refusals, timeout=60, folder=str(tmp_path / "a"))
    messages = {
        "empty": "there is no checkpoint in",
        "step": "step=2.5: give a whole number of 1 or more",
        "disagree": "step: rank 0 gives 1, rank 1 gives 2",
        "older": "holds a checkpoint of step 3, and this is step 3",
        "run": "another run (lr: 0.001 there, 1.0 here)",
        "one_rank": "rank 1: .* another run (rows: 8 there, 9 here)",
        "parts": "holds other parts: ['schedule'], not []",
        "optimizer": "optimizer: 'AdamW' there, 'SGD' here",
        "shape": "down_proj.weight is (64, 128) in torch.float32 there and (64, 192) in",
        "layers": "model.layers.3.input_layernorm.weight is (64,) in torch.float32 there and miss",
        "base": "was trained on another base",
        "not_shared": "latest_checkpoint: rank 0 gives",
        "not_whole": "names step-9, which is not there or not whole",
        "full": "rank 1: the disk is full",
    }
    for of_rank in told:
        assert of_rank.keys() == messages.keys()
        for name, message in messages.items():
            for piece in message.split(".*"):
                assert piece in of_rank[name], name
    # The same base is known on another number of ranks.
    assert load_checkpoint(tmp_path / "a" / "frozen", **half_frozen(seed=0).state) == 1


def test_the_base_is_read_in_one_copy(two_ranks):
    """Each of 16 numbers per frozen weight was copied by itself, and each copy waits for a GPU."""
    weights, reads = two_ranks.run(reads_of_single_numbers, timeout=60)
    assert weights > 10
    assert reads < 10  # those of the collective that puts the values of the ranks together


def test_stages_of_a_pipeline_save_a_whole_model(two_ranks, tmp_path):
    two_ranks.run(save_two_stages, timeout=60, folder=str(tmp_path))
    whole = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    groups = [{"params": layer.parameters()} for layer in whole]
    optimizer = torch.optim.AdamW(groups)
    load_checkpoint(tmp_path, model=whole, optimizer=optimizer, run=RUN)
    for number, layer in enumerate(whole):
        averages = optimizer.state[layer.weight]["exp_avg"]
        assert averages == pytest.approx(0.1 * (number + 1)), number
        assert optimizer.param_groups[number]["lr"] == 0.1 * (number + 1)


# --- one process ----------------------------------------------------------------------------------


def test_by_hand_the_same_state_comes_back(tmp_path):
    training = Training()
    training.steps(0, SAVED_AFTER)
    save_by_hand(tmp_path, training.model, training.optimizer)
    expected = training.steps(SAVED_AFTER, STEPS)
    again = Training(seed=1)
    load_by_hand(tmp_path, again.model, again.optimizer)
    again.schedule.last_epoch = SAVED_AFTER
    assert again.steps(SAVED_AFTER, STEPS) == expected


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path):
    """And the run that went on from it writes the same step again."""
    training = Training()
    save_checkpoint(tmp_path, step=1, **training.state)
    finish = mock.patch.object(dcp.FileSystemWriter, "finish", side_effect=OSError("killed"))
    with finish, pytest.raises(ValueError, match="rank 0: killed"):
        save_checkpoint(tmp_path, step=2, **training.state)
    assert (tmp_path / "step-00000002" / "run.pt").exists()
    assert load_checkpoint(tmp_path, **training.state) == 1
    save_checkpoint(tmp_path, step=2, **training.state)
    assert load_checkpoint(tmp_path, **training.state) == 2


def a_net(seed, dtype=torch.float32):
    """A small net whose second layer trains, and what saves it."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(dtype)
    net[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(net[1].parameters())
    net(torch.ones(2, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {"model": net, "optimizer": optimizer, "run": RUN, "parts": {"schedule": cosine}}


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "random-0.pt", "run.pt"])
def test_a_flipped_byte_is_found(tmp_path, name):
    """PyTorch reads no checksum: another weight was loaded, or some before the damaged one."""
    save_checkpoint(tmp_path, step=1, **a_net(seed=0))
    [path] = tmp_path.glob(f"step-*/{name}")
    content = path.read_bytes()
    weight = a_net(seed=0)["model"][1].weight.detach().numpy().tobytes()
    middle = content[len(content) // 2 :][:20]
    within = {"__0_0.distcp": weight, "run.pt": b"rows"}.get(name, middle)
    assert content.count(within) > 0
    path.write_bytes(content.replace(within, within[:-1] + bytes([within[-1] ^ 1])))
    again = a_net(seed=0)
    before = again["model"][1].weight.detach().clone()
    with torch.no_grad():
        again["model"][1].weight += 1
    with pytest.raises(ValueError, match="is damaged"):
        load_checkpoint(tmp_path, **again)
    assert torch.equal(again["model"][1].weight, before + 1)


def test_a_list_of_parts_runs_no_code(tmp_path):
    """PyTorch unpickles it: a checkpoint of a stranger could do anything."""

    class Code:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    save_checkpoint(tmp_path, step=1, **a_net(seed=0))
    place = latest_checkpoint(tmp_path)
    (place / ".metadata").write_bytes(pickle.dumps(Code()))
    (place / "metadata.sha256").unlink()
    with pytest.raises(ValueError, match=r"open has no place in a list of parts"):
        load_checkpoint(tmp_path, **a_net(seed=0))
    assert not (tmp_path / "ran").exists()


def other_net(change):
    """The net, but one thing is another one."""
    given = a_net(seed=0, dtype=torch.bfloat16 if change == "dtype" else torch.float32)
    net = given["model"]
    if change == "base":
        torch.nn.init.ones_(net[0].weight)
    if change == "optimizer":
        given["optimizer"] = torch.optim.AdamW([net[1].weight])
    if change == "schedule":
        given["parts"] = {"schedule": torch.optim.lr_scheduler.StepLR(given["optimizer"], 2)}
    return given


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dtype", "1.bias is .* in torch.float32 there and .* in torch.bfloat16 here"),
        ("base", "trained on another base: 1 frozen weights .* first is 0.weight"),
        ("optimizer", r"an optimizer of 2 parameters, and this one has 1 \(1.bias is in one"),
        ("schedule", "as schedule the state of CosineAnnealingLR, not of StepLR"),
    ],
)
def test_what_fits_and_is_another_is_refused(tmp_path, change, message):
    """Each of them was loaded without a word."""
    save_checkpoint(tmp_path, step=1, **a_net(seed=0))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, **other_net(change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": {"limit": float("nan")}}, "the fact limit of the run is nan"),
        ({"optimizer": torch.optim.AdamW([torch.zeros(3)])}, "1 parameters of the optimizer are n"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path, step=1, **a_net(seed=0) | change)
    assert latest_checkpoint(tmp_path) is None


def test_numbers_of_numpy_come_back(tmp_path):
    """A rate from numpy.cos was saved without a word, and refused as damaged when it was loaded."""
    given = a_net(seed=0)
    rate = 1e-3 * np.cos(0.3)
    given["optimizer"].param_groups[0].update(lr=rate, betas=(np.float64(0.8), np.float64(0.9)))
    given["parts"]["schedule"].base_lrs = [rate]
    save_checkpoint(tmp_path, step=1, **given)
    again = a_net(seed=0)
    load_checkpoint(tmp_path, **again)
    [group] = again["optimizer"].param_groups
    assert group["lr"] == rate
    assert group["betas"] == (0.8, 0.9)
    assert again["parts"]["schedule"].base_lrs == [rate]


def test_a_setting_that_could_not_be_loaded_is_not_saved(tmp_path):
    """It was saved, and refused as damaged when it was loaded."""
    given = a_net(seed=0)
    given["optimizer"].param_groups[0]["log"] = Path("a")
    with pytest.raises(ValueError, match=r"the setting log=PosixPath\('a'\), .* str\(path"):
        save_checkpoint(tmp_path, step=1, **given)
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_another_class_is_not_called_damaged(tmp_path):
    """As earlier versions have saved it. Who trusts it can still load it, as the message says."""
    given = a_net(seed=0)
    given["optimizer"].param_groups[0]["log"] = Path("a")
    with mock.patch("recipes_lib.parallel.checkpoint.check_settings"):
        save_checkpoint(tmp_path, step=1, **given)
    message = r"as it was written, but optimizer.param_groups.1.\w+.log in it .*add_safe_globals"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, **given)
    with torch.serialization.safe_globals([type(tmp_path)]):
        assert load_checkpoint(tmp_path, **given) == 1


def test_a_setting_may_be_a_dictionary(tmp_path):
    """PyTorch takes it apart, and its name was taken for that of a parameter."""
    given = a_net(seed=0)
    given["optimizer"].param_groups[0]["info"] = {"x": 1}
    save_checkpoint(tmp_path, step=1, **given)
    again = a_net(seed=0)
    again["optimizer"].param_groups[0]["info"] = {"x": 2}
    load_checkpoint(tmp_path, **again)
    assert again["optimizer"].param_groups[0]["info"] == {"x": 1}


def test_a_refused_optimizer_stays_fresh(tmp_path):
    """It began with states of a step that nobody took, if the program caught the refusal."""
    save_checkpoint(tmp_path, step=1, **a_net(seed=0))
    again = a_net(seed=0)
    weight = again["model"][1].weight
    again["optimizer"] = torch.optim.AdamW([weight])
    gradient = weight.grad
    with pytest.raises(ValueError, match="an optimizer of 2 parameters"):
        load_checkpoint(tmp_path, **again)
    assert not again["optimizer"].state
    assert weight.grad is gradient


def test_a_base_with_nan_is_the_same_base(tmp_path):
    """NaN is not equal to itself, and the model was refused as trained on another base."""
    given = a_net(seed=0)
    torch.nn.init.constant_(given["model"][0].weight, float("nan"))
    save_checkpoint(tmp_path, step=1, **given)
    assert load_checkpoint(tmp_path, **given) == 1


def test_a_failed_save_in_the_background_is_told(tmp_path):
    training = Training()
    with mock.patch.object(dcp.FileSystemWriter, "finish", side_effect=OSError("no space")):
        pending = save_checkpoint_async(tmp_path, step=1, **training.state)
        with pytest.raises(ValueError, match="rank 0: no space"):
            pending.wait()
    assert pending.done()
    assert latest_checkpoint(tmp_path) is None


def test_the_last_checkpoints_stay(tmp_path):
    training = Training()
    for step in range(1, 5):
        save_checkpoint(tmp_path, step=step, keep=2, **training.state)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000003",
        "step-00000004",
    ]
    save_checkpoint(tmp_path, step=5, keep=1, **training.state)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000005"]
    set_latest(tmp_path, 4, keep=1)  # an earlier save that took longer in the background
    assert load_checkpoint(tmp_path, **training.state) == 5


def test_only_what_trains_is_saved(tmp_path):
    """And gradients that are left over do not keep the states of a fresh optimizer away."""

    training = half_frozen(seed=0)
    training.steps(0, 1)
    save_checkpoint(tmp_path, step=1, **training.state)
    [file] = latest_checkpoint(tmp_path).glob("*.distcp")
    predicted = predicted_written_bytes(training.model, ranks=1)
    assert tensor_bytes_by_file(file.parent)[file.name] == pytest.approx(predicted, rel=0.01)
    again = half_frozen(seed=0)
    again.model.lm_head.weight.grad = torch.ones_like(again.model.lm_head.weight)
    load_checkpoint(tmp_path, **again.state)
    assert again.model.lm_head.weight.grad is None
    assert again.steps(1, 3) == training.steps(1, 3)


def test_the_export_is_the_model_bit_for_bit(two_ranks, tmp_path):
    told = two_ranks.run(export_from_shards, timeout=60, folder=str(tmp_path))
    assert "holds model" in told[0]
    assert "has no configuration" in told[1]
    model = parity.tiny_model()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert not (tmp_path / "one" / "sharded").exists()
    files = list((tmp_path / "bf16").glob("*.safetensors"))
    assert len(files) == 2
    assert all(file.stat().st_size < 250_000 for file in files)
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.lm_head.weight, model.lm_head.weight.bfloat16())
    # A tied weight that is written twice is refused by safetensors.
    tied = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tied")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert torch.equal(
        tied.lm_head.weight, parity.tiny_model(tie_word_embeddings=True).lm_head.weight
    )


def test_how_often_to_save():
    """Young's interval costs less than half of it, and less than twice."""
    seconds = {"save_seconds": 30.0, "failure_seconds": 6 * 3600.0}
    best = predicted_interval_seconds(**seconds)
    costs = [
        predicted_lost_share(interval_seconds=best * factor, **seconds) for factor in (0.5, 1, 2)
    ]
    assert costs[1] == min(costs)
    assert best == pytest.approx(1138.4, abs=0.1)
