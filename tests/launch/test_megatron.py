"""launch/megatron: trains on CPU ranks where Megatron-Core is, and the same however it is cut.

pip install --no-deps --target /tmp/megatron megatron-core==0.16.1
MEGATRON=/tmp/megatron pytest tests/launch/test_megatron.py
"""

import math
import os
from importlib.util import find_spec

import pytest

from tests.launch.scripts import LAUNCH, ROOT, TORCHRUN, losses_in, run

pytestmark = pytest.mark.survey
MEGATRON = os.environ.get("MEGATRON", "")
SCRIPT = LAUNCH / "megatron" / "pretrain_gpt.py"
UNTRAINED = math.log(128)  # the loss of a model that has seen nothing, for 128 letters
needs_megatron = pytest.mark.skipif(
    not MEGATRON and find_spec("megatron") is None,
    reason="Megatron-Core is not here, and MEGATRON names no folder with it",
)


def train(*words, ranks):
    """The exit code, and what two steps print."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", ranks]
    command += ["tests/launch/megatron_on_cpu.py", "--shape", "tiny-llama", "--steps", "2"]
    path = os.pathsep.join(filter(None, [str(ROOT), MEGATRON]))
    code, printed = run([*command, "--length", "32", *words], PYTHONPATH=path)
    return code, printed


def test_the_script_compiles():
    compile(SCRIPT.read_text(encoding="utf-8"), SCRIPT, "exec")


@needs_megatron
def test_ranks_that_share_layers_or_rows_train_what_one_rank_trains():
    _, alone = train(ranks=1)
    losses = losses_in(alone)
    assert len(losses) == 2, alone
    # A loss that was divided by the number of micro-batches would be far below.
    assert losses[0] == pytest.approx(UNTRAINED, abs=0.15)
    for words in ([], ["--tensor", "2"]):
        _, printed = train(*words, ranks=2)
        assert losses_in(printed) == pytest.approx(losses, abs=1e-5), words


@needs_megatron
def test_a_pipeline_trains():
    """Its stages draw other weights than one rank does, and know as little at first."""
    _, printed = train("--pipeline", "2", ranks=2)
    assert losses_in(printed) == pytest.approx([UNTRAINED, UNTRAINED], abs=0.15)


@needs_megatron
@pytest.mark.parametrize("words", [["--tensor", "3"], ["--batch", "3"]], ids=["ranks", "rows"])
def test_what_does_not_divide_is_refused(words):
    code, printed = train(*words, ranks=2)
    assert code != 0
    assert "ValueError" in printed
