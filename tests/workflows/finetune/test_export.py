"""The settings of a run as the Trainer, TRL, Axolotl and accelerate read them: their own code."""

import copy
import dataclasses
import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from filelock import FileLock

from recipes_lib.core.data import batches, collate, load_instructions
from recipes_lib.core.data.chat import tokenize_pair
from recipes_lib.core.model import load_tokenizer
from recipes_lib.core.model.default_model import cache_dir, resolve
from recipes_lib.workflows.finetune.export import (
    accelerate_config,
    axolotl_config,
    sft_arguments,
    trainer_arguments,
    write_messages,
    write_production,
    write_yaml,
)
from recipes_lib.workflows.finetune.settings import CHOICES, Settings

AXOLOTL = "axolotl==0.19.0"
PAIRS = [
    {"prompt": "Say hello.", "completion": "Hello."},
    {"prompt": "Añade\n1 + 1", "completion": '{"sum": 2}\n\nwith a "quote"'},
]

# Not one number is a default of the libraries: a setting that gets lost shows.
RUN = Settings(
    base_model="smollm2",
    data_file="train.jsonl",
    output_dir="out",
    rank=4,
    alpha=12,
    learning_rate=3e-4,
    betas=(0.8, 0.95),
    eps=1e-3,
    weight_decay=0.1,
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
    "layers": change(target_modules=("q_proj", "v_proj")),
    "dropout": change(dropout=0.1),
    "checkpointing": change(gradient_checkpointing=True, save_steps=2),
    "processes": change(processes=3, rows_per_step=12),
    "no-clipping-no-warmup": change(max_grad_norm=0, warmup_steps=0, alpha=12.0),
}
CASES |= {f"optimizer-{name}": change(optimizer=name) for name in CHOICES["optimizer"][1:]}
CASES |= {f"report-{name}": change(report_to=name) for name in CHOICES["report_to"][1:]}
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
for_each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


# --- Axolotl: its own code, in a process of its own ----------------------------------------------


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


@pytest.mark.survey
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


@pytest.mark.survey
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


@pytest.mark.survey
@for_each_case
def test_axolotl_hands_the_trainer_what_we_hand_it(case, read_by_axolotl):
    theirs = renamed(read_by_axolotl[case]["arguments"])
    theirs["report_to"] = (theirs["report_to"] or ["none"])[0]
    ours = renamed(trainer_arguments(CASES[case]))
    assert {key: theirs.get(key) for key in ours} == ours


@pytest.mark.survey
def test_axolotl_makes_one_warmup_step_two(read_by_axolotl):
    """The reason for our refusal."""
    assert read_by_axolotl["bad-warmup"]["arguments"]["warmup_steps"] == 2
    with pytest.raises(ValueError, match="would take 2"):
        axolotl_config(change(warmup_steps=1))
    assert trainer_arguments(change(warmup_steps=1))["warmup_steps"] == 1


@pytest.mark.survey
def test_axolotl_trains_on_the_same_tokens(read_by_axolotl, tokenizer):
    for pair, row in zip(PAIRS, read_by_axolotl["rows"], strict=True):
        ours = tokenize_pair(tokenizer, **pair)
        size = len(ours["input_ids"])
        # The template's line break after the end mark is there, and not learnt.
        behind = len(row["input_ids"]) - size
        assert 0 <= behind <= 1
        assert row["input_ids"][:size] == ours["input_ids"]
        assert row["labels"] == ours["labels"] + [-100] * behind


