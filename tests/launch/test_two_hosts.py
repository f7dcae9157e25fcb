"""The same training on two hosts, where this machine can have two: Linux, as root."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.survey
LAUNCH = Path(__file__).resolve().parents[2] / "launch"
STEPS = 3


@pytest.fixture
def scripts(monkeypatch):
    """launch/two_hosts.py and launch/train_elastic.py as modules."""
    monkeypatch.syspath_prepend(str(LAUNCH))
    import train_elastic
    import two_hosts

    return two_hosts, train_elastic


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return listed.stdout


def test_two_hosts_have_the_losses_of_one_process(scripts, tmp_path):
    two_hosts, train_elastic = scripts
    reason = two_hosts.missing()
    if reason is not None:
        pytest.skip(reason)
    before = namespaces()
    options = ["--folder", str(tmp_path / "two"), "--steps", str(STEPS)]
    script = [str(LAUNCH / "train_elastic.py"), *options]
    crossed = two_hosts.train_on_two_hosts(script, timeout=240)
    started, *steps = log_of(tmp_path / "two")
    assert started["hosts"] == ["recipes-a", "recipes-b"]
    assert namespaces() == before

    alone = train_elastic.read_options(["--folder", str(tmp_path / "one"), "--steps", str(STEPS)])
    train_elastic.train(alone, torch.device("cpu"))
    expected = [line["loss"] for line in log_of(tmp_path / "one")[1:]]
    assert [line["loss"] for line in steps] == pytest.approx(expected, abs=1e-5)

    # In each step a rank gathers the half of the weights that it has not, and sends as much.
    model = train_elastic.text.make_model("tiny-llama", device="cpu")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert crossed > STEPS * 2 * weights
