"""The run as Axolotl reads it: what we write, and by `make survey` what its code makes of it."""

import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from recipes_lib.core.data.tokens_and_labels import tokenize_pair
from recipes_lib.core.model import load_tokenizer
from recipes_lib.core.model.default_model import cache_dir, resolve
from recipes_lib.workflows.finetune.axolotl import axolotl_config, lines_of_messages, write_axolotl
from recipes_lib.workflows.finetune.settings import CHOICES, Settings

PAIRS = [
    {"prompt": "Say hello.", "completion": "Hello."},
    {"prompt": "Añade\n1 + 1", "completion": '{"sum": 2}\n\nwith a "quote"'},
]
# Not one number is a default of Axolotl: a setting that gets lost shows.
RUN = Settings(
    base_model="smollm2",
    data_files=["train.jsonl"],
    output_dir="out",
    rank=4,
    alpha=12,
    learning_rate=3e-4,
    max_grad_norm=0.5,
    steps=6,
    warmup_steps=2,
    rows_per_step=6,
    micro_batch_size=2,
    seq_len=64,
    precision="fp32",
    seed=7,
)


def change(**values):
    return dataclasses.replace(RUN, **values)


CASES = {
    "lora": RUN,
    "lora-packed": change(packing=True),
    "qlora": change(method="qlora"),
    "full-packed": change(method="full", packing=True),
    "bf16": change(precision="bf16"),
    "fp16": change(precision="fp16"),
    "dropout": change(dropout=0.1),
    "checkpointing": change(gradient_checkpointing=True, save_steps=2),
    "processes": change(processes=3, rows_per_step=12),
    "no-clipping-no-warmup": change(max_grad_norm=0, warmup_steps=0, alpha=12.0),
}
CASES |= {f"optimizer-{name}": change(optimizer=name) for name in CHOICES["optimizer"][1:]}
CASES |= {f"report-{name}": change(report_to=name) for name in CHOICES["report_to"][1:]}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


# --- what we write --------------------------------------------------------------------------------


def test_what_axolotl_would_choose_otherwise(tokenizer):
    """The mistakes: long rows cut, prompts learnt, dropout skipped by a fused kernel; the
    micro-batches of all processes on each."""
    run = change(dropout=0.1, processes=3, rows_per_step=12)
    config = axolotl_config(run, tokenizer=tokenizer)
    wanted = {
        "gradient_accumulation_steps": 2,
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",  # "smollm2" is a name of ours
        "excess_length_strategy": "drop",
        "train_on_inputs": False,
        "lora_target_linear": True,
        "attn_implementation": "sdpa",
        "lora_mlp_kernel": False,
        "lora_qkv_kernel": False,
        "lora_o_kernel": False,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert config["datasets"][0]["train_on_eos"] == "turn"  # every answer learns its end


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_steps": 1}, "would take 2"),
        ({"alpha": 0.5}, "whole numbers"),
        ({"method": "full", "precision": "fp16"}, "use bf16"),
        ({"processes": 3, "shard": True}, "with an fsdp_config"),
    ],
)
def test_what_axolotl_cannot_do(tokenizer, changes, message):
    """The mistake: it trains something else in silence."""
    with pytest.raises(ValueError, match=message):
        axolotl_config(change(**changes), tokenizer=tokenizer)


