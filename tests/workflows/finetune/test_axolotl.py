"""The settings of a run as Axolotl reads them: its own code, in a process of its own."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

from recipes_lib.core.data.tokens_and_labels import tokenize_pair
from recipes_lib.core.model import load_tokenizer
from recipes_lib.core.model.default_model import cache_dir, resolve
from recipes_lib.workflows.finetune.production import (
    axolotl_config,
    trainer_arguments,
    write_messages,
    write_yaml,
)
from tests.workflows.finetune.production_cases import CASES, PAIRS, change

pytestmark = pytest.mark.survey  # pip fetches Axolotl

AXOLOTL = "axolotl==0.19.0"
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
for_each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def axolotl():
    """A folder to put on the path.

    With its dependencies Axolotl would replace half of what is installed here.
    """
    name, version = AXOLOTL.split("==")
    try:
        if importlib.metadata.version(name) == version:
            return ""
    except importlib.metadata.PackageNotFoundError:
        pass
    folder = cache_dir() / f"{name}-{version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            install_axolotl(folder)
    return str(folder)


def install_axolotl(folder):
    scratch = Path(tempfile.mkdtemp(prefix="axolotl-", dir=folder.parent))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1", "--no-deps"]
    command = [*pip, "--target", str(scratch), AXOLOTL, "addict", "colorama"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        scratch.replace(folder)
    shutil.rmtree(scratch, ignore_errors=True)
    assert done.returncode == 0, (
        f"pip could not fetch {AXOLOTL}, whose schema is asked here: {done.stderr}"
    )


READ_BY_AXOLOTL = """
import json, sys
from unittest.mock import MagicMock

# What needs Triton or packages that are not installed, none of which is used here.
absent = ["core.builders.causal", "core.builders.rl", "telemetry.callbacks", "telemetry.manager"]
absent += ["monkeypatch.trainer", "monkeypatch.trainer.lr"]
absent += ["utils.callbacks", "utils.callbacks.profiler"]
sys.modules.update({f"axolotl.{name}": MagicMock() for name in absent})

import yaml
from transformers import AutoTokenizer
from axolotl.core.builders.base import TrainerBuilderBase
from axolotl.prompt_strategies.chat_template import load
from axolotl.utils.config import resolve_dtype, validate_config
from axolotl.utils.dict import DictDefault
from axolotl.utils.schemas.config import AxolotlInputConfig
from axolotl.utils.schemas.datasets import SFTDataset

GPU = {"bf16": True, "tf32": True, "fp8": False, "n_gpu": 1, "compute_capability": "sm_80"}


class Builder(TrainerBuilderBase):
    def build(self, total_num_steps):
        return self._set_base_training_args(total_num_steps)[0]


def read(path):
    config = yaml.safe_load(open(path, encoding="utf-8"))
    unknown = [key for key in config if key not in AxolotlInputConfig.model_fields]
    for data in config["datasets"]:
        unknown += [key for key in data if key not in SFTDataset.model_fields]
    try:
        AxolotlInputConfig(**config)
        valid = validate_config(DictDefault(config), GPU, {"torch_version": "2.11.0"})
    except ValueError as error:
        return {"unknown": unknown, "error": str(error)}
    arguments = Builder(valid, None, None).build(999)
    answer = {"unknown": unknown, "valid": valid.to_dict(), "arguments": arguments}
    resolve_dtype(valid)
    return answer | {"dtype": str(valid.torch_dtype)}


request = json.load(sys.stdin)
answer = {name: read(path) for name, path in request["files"].items()}
config = DictDefault(yaml.safe_load(open(request["files"]["lora"], encoding="utf-8")))
strategy = load(AutoTokenizer.from_pretrained(request["tokenizer"]), config, config.datasets[0])
lines = open(request["data"], encoding="utf-8")
answer["rows"] = [strategy.tokenize_prompt(json.loads(line)) for line in lines]
print(json.dumps(answer, default=str))
"""


@pytest.fixture(scope="module")
def read_by_axolotl(axolotl, tmp_path_factory):
    """What Axolotl makes of every case and of three bad configurations.

    It is one process: the import takes seconds.
    """
    folder = tmp_path_factory.mktemp("axolotl")
    configs = {name: axolotl_config(run) for name, run in CASES.items()}
    configs["bad-qlora"] = dict(configs["qlora"])
    del configs["bad-qlora"]["load_in_4bit"]
    configs["bad-key"] = configs["lora"] | {"lora_rank": 8}
    configs["bad-warmup"] = configs["lora"] | {"warmup_steps": 1}
    files = {}
    for name, config in configs.items():
        files[name] = str(write_yaml(config, folder / f"{name}.yml"))
    write_messages(PAIRS, folder / "train.jsonl")

    request = {"files": files, "tokenizer": resolve(), "data": str(folder / "train.jsonl")}
    path = os.pathsep.join(filter(None, [axolotl, os.environ.get("PYTHONPATH")]))
    offline = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", READ_BY_AXOLOTL],
        input=json.dumps(request),
        env=os.environ | offline,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@for_each_case
def test_axolotl_takes_the_configuration_and_knows_every_key(case, read_by_axolotl):
    answer = read_by_axolotl[case]
    assert answer["unknown"] == []
    assert "error" not in answer
    config = axolotl_config(CASES[case])
    data = config.pop("datasets")[0]
    valid = answer["valid"]
    assert {key: valid[key] for key in config} == config, "the schema changed a value"
    assert {key: valid["datasets"][0][key] for key in data} == data
    assert answer["dtype"] == DTYPES[CASES[case].precision]
    assert answer["arguments"]["tf32"] is False


def test_the_axolotl_check_can_fail(read_by_axolotl):
    assert "load_in_4bit" in read_by_axolotl["bad-qlora"]["error"]
    assert read_by_axolotl["bad-key"]["unknown"] == ["lora_rank"]  # the schema itself takes it


def renamed(arguments):
    """Newer versions of transformers call checkpointing otherwise."""
    pairs = arguments.items()
    return {
        key.replace("gradient_checkpointing", "activation_checkpointing"): value
        for key, value in pairs
    }


@for_each_case
def test_axolotl_hands_the_trainer_what_we_hand_it(case, read_by_axolotl):
    theirs = renamed(read_by_axolotl[case]["arguments"])
    theirs["report_to"] = (theirs["report_to"] or ["none"])[0]
    ours = renamed(trainer_arguments(CASES[case]))
    assert {key: theirs.get(key) for key in ours} == ours


def test_axolotl_makes_one_warmup_step_two(read_by_axolotl):
    """The reason for our refusal."""
    assert read_by_axolotl["bad-warmup"]["arguments"]["warmup_steps"] == 2
    with pytest.raises(ValueError, match="would take 2"):
        axolotl_config(change(warmup_steps=1))
    assert trainer_arguments(change(warmup_steps=1))["warmup_steps"] == 1


def test_axolotl_trains_on_the_same_tokens(read_by_axolotl):
    tokenizer = load_tokenizer()
    for pair, row in zip(PAIRS, read_by_axolotl["rows"], strict=True):
        ours = tokenize_pair(tokenizer, **pair)
        size = len(ours["input_ids"])
        # The template's line break after the end mark is there, and not learnt.
        behind = len(row["input_ids"]) - size
        assert 0 <= behind <= 1
        assert row["input_ids"][:size] == ours["input_ids"]
        assert row["labels"] == ours["labels"] + [-100] * behind
