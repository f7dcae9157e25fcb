import copy
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

from recipes_lib.core.data import batches, collate, load_instructions, tokenize_pair
from recipes_lib.core.model import cache_dir, load_tokenizer, resolve
from recipes_lib.workflows.finetune.export import (
    CHOICES,
    accelerate_config,
    axolotl_config,
    sft_arguments,
    trainer_arguments,
    write_messages,
    write_yaml,
)

AXOLOTL = "axolotl==0.19.0"
PAIRS = [
    {"prompt": "Say hello.", "completion": "Hello."},
    {"prompt": "Añade\n1 + 1", "completion": '{"sum": 2}\n\nwith a "quote"'},
]


def run(**changes):
    """Settings of one run; not one number is a default of the libraries."""
    settings = {
        "base_model": "smollm2",
        "data_file": "train.jsonl",
        "output_dir": "out",
        "method": "lora",
    }
    settings |= {"rank": 4, "alpha": 12, "learning_rate": 3e-4, "optimizer": "adamw_torch_fused"}
    settings |= {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
    settings |= {
        "steps": 6,
        "warmup_steps": 2,
        "rows_per_step": 6,
        "micro_batch_size": 2,
        "seq_len": 64,
    }
    settings |= {"packing": False, "precision": "fp32", "gradient_checkpointing": False, "seed": 7}
    return settings | changes


CASES = {
    f"{method}{'-packed' if packing else ''}": run(method=method, packing=packing)
    for method in CHOICES["method"]
    for packing in (False, True)
}
CASES |= {precision: run(precision=precision) for precision in ("bf16", "fp16")}
CASES |= {f"optimizer-{name}": run(optimizer=name) for name in CHOICES["optimizer"][1:]}
CASES |= {f"report-{name}": run(report_to=name) for name in CHOICES["report_to"][1:]}
CASES |= {
    "layers": run(target_modules=("q_proj", "v_proj")),
    "dropout": run(dropout=0.1),
    "checkpointing": run(gradient_checkpointing=True, save_steps=2),
    "processes": run(processes=3, rows_per_step=12),
    "no-clipping-no-warmup": run(max_grad_norm=0, warmup_steps=0, alpha=12.0),
}
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
for_each_case = pytest.mark.parametrize("case", CASES)


# --- Axolotl: its own code, in a process of its own ----------------------------------------------


@pytest.fixture(scope="module")
def axolotl():
    """A folder to put on the path. With its dependencies Axolotl would replace half of what is installed here."""
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
            scratch = Path(tempfile.mkdtemp(prefix="axolotl-", dir=folder.parent))
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--retries",
                "1",
                "--no-deps",
            ]
            command += ["--target", str(scratch), AXOLOTL, "addict", "colorama"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                scratch.replace(folder)
            shutil.rmtree(scratch, ignore_errors=True)
            assert done.returncode == 0, (
                f"pip could not fetch {AXOLOTL}, whose schema is asked here: {done.stderr}"
            )
    return str(folder)


READ_BY_AXOLOTL = """
import json, sys
from unittest.mock import MagicMock

# What needs Triton or packages that are not installed, none of which is used here.
absent = ["core.builders.causal", "core.builders.rl", "monkeypatch.trainer", "monkeypatch.trainer.lr"]
absent += ["telemetry.callbacks", "telemetry.manager", "utils.callbacks", "utils.callbacks.profiler"]
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
    unknown += [key for data in config["datasets"] for key in data if key not in SFTDataset.model_fields]
    try:
        AxolotlInputConfig(**config)
        valid = validate_config(DictDefault(config), GPU, {"torch_version": "2.11.0"})
    except ValueError as error:
        return {"unknown": unknown, "error": str(error)}
    answer = {"unknown": unknown, "valid": valid.to_dict(), "arguments": Builder(valid, None, None).build(999)}
    resolve_dtype(valid)
    return answer | {"dtype": str(valid.torch_dtype)}


request = json.load(sys.stdin)
answer = {name: read(path) for name, path in request["files"].items()}
config = DictDefault(yaml.safe_load(open(request["files"]["lora"], encoding="utf-8")))
strategy = load(AutoTokenizer.from_pretrained(request["tokenizer"]), config, config.datasets[0])
answer["rows"] = [strategy.tokenize_prompt(json.loads(line)) for line in open(request["data"], encoding="utf-8")]
print(json.dumps(answer, default=str))
"""


@pytest.fixture(scope="module")
def read_by_axolotl(axolotl, tmp_path_factory):
    """What Axolotl makes of every case and of three bad configurations, in one process: the import takes seconds."""
    folder = tmp_path_factory.mktemp("axolotl")
    configs = {name: axolotl_config(**settings) for name, settings in CASES.items()}
    configs["bad-qlora"] = {
        key: value for key, value in configs["qlora"].items() if key != "load_in_4bit"
    }
    configs["bad-key"] = configs["lora"] | {"lora_rank": 8}
    configs["bad-warmup"] = configs["lora"] | {"warmup_steps": 1}
    files = {
        name: str(write_yaml(config, folder / f"{name}.yml")) for name, config in configs.items()
    }
    write_messages(PAIRS, folder / "train.jsonl")
    request = {"files": files, "tokenizer": resolve(), "data": str(folder / "train.jsonl")}
    path = os.pathsep.join(filter(None, [axolotl, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
    }
    command = [sys.executable, "-c", READ_BY_AXOLOTL]
    done = subprocess.run(
        command, input=json.dumps(request), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@for_each_case
def test_axolotl_takes_the_configuration_and_knows_every_key(case, read_by_axolotl):
    answer = read_by_axolotl[case]
    assert answer["unknown"] == [] and "error" not in answer, answer
    config = axolotl_config(**CASES[case])
    data = config.pop("datasets")[0]
    assert {key: answer["valid"][key] for key in config} == config, "the schema changed a value"
    assert {key: answer["valid"]["datasets"][0][key] for key in data} == data
    assert (
        answer["dtype"] == DTYPES[CASES[case]["precision"]] and answer["arguments"]["tf32"] is False
    )


def test_the_axolotl_check_can_fail(read_by_axolotl):
    assert "load_in_4bit" in read_by_axolotl["bad-qlora"]["error"]
    assert read_by_axolotl["bad-key"]["unknown"] == ["lora_rank"]  # the schema itself takes it


@for_each_case
def test_axolotl_hands_the_trainer_what_we_hand_it(case, read_by_axolotl):
    theirs, ours = read_by_axolotl[case]["arguments"], trainer_arguments(**CASES[case])
    theirs = {
        key.replace("gradient_checkpointing", "activation_checkpointing"): v
        for key, v in theirs.items()
    }
    theirs["report_to"] = (theirs["report_to"] or ["none"])[0]
    ours = {
        key.replace("gradient_checkpointing", "activation_checkpointing"): v
        for key, v in ours.items()
    }
    assert {key: theirs.get(key) for key in ours} == ours


def test_axolotl_makes_one_warmup_step_two(read_by_axolotl):
    """The reason for our refusal."""
    assert read_by_axolotl["bad-warmup"]["arguments"]["warmup_steps"] == 2
    with pytest.raises(ValueError, match="would take 2"):
        axolotl_config(**run(warmup_steps=1))
    assert trainer_arguments(**run(warmup_steps=1))["warmup_steps"] == 1


def test_axolotl_trains_on_the_same_tokens(read_by_axolotl):
    for pair, row in zip(PAIRS, read_by_axolotl["rows"], strict=True):
        ours = tokenize_pair(load_tokenizer(), **pair)
        behind = len(row["input_ids"]) - len(
            ours["input_ids"]
        )  # the template's line break after the end mark
        assert 0 <= behind <= 1
        assert row["input_ids"][: -behind or None] == ours["input_ids"]
        assert row["labels"] == ours["labels"] + [-100] * behind


def test_what_axolotl_would_choose_otherwise():
    config = axolotl_config(**run(dropout=0.1))
    wanted = {
        "excess_length_strategy": "drop",
        "train_on_inputs": False,
        "lora_target_linear": True,
        "attn_implementation": "sdpa",
    }
    wanted |= {"lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False}
    assert {key: config[key] for key in wanted} == wanted
    assert (
        config["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    )  # "smollm2" is a name of ours
    assert axolotl_config(**run(base_model="org/model"))["base_model"] == "org/model"
    layers = axolotl_config(**run(target_modules=("q_proj", "v_proj")))
    assert (
        layers["lora_target_modules"] == ["q_proj", "v_proj"] and "lora_target_linear" not in layers
    )
    assert "lora_mlp_kernel" not in layers  # without dropout the fused kernels compute the same
    assert not [
        key
        for key in axolotl_config(**run(method="full"))
        if key.startswith(("lora", "adapter", "load_in"))
    ]


def test_round_trip(tmp_path):
    settings = run(processes=3, rows_per_step=12)
    config = axolotl_config(**settings)
    again = yaml.safe_load(write_yaml(config, tmp_path / "a.yml").read_text())
    assert again == config
    rows = again["gradient_accumulation_steps"] * again["micro_batch_size"] * settings["processes"]
    assert rows == settings["rows_per_step"]
    assert (again["learning_rate"], again["adam_epsilon"]) == (
        settings["learning_rate"],
        settings["eps"],
    )


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

    given = trainer_arguments(**CASES[case] | {"output_dir": tmp_path})
    arguments = TrainingArguments(**given, use_cpu=True)
    assert arguments.lr_scheduler_type == "cosine" and arguments.optim == CASES[case]["optimizer"]
    assert arguments.mixed_precision == {"fp32": "no"}.get(
        CASES[case]["precision"], CASES[case]["precision"]
    )
    assert arguments.activation_checkpointing is CASES[case]["gradient_checkpointing"]
    assert arguments.report_to == ([] if given["report_to"] == "none" else [given["report_to"]])
    assert arguments.get_warmup_steps(arguments.max_steps) == CASES[case]["warmup_steps"]


@for_each_case
def test_sft_config_takes_every_key(case, tmp_path, fresh_accelerate):
    trl = pytest.importorskip("trl")
    config = trl.SFTConfig(**sft_arguments(**CASES[case] | {"output_dir": tmp_path}), use_cpu=True)
    # TRL's own defaults are bf16, checkpointing and 1,024 tokens.
    assert (config.bf16, config.fp16) == (
        CASES[case]["precision"] == "bf16",
        CASES[case]["precision"] == "fp16",
    )
    assert (
        config.activation_checkpointing
        is config.gradient_checkpointing
        is CASES[case]["gradient_checkpointing"]
    )
    assert (config.max_length, config.packing) == (64, CASES[case]["packing"])
    assert config.completion_only_loss is True and config.assistant_only_loss is False


def plain_loop(model, rows, settings):
    """The run written out: whole batches, AdamW, clipping, a linear warm-up and a cosine."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": decayed},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    options = {name: settings[name] for name in ("betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(groups, **options)
    warmup, steps = settings["warmup_steps"], settings["steps"]
    losses = []
    for step, batch in zip(
        range(steps), batches(rows, batch_size=settings["rows_per_step"], pad_token_id=0)
    ):
        rise, fall = (
            step / warmup,
            0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))),
        )
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * (rise if step < warmup else fall)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
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


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("trainer", ["transformers", "trl"])
def test_the_trainers_run_is_the_plain_run(
    trainer, checkpointing, llama, tmp_path, fresh_accelerate
):
    """Two passes in micro-batches of unequal token counts: the same losses and, in the end, the same weights."""
    from datasets import Dataset

    settings = run(
        method="full", learning_rate=1e-2, gradient_checkpointing=checkpointing, output_dir=tmp_path
    )
    rows, reference = random_rows(), copy.deepcopy(llama)
    expected = plain_loop(reference, rows, settings)
    options = {"use_cpu": True, "disable_tqdm": True, "train_sampling_strategy": "sequential"}
    if trainer == "trl":
        trl = pytest.importorskip("trl")
        tokenizer = load_tokenizer()
        tokenizer.pad_token_id = 2
        made = trl.SFTTrainer(
            llama,
            trl.SFTConfig(**sft_arguments(**settings), **options),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
    else:
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(**trainer_arguments(**settings), **options)
        made = Trainer(
            llama,
            arguments,
            train_dataset=rows,
            data_collator=lambda rows: collate(rows, pad_token_id=0),
        )
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert losses == pytest.approx(expected, abs=1e-5)
    for got, want in zip(llama.parameters(), reference.parameters()):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert expected[-1] < expected[0] - 0.1
    assert (tmp_path / "checkpoint-6").is_dir()  # the last step is saved


@pytest.fixture
def sft(tmp_path, llama, fresh_accelerate):
    trl = pytest.importorskip("trl")
    from datasets import load_dataset

    def make(file, **changes):
        arguments = trl.SFTConfig(
            **sft_arguments(**run(output_dir=tmp_path, **changes)), use_cpu=True
        )
        rows = load_dataset(
            "json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache")
        )
        return trl.SFTTrainer(
            llama, arguments, train_dataset=rows, processing_class=load_tokenizer()
        ).train_dataset

    return make


def test_trl_trains_on_the_answers(sft, tmp_path):
    write_messages(PAIRS, tmp_path / "train.jsonl")
    for pair, row in zip(PAIRS, sft(tmp_path / "train.jsonl"), strict=True):
        ours = tokenize_pair(load_tokenizer(), **pair)
        size = len(ours["input_ids"])
        behind = row["input_ids"][size:]
        assert (
            row["input_ids"][:size] == ours["input_ids"]
            and row["labels"] == ours["labels"] + behind
        )
        assert load_tokenizer().decode(behind).strip() == ""
    (packed,) = sft(tmp_path / "train.jsonl", packing=True, seq_len=128)
    assert sorted(packed["seq_lengths"]) == sorted(
        len(tokenize_pair(load_tokenizer(), **p)["input_ids"]) + 1 for p in PAIRS
    )


def test_trl_would_train_on_the_questions_of_messages(sft, tmp_path):
    """The reason for the columns `prompt` and `completion`: `completion_only_loss` does nothing here, in silence."""
    chat = [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello."}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    (row,) = sft(tmp_path / "train.jsonl")
    assert row["labels"] == row["input_ids"]


def test_trl_takes_our_rows_as_they_are(llama, tmp_path, fresh_accelerate):
    trl = pytest.importorskip("trl")
    rows = load_instructions(load_tokenizer(), dataset=PAIRS)
    arguments = trl.SFTConfig(**sft_arguments(**run(output_dir=tmp_path)), use_cpu=True)
    taken = trl.SFTTrainer(
        llama, arguments, train_dataset=rows, processing_class=load_tokenizer()
    ).train_dataset
    assert [dict(row) for row in taken] == [dict(row) for row in rows]


# --- accelerate -----------------------------------------------------------------------------------

LAUNCHES = {
    "one-gpu": {"precision": "fp16"},
    "ddp": {"precision": "bf16", "processes": 4},
    "fsdp": {"precision": "bf16", "processes": 2, "fsdp": True},
    "cpu": {"precision": "fp32", "cpu": True},
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_accelerate_reads_its_configuration(case, tmp_path, monkeypatch, fresh_accelerate):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    wanted = LAUNCHES[case]
    path = str(write_yaml(accelerate_config(**wanted), tmp_path / "accelerate.yml"))
    read = load_config_from_file(path)  # raises for an unknown key
    kind = "FSDP" if wanted.get("fsdp") else "MULTI_GPU" if wanted.get("processes", 1) > 1 else "NO"
    assert (read.distributed_type.value, read.num_processes) == (kind, wanted.get("processes", 1))
    arguments = launch_command_parser().parse_args(["--config_file", path, "train.py"])
    arguments, *_ = _validate_launch_command(arguments)
    assert (arguments.multi_gpu, arguments.use_fsdp, arguments.use_cpu) == (
        kind == "MULTI_GPU",
        kind == "FSDP",
        case == "cpu",
    )
    if kind == "NO":
        return
    environment = prepare_multi_gpu_env(arguments)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16" and arguments.nproc_per_node == str(
        wanted["processes"]
    )
    if kind == "FSDP":
        for name, value in environment.items():
            if name.startswith(("FSDP_", "ACCELERATE_")):
                monkeypatch.setenv(name, value)
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
        assert plugin.cpu_ram_efficient_loading is False and "transformer" in str(
            plugin.auto_wrap_policy
        )


def test_accelerate_rejects_an_unknown_key(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    path = write_yaml(
        accelerate_config(precision="bf16") | {"processes": 2}, tmp_path / "accelerate.yml"
    )
    with pytest.raises(ValueError, match="processes"):
        load_config_from_file(str(path))


def test_accelerate_launches_with_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import accelerate\na = accelerate.Accelerator()\nprint(a.mixed_precision, a.device, a.num_processes)"
    )
    path = write_yaml(accelerate_config(precision="bf16", cpu=True), tmp_path / "accelerate.yml")
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(path),
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["bf16", "cpu", "1"]


# --- files and bad input --------------------------------------------------------------------------


def test_a_file_is_not_overwritten_by_accident(tmp_path):
    config, path = axolotl_config(**run()), tmp_path / "a.yml"
    first = write_yaml(config, path).read_text()
    assert first.splitlines()[0] == f"# Written by recipes_lib/export.py. Run: axolotl train {path}"
    with pytest.raises(ValueError, match=r"a\.yml exists.*overwrite=True"):
        write_yaml(config, path)
    assert write_yaml(config, path, overwrite=True).read_text() == first
    accelerate = write_yaml(accelerate_config(precision="bf16"), tmp_path / "b.yml").read_text()
    assert f"accelerate launch --config_file {tmp_path / 'b.yml'}" in accelerate.splitlines()[0]
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
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


def test_messages(tmp_path):
    assert write_messages(iter(PAIRS), tmp_path / "train.jsonl") == 2
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for pair, row in zip(PAIRS, rows, strict=True):
        user = {"role": "user", "content": pair["prompt"]}
        assistant = {"role": "assistant", "content": pair["completion"]}
        assert row == {"messages": [user, assistant], "prompt": [user], "completion": [assistant]}
    with pytest.raises(ValueError, match="no pair"):
        write_messages([], tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="pair 1: the completion is empty"):
        write_messages([PAIRS[0], {"prompt": "x", "completion": " "}], tmp_path / "empty.jsonl")
    assert not (tmp_path / "empty.jsonl").exists()


@pytest.mark.parametrize("make", [axolotl_config, trainer_arguments, sft_arguments])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "dora"}, "method='dora': choose one of"),
        ({"optimizer": "adam"}, "optimizer='adam'"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"report_to": "all"}, "report_to='all'"),
        ({"rank": 0}, "rank=0"),
        ({"alpha": 0}, "alpha=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"max_grad_norm": -1}, "0 for no clipping"),
        ({"warmup_steps": 6}, "give 0 to 5"),
        ({"micro_batch_size": 4}, "multiple of micro_batch_size x processes = 4"),
        ({"processes": 2}, "multiple of micro_batch_size x processes = 4"),
        ({"target_modules": "q_proj"}, "give a list"),
        ({"target_modules": []}, "give a list"),
    ],
)
def test_bad_settings(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**run(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"alpha": 0.5}, "whole numbers"), ({"method": "full", "precision": "fp16"}, "use bf16")],
)
def test_what_axolotl_cannot_do(changes, message):
    with pytest.raises(ValueError, match=message):
        axolotl_config(**run(**changes))
    trainer_arguments(**run(**changes))


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