def test_axolotl_is_given_a_template_that_there_is(tmp_path, capsys):
    """The mistake: `tokenizer_default` of a tokenizer that has none."""
    tokenizer = load_tokenizer()
    (own,) = axolotl_config(change(), tokenizer=tokenizer)["datasets"]
    assert own["chat_template"] == "tokenizer_default" and "chat_template_jinja" not in own
    tokenizer.chat_template = "{{ messages }}"
    (other,) = axolotl_config(change(chat_template="mine.jinja"), tokenizer=tokenizer)["datasets"]
    assert (other["chat_template"], other["chat_template_jinja"]) == ("jinja", "{{ messages }}")
    # The mistake: Axolotl learns the answer without its thinking.
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.split('>')[-1] }}{% endfor %}"
    thinking = {"prompt": "a", "completion": "<think>b</think>c"}
    write_axolotl(change(output_dir=str(tmp_path)), [thinking], tokenizer=tokenizer)
    assert "no axolotl.yml, which cannot say this run: of pair 0 the" in capsys.readouterr().out
    tokenizer.chat_template = None
    write_axolotl(change(output_dir=str(tmp_path)), PAIRS, tokenizer=tokenizer)
    assert "no axolotl.yml, which cannot say this run: the tokenizer has" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_file_names_the_rows_that_were_trained_on(tokenizer, tmp_path):
    """The mistakes: Axolotl reads the user's file, with the held-out pairs in it; it learns what
    our loop has masked."""
    question = {"role": "user", "content": "a"}
    said = {"role": "assistant", "content": "b"}
    turns = [question, said, question, said | {"train": False}]
    rows = [{"prompt": "a", "completion": "b"}, {"messages": turns}]
    write_axolotl(change(output_dir=tmp_path, data_files=["mine.jsonl"]), rows, tokenizer=tokenizer)
    config = yaml.safe_load((tmp_path / "axolotl.yml").read_text())
    (data,) = config["datasets"]
    assert data["message_field_training"] == "train"
    lines = Path(data["path"]).read_text().splitlines()
    found = [json.loads(line)["messages"] for line in lines]
    assert found == [[question, said], turns]


# --- what Axolotl makes of it ---------------------------------------------------------------------

survey = pytest.mark.survey  # pip fetches Axolotl
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
def read_by_axolotl(axolotl, tokenizer, tmp_path_factory):
    """What Axolotl makes of every case and of three bad configurations.

    It is one process: the import takes seconds.
    """
    folder = tmp_path_factory.mktemp("axolotl")
    configs = {name: axolotl_config(run, tokenizer=tokenizer) for name, run in CASES.items()}
    configs["bad-qlora"] = dict(configs["qlora"])
    del configs["bad-qlora"]["load_in_4bit"]
    configs["bad-key"] = configs["lora"] | {"lora_rank": 8}
    configs["bad-warmup"] = configs["lora"] | {"warmup_steps": 1}
    files = {}
    for name, config in configs.items():
        files[name] = str(folder / f"{name}.yml")
        Path(files[name]).write_text(yaml.safe_dump(config))
    data = folder / "train.jsonl"
    data.write_text("".join(lines_of_messages(PAIRS, tokenizer)))

    request = {"files": files, "tokenizer": resolve(), "data": str(data)}
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


@survey
@for_each_case
def test_axolotl_takes_the_configuration_and_knows_every_key(case, read_by_axolotl, tokenizer):
    answer = read_by_axolotl[case]
    assert answer["unknown"] == []
    assert "error" not in answer
    config = axolotl_config(CASES[case], tokenizer=tokenizer)
    data = config.pop("datasets")[0]
    valid = answer["valid"]
    assert {key: valid[key] for key in config} == config, "the schema changed a value"
    assert {key: valid["datasets"][0][key] for key in data} == data
    assert answer["dtype"] == DTYPES[CASES[case].precision]
    assert answer["arguments"]["tf32"] is False
    # What it hands the Trainer by the same name.
    theirs = answer["arguments"]
    shared = config.keys() & theirs.keys()
    assert {"learning_rate", "warmup_steps", "max_steps", "seed", "fp16"} <= shared
    assert {key: theirs[key] for key in shared} == {key: config[key] for key in shared}


@survey
def test_the_axolotl_check_can_fail(read_by_axolotl):
    """The reasons for our refusals, too."""
    assert "load_in_4bit" in read_by_axolotl["bad-qlora"]["error"]
    assert read_by_axolotl["bad-key"]["unknown"] == ["lora_rank"]  # the schema itself takes it
    assert read_by_axolotl["bad-warmup"]["arguments"]["warmup_steps"] == 2


@survey
def test_axolotl_trains_on_the_same_tokens(read_by_axolotl, tokenizer):
    for pair, row in zip(PAIRS, read_by_axolotl["rows"], strict=True):
        ours = tokenize_pair(tokenizer, **pair)
        size = len(ours["input_ids"])
        # The template's line break after the end mark is there, and not learnt.
        behind = len(row["input_ids"]) - size
        assert 0 <= behind <= 1
        assert row["input_ids"][:size] == ours["input_ids"]
        assert row["labels"] == ours["labels"] + [-100] * behind