def test_what_axolotl_would_choose_otherwise():
    config = axolotl_config(change(dropout=0.1))
    wanted = {
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
    # "smollm2" is a name of ours.
    assert config["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert axolotl_config(change(base_model="org/model"))["base_model"] == "org/model"


def test_axolotl_gets_the_keys_of_its_case_only():
    layers = axolotl_config(CASES["layers"])
    assert layers["lora_target_modules"] == ["q_proj", "v_proj"]
    assert "lora_target_linear" not in layers
    assert "lora_mlp_kernel" not in layers  # without dropout the fused kernels compute the same
    of_adapters = ("lora", "adapter", "load_in")
    full = axolotl_config(CASES["full-packed"])
    assert not [key for key in full if key.startswith(of_adapters)]


def test_round_trip(tmp_path):
    run = CASES["processes"]
    config = axolotl_config(run)
    again = yaml.safe_load(write_yaml(config, tmp_path / "a.yml").read_text())
    assert again == config
    rows = again["gradient_accumulation_steps"] * again["micro_batch_size"] * run.processes
    assert rows == run.rows_per_step
    assert again["learning_rate"] == run.learning_rate
    assert again["adam_epsilon"] == run.eps  # YAML may read 1e-3 as text


# --- the Trainer and TRL --------------------------------------------------------------------------


@pytest.fixture
def fresh_accelerate():
    """The Trainer's state is one per process, and some of it lies in the environment."""
    from accelerate.state import AcceleratorState

    before = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(before)


@for_each_case
def test_training_arguments_take_every_key(case, tmp_path, fresh_accelerate):
    from transformers import TrainingArguments

    run = CASES[case]
    given = trainer_arguments(dataclasses.replace(run, output_dir=tmp_path))
    arguments = TrainingArguments(**given, use_cpu=True)
    assert arguments.lr_scheduler_type == "cosine"
    assert arguments.optim == run.optimizer
    assert arguments.mixed_precision == run.precision.replace("fp32", "no")
    assert arguments.activation_checkpointing is run.gradient_checkpointing
    assert arguments.report_to == [name for name in [run.report_to] if name != "none"]
    assert arguments.get_warmup_steps(arguments.max_steps) == run.warmup_steps


# What TRL adds depends on these only; its own defaults are bf16, checkpointing and 1,024 tokens.
@pytest.mark.parametrize("case", ["lora", "lora-packed", "bf16", "fp16", "checkpointing"])
def test_sft_config_takes_every_key(case, tmp_path, fresh_accelerate):
    trl = pytest.importorskip("trl")
    run = CASES[case]
    given = sft_arguments(dataclasses.replace(run, output_dir=tmp_path))
    config = trl.SFTConfig(**given, use_cpu=True)
    assert config.bf16 == (run.precision == "bf16")
    assert config.fp16 == (run.precision == "fp16")
    assert config.activation_checkpointing is run.gradient_checkpointing
    assert config.gradient_checkpointing is run.gradient_checkpointing
    assert (config.max_length, config.packing) == (64, run.packing)
    assert config.completion_only_loss is True
    assert config.assistant_only_loss is False


def plain_loop(model, rows, run):
    """The run written out: whole batches, AdamW, clipping, a linear warm-up and a cosine."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, betas=run.betas, eps=run.eps, weight_decay=run.weight_decay
    )
    losses = []
    data = batches(rows, batch_size=run.rows_per_step, pad_token_id=0)
    for step, batch in zip(range(run.steps), data):
        share = step / run.warmup_steps
        if step >= run.warmup_steps:
            done = (step - run.warmup_steps) / (run.steps - run.warmup_steps)
            share = 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate * share
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def random_rows(count=12):
    rows = []
    for length in torch.randint(5, 20, (count,)).tolist():
        ids = torch.randint(1, 128, (length,)).tolist()
        rows.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return rows


def trainer_of(kind, model, rows, run, tokenizer):
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    options = {"use_cpu": True, "disable_tqdm": True, "train_sampling_strategy": "sequential"}
    if kind == "transformers":
        arguments = TrainingArguments(**trainer_arguments(run), **options)
        return Trainer(
            model,
            arguments,
            train_dataset=rows,
            data_collator=lambda part: collate(part, pad_token_id=0),
        )
    trl = pytest.importorskip("trl")
    arguments = trl.SFTConfig(**sft_arguments(run), **options)
    data = Dataset.from_list(rows)
    return trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize(("kind", "checkpointing"), [("transformers", True), ("trl", False)])
def test_the_trainers_run_is_the_plain_run(kind, checkpointing, llama, tmp_path, fresh_accelerate):
    """Two passes in micro-batches of unequal token counts: the same losses and weights."""
    run = change(
        method="full",
        learning_rate=1e-2,
        gradient_checkpointing=checkpointing,
        output_dir=tmp_path,
    )
    tokenizer = load_tokenizer()
    tokenizer.pad_token_id = 2
    rows = random_rows()
    reference = copy.deepcopy(llama)
    expected = plain_loop(reference, rows, run)
    trainer = trainer_of(kind, llama, rows, run, tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(expected, abs=1e-5)
    for got, want in zip(llama.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert expected[-1] < expected[0] - 0.1
    assert (tmp_path / "checkpoint-6").is_dir()  # the last step is saved


@pytest.fixture
def rows_of_trl(tmp_path, llama, tokenizer, fresh_accelerate):
    """What TRL makes of a data set, or of a file."""
    trl = pytest.importorskip("trl")
    from datasets import load_dataset

    def rows_of(data, **changes):
        run = change(output_dir=tmp_path, **changes)
        arguments = trl.SFTConfig(**sft_arguments(run), use_cpu=True)
        if isinstance(data, Path):
            cache = str(tmp_path / "cache")
            data = load_dataset("json", data_files=str(data), split="train", cache_dir=cache)
        trainer = trl.SFTTrainer(llama, arguments, train_dataset=data, processing_class=tokenizer)
        return trainer.train_dataset

    return rows_of


def test_trl_trains_on_the_answers(rows_of_trl, tokenizer, tmp_path):
    write_messages(PAIRS, tmp_path / "train.jsonl")
    lengths = []
    for pair, row in zip(PAIRS, rows_of_trl(tmp_path / "train.jsonl"), strict=True):
        ours = tokenize_pair(tokenizer, **pair)
        size = len(ours["input_ids"])
        behind = row["input_ids"][size:]
        assert row["input_ids"][:size] == ours["input_ids"]
        assert row["labels"] == ours["labels"] + behind
        assert tokenizer.decode(behind).strip() == ""
        lengths.append(len(row["input_ids"]))
    (packed,) = rows_of_trl(tmp_path / "train.jsonl", packing=True, seq_len=128)
    assert sorted(packed["seq_lengths"]) == sorted(lengths)


def test_trl_would_train_on_the_questions_of_messages(rows_of_trl, tmp_path):
    """The reason for the columns `prompt` and `completion`.

    `completion_only_loss` does nothing here, in silence.
    """
    chat = [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello."}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    (row,) = rows_of_trl(tmp_path / "train.jsonl")
    assert row["labels"] == row["input_ids"]


def test_trl_takes_our_rows_as_they_are(rows_of_trl, tokenizer):
    rows = load_instructions(tokenizer, dataset=PAIRS)
    assert [dict(row) for row in rows_of_trl(rows)] == [dict(row) for row in rows]


# --- accelerate -----------------------------------------------------------------------------------

LAUNCHES = {
    "NO": {"precision": "fp16"},
    "MULTI_GPU": {"precision": "bf16", "processes": 4},
    "FSDP": {"precision": "bf16", "processes": 2, "fsdp": True},
}


def launch_arguments(path):
    """What `accelerate launch --config_file` reads."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, *_ = _validate_launch_command(arguments)
    return arguments


@pytest.mark.parametrize("kind", LAUNCHES)
def test_accelerate_reads_its_configuration(kind, tmp_path, monkeypatch, fresh_accelerate):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    wanted = LAUNCHES[kind]
    processes = wanted.get("processes", 1)
    path = write_yaml(accelerate_config(**wanted), tmp_path / "accelerate.yml")
    read = load_config_from_file(str(path))  # raises for an unknown key
    assert read.distributed_type.value == kind
    assert read.num_processes == processes
    arguments = launch_arguments(path)
    assert arguments.multi_gpu == (kind == "MULTI_GPU")
    assert arguments.use_fsdp == (kind == "FSDP")
    assert arguments.use_cpu is False
    if kind == "NO":
        return

    environment = prepare_multi_gpu_env(arguments)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert arguments.nproc_per_node == str(processes)
    if kind == "FSDP":
        for name, value in environment.items():
            if name.startswith(("FSDP_", "ACCELERATE_")):
                monkeypatch.setenv(name, value)
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward is True
        assert plugin.cpu_ram_efficient_loading is False
        assert "transformer" in str(plugin.auto_wrap_policy)


def test_a_script_that_accelerate_launches_computes_on_the_cpu_in_bf16(
    tmp_path, monkeypatch, fresh_accelerate
):
    """In the environment that the launcher gives the script."""
    from accelerate import Accelerator
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    config = accelerate_config(precision="bf16", cpu=True)
    arguments = launch_arguments(write_yaml(config, tmp_path / "accelerate.yml"))
    assert arguments.use_cpu is True
    _, environment = prepare_simple_launcher_cmd_env(arguments)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    accelerator = Accelerator()
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.device.type == "cpu"
    assert accelerator.num_processes == 1


def test_accelerate_rejects_an_unknown_key(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = accelerate_config(precision="bf16") | {"processes": 2}
    path = write_yaml(config, tmp_path / "accelerate.yml")
    with pytest.raises(ValueError, match="processes"):
        load_config_from_file(str(path))


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_not_overwritten_by_accident(tmp_path):
    config = axolotl_config(RUN)
    path = tmp_path / "a.yml"
    first = write_yaml(config, path).read_text()
    head = "# Written by recipes_lib/workflows/finetune/export.py."
    assert first.splitlines()[0] == f"{head} Run: axolotl train {path}"
    with pytest.raises(ValueError, match=r"a\.yml exists.*overwrite=True"):
        write_yaml(config, path)
    assert write_yaml(config, path, overwrite=True).read_text() == first
    other = tmp_path / "b.yml"
    launch = write_yaml(accelerate_config(precision="bf16"), other).read_text()
    assert f"accelerate launch --config_file {other}" in launch.splitlines()[0]
    with pytest.raises(ValueError, match=r"a\.yml exists"):
        write_messages(PAIRS, path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = write_yaml(accelerate_config(precision="bf16"), tmp_path / "a.yml")
    before = path.read_text()

    def fail(self, text, **_):
        with open(self, "w") as file:
            file.write(text[:5])
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(Path, "write_text", fail)
        write_yaml(accelerate_config(precision="fp16"), path, overwrite=True)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_messages(tmp_path):
    assert write_messages(iter(PAIRS), tmp_path / "train.jsonl") == 2
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    for pair, row in zip(PAIRS, map(json.loads, lines), strict=True):
        user = {"role": "user", "content": pair["prompt"]}
        assistant = {"role": "assistant", "content": pair["completion"]}
        assert row == {"messages": [user, assistant], "prompt": [user], "completion": [assistant]}


def test_messages_without_an_answer_are_refused(tmp_path):
    path = tmp_path / "empty.jsonl"
    question = {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(ValueError, match="no pair"):
        write_messages([], path)
    for empty in ({"prompt": "x", "completion": " "}, question):
        with pytest.raises(ValueError, match="pair 1: the completion is empty"):
            write_messages([PAIRS[0], empty], path)
    assert not path.exists()


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
PAIR = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize("rows", [[PAIR, CHAT], [CHAT, PAIR]])  # the first decides nothing
def test_production_files_name_the_rows_that_were_trained_on(tmp_path, rows):
    write_production(change(output_dir=str(tmp_path), data_file="mine.jsonl"), rows)
    config = yaml.safe_load((tmp_path / "axolotl.yml").read_text())
    assert config["datasets"][0]["path"] == f"{tmp_path}/train.jsonl"
    assert config["output_dir"] == f"{tmp_path}/axolotl"
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["messages"] for line in lines] == [CHAT["messages"]] * 2


def test_production_files_that_cannot_be_are_left_out_and_named(tmp_path, capsys):
    """A run that is done must not fail for it."""
    run = change(output_dir=str(tmp_path), warmup_steps=1, processes=3, rows_per_step=6)
    write_production(run, [PAIR])
    said = capsys.readouterr().out
    assert "no axolotl.yml, which cannot say this run: warmup_steps=1" in said
    assert "no accelerate.yml, which cannot say this run: cpu=True, processes=3" in said
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"alpha": 0.5}, "whole numbers"), ({"method": "full", "precision": "fp16"}, "use bf16")],
)
def test_what_axolotl_cannot_do(changes, message):
    with pytest.raises(ValueError, match=message):
        axolotl_config(change(**changes))
    trainer_arguments(change(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"precision": "fp16", "cpu": True}, "use bf16"),
        ({"processes": 2, "cpu": True}, "torchrun"),
        ({"processes": 0}, "1 or more"),
        ({"fsdp": True}, "for fsdp 2 or more"),
    ],
)
def test_what_accelerate_would_ignore(changes, message):
    with pytest.raises(ValueError, match=message):
        accelerate_config(**{"precision": "bf16"} | changes)
