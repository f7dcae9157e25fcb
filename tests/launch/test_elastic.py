"""A rank is killed, torchrun starts all ranks again, and the losses are those of a whole run."""

import pytest

from recipes_lib.parallel.checkpoint import require_own_store
from tests.launch.one_process import OPTIONS, losses_alone
from tests.launch.scripts import FORKED_TORCHRUN, ROOT, losses_in, run

SCRIPT = ROOT / "tests" / "launch" / "dying_train.py"


def test_a_killed_rank_changes_no_loss(tmp_path):
    """The mistake: what was trained since the last checkpoint is lost, or trained on other rows."""
    command = [*FORKED_TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command += ["--monitor-interval", "0.2", SCRIPT, *OPTIONS, "--strategy", "fsdp"]
    command += ["--device", "cpu", "--steps", "8", "--save-every", "3", "--checkpoints", tmp_path]
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT)}
    code, printed = run(command, **own)
    assert code == 0, printed
    assert "going on after step 3" in printed
    expected = losses_alone(8)
    # Step 4 was trained since the last checkpoint, and is trained again.
    assert losses_in(printed) == pytest.approx([*expected[:4], *expected[3:]], abs=1e-5)


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
