"""launch/train.py: every strategy trains what one process trains."""

import pytest
import torch

from recipes_lib.core.model import load_tokenizer
from tests.launch.one_process import OPTIONS, losses_alone
from tests.launch.scripts import load

STEPS = 3


@pytest.fixture(scope="module")
def alone():
    return losses_alone(STEPS)


def train_in_turns(runs):
    """On a rank: the losses of `train.py` with each list of words."""
    train = load("train")
    found = []
    for words in runs:
        options = train.read_options([*OPTIONS, *words])
        found.append(train.train(options, torch.device("cpu")))
    return found


STRATEGIES = {
    "ddp": ["--strategy", "ddp"],
    "zero": ["--strategy", "zero", "--stage", "2"],
    "fsdp": ["--strategy", "fsdp"],
    "tp": ["--strategy", "tp"],
}


def test_every_strategy_trains_what_one_process_trains(two_ranks, alone):
    """A loss that is off by the number of ranks, or rows that are read twice, would show here."""
    runs = [[*words, "--device", "cpu", "--steps", str(STEPS)] for words in STRATEGIES.values()]
    for name, losses in zip(STRATEGIES, two_ranks.run(train_in_turns, runs=runs)):
        assert losses == pytest.approx(alone, abs=1e-5), name


BF16 = ["ddp", "fsdp"]


def test_data_of_ones_own(tmp_path):
    """The mistake: an option that does not reach the tokens."""
    text = load("text")
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "one two"}\n{"text": "three"}')
    tokens = text.make_tokens("smollm2", str(path))
    words = load_tokenizer().decode(tokens, skip_special_tokens=True)
    assert words == "one twothree"


def test_bf16_is_near(two_ranks, alone):
    """The mistake: an option that nobody reads, or 16 bits for the states as well."""
    runs = [[*STRATEGIES[name], "--device", "cpu", "--bf16", "--steps", "2"] for name in BF16]
    for name, losses in zip(BF16, two_ranks.run(train_in_turns, runs=runs)):
        assert losses == pytest.approx(alone[:2], abs=0.02), name
        assert losses != pytest.approx(alone[:2], abs=1e-6), name  # it did compute in bf16
