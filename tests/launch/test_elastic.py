"""A rank is killed, torchrun starts all ranks again, and the losses are those of a whole run."""

import json
import subprocess

import pytest
import torch

from recipes_lib.parallel.checkpoint import require_own_store
from tests.launch.scripts import FORKED_TORCHRUN, LAUNCH, environment

STEPS = 8
SAVE_EVERY = 3
DIES_AT = 4  # step 3 was trained since the last checkpoint, and is trained again


@pytest.fixture
def script(monkeypatch):
    """launch/train_elastic.py as a module. Its neighbours are found where a script finds them."""
    monkeypatch.syspath_prepend(str(LAUNCH))
    import train_elastic

    return train_elastic


def log_of(folder):
    """The steps that were logged, in their order, and with which step each start began."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [(line["step"], line["loss"]) for line in lines if "step" in line]
    return steps, [line["first"] for line in lines if "first" in line]


def train_alone(script, folder, *options):
    """The steps of one process that nobody kills."""
    script.train(script.read_options(["--folder", str(folder), *options]), torch.device("cpu"))
    return log_of(folder)[0]


def torchrun(folder, *options, limit=240):
    """Two ranks that may be started again."""
    command = [*FORKED_TORCHRUN, "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.2"]
    command += [str(LAUNCH / "train_elastic.py"), "--folder", str(folder), *options]
    own = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=limit)


def test_a_killed_rank_changes_no_loss(script, tmp_path):
    sizes = ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
    expected = train_alone(script, tmp_path / "alone", *sizes)

    done = torchrun(tmp_path / "elastic", *sizes, "--die-at", str(DIES_AT))
    assert done.returncode == 0, done.stderr[-3000:]
    steps, starts = log_of(tmp_path / "elastic")
    assert starts == [0, SAVE_EVERY]

    # What was trained twice has the same loss to the last bit.
    numbers = [step for step, _ in steps]
    assert numbers == [*range(DIES_AT), *range(SAVE_EVERY, STEPS)]
    assert dict(steps[:DIES_AT])[SAVE_EVERY] == dict(steps[DIES_AT:])[SAVE_EVERY]
    whole = dict(steps)  # the later of two, for a step that was trained twice
    assert [whole[step] for step, _ in expected] == pytest.approx(
        [loss for _, loss in expected], abs=1e-5
    )

    # And one process goes on where two have stopped.
    longer = ["--steps", str(STEPS + 2), "--save-every", str(SAVE_EVERY)]
    last_saved = STEPS // SAVE_EVERY * SAVE_EVERY
    whole = train_alone(script, tmp_path / "longer", *longer)
    goes_on = train_alone(script, tmp_path / "elastic", *longer)[len(steps) :]
    assert [step for step, _ in goes_on] == [*range(last_saved, STEPS + 2)]
    assert [loss for _, loss in goes_on] == pytest.approx(
        [loss for _, loss in whole[last_saved:]], abs=1e-5
    )


def test_ranks_that_share_the_store_of_all_attempts_are_refused(monkeypatch):
    """They would fail, or wait, for addresses of ranks that have died: now and then, not always."""
    require_own_store()  # without torchrun
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    require_own_store()  # nothing is started again
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ValueError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun"):
        require_own_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    require_own_store()
