"""The settings of a run as the Trainer, TRL and accelerate read them; the files that are left."""

import copy
import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import torch
import yaml

from recipes_lib.core.data import batches, collate
from recipes_lib.core.data.tokens_and_labels import tokenize_pair
from recipes_lib.core.model import load_tokenizer
from recipes_lib.workflows.finetune.production import (
    accelerate_config,
    axolotl_config,
    sft_arguments,
    trainer_arguments,
    write_messages,
    write_production,
    write_yaml,
)
from tests.workflows.finetune.production_cases import CASES, PAIRS, change


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


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


# --- the Trainer and TRL --------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["lora", "fp16", "checkpointing", "report-mlflow"])
def test_training_arguments_take_every_key(case, tmp_path, fresh_accelerate):
    """The mistake: a setting under a name that this version of transformers reads otherwise."""
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


@pytest.mark.parametrize("case", ["lora", "lora-packed", "fp16"])
def test_sft_config_takes_every_key(case, tmp_path, fresh_accelerate):
    """The mistake: a setting left to TRL, which takes bf16, checkpointing and 1,024 tokens."""
    trl = pytest.importorskip("trl")
    run = CASES[case]
    given = sft_arguments(dataclasses.replace(run, output_dir=tmp_path))
    config = trl.SFTConfig(**given, use_cpu=True)
    assert (config.bf16, config.fp16) == (False, run.precision == "fp16")
    assert config.activation_checkpointing is config.gradient_checkpointing is False
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
    """The mistake: TRL learns the questions, or cuts the end mark off."""
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


# --- Axolotl; its own code reads these files in test_axolotl --------------------------------------


def test_what_axolotl_would_choose_otherwise():
    """The mistake: long rows cut, prompts learnt, dropout skipped by a fused kernel."""
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
    """The mistake: two ways to name layers, of which Axolotl takes the wider one."""
    layers = axolotl_config(CASES["layers"])
    assert layers["lora_target_modules"] == ["q_proj", "v_proj"]
    assert "lora_target_linear" not in layers
    assert "lora_mlp_kernel" not in layers  # without dropout the fused kernels compute the same
    of_adapters = ("lora", "adapter", "load_in")
    full = axolotl_config(CASES["full-packed"])
    assert not [key for key in full if key.startswith(of_adapters)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_steps": 1}, "would take 2"),
        ({"alpha": 0.5}, "whole numbers"),
        ({"method": "full", "precision": "fp16"}, "use bf16"),
        ({"target_modules": "attention"}, "names of layers"),
        ({"processes": 3, "shard": True}, "with an fsdp_config"),
    ],
)
def test_what_axolotl_cannot_do(changes, message):
    """The mistake: it trains something else in silence."""
    with pytest.raises(ValueError, match=message):
        axolotl_config(change(**changes))
    trainer_arguments(change(**changes))


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
    """The mistake: a key that accelerate does not know, or reads as another."""
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
    """The mistake: settings that the launcher reads and the script never sees."""
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"precision": "fp16", "cpu": True}, "use bf16"),
        ({"processes": 2, "cpu": True}, "torchrun"),
        ({"fsdp": True}, "processes=1: give a whole number of 2 or more"),
    ],
)
def test_what_accelerate_would_ignore(changes, message):
    """The mistake: one process on a CPU where several were asked for."""
    with pytest.raises(ValueError, match=message):
        accelerate_config(**{"precision": "bf16"} | changes)


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_written_whole_and_never_over_another(tmp_path, monkeypatch):
    """The mistakes: a user's file is gone; a kill leaves half of a file; 1e-3 is read as text."""
    path = tmp_path / "a.yml"
    run = CASES["processes"]
    config = axolotl_config(run)
    assert yaml.safe_load(write_yaml(config, path).read_text()) == config
    first = path.read_text()
    assert first.splitlines()[0].endswith(f"Run: axolotl train {path}")
    for write in (lambda: write_yaml(config, path), lambda: write_messages(PAIRS, path)):
        with pytest.raises(ValueError, match=r"a\.yml exists.*overwrite=True"):
            write()

    def fail(self, text, **_):
        with open(self, "w") as file:
            file.write(text[:5])
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(Path, "write_text", fail)
        write_yaml(config, path, overwrite=True)
    assert path.read_text() == first
    assert list(tmp_path.iterdir()) == [path]


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
PAIR = {"prompt": "a", "completion": "b"}


def test_messages_without_an_answer_are_refused(tmp_path):
    """The mistake: a row that teaches to say nothing."""
    path = tmp_path / "empty.jsonl"
    question = {"messages": CHAT["messages"][:1]}
    for empty in ({"prompt": "x", "completion": " "}, question):
        with pytest.raises(ValueError, match="pair 1: the completion is empty"):
            write_messages([PAIR, empty], path)
    assert not path.exists()


@pytest.mark.parametrize("rows", [[PAIR, CHAT], [CHAT, PAIR]])  # the first decides nothing
def test_production_files_name_the_rows_that_were_trained_on(tmp_path, rows):
    """The mistake: Axolotl reads the user's file, with the held-out pairs in it."""
    write_production(change(output_dir=str(tmp_path), data_file="mine.jsonl"), rows)
    config = yaml.safe_load((tmp_path / "axolotl.yml").read_text())
    assert config["datasets"][0]["path"] == f"{tmp_path}/train.jsonl"
    assert config["output_dir"] == f"{tmp_path}/axolotl"
    user, assistant = CHAT["messages"]
    expected = {"messages": [user, assistant], "prompt": [user], "completion": [assistant]}
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [expected] * 2


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
    write_production(change(output_dir=str(tmp_path)), [thinking], tokenizer=tokenizer)
    assert "no axolotl.yml, which cannot say this run: of pair 0 the" in capsys.readouterr().out
    tokenizer.chat_template = None
    write_production(change(output_dir=str(tmp_path)), [PAIR], tokenizer=tokenizer)
    assert "no axolotl.yml, which cannot say this run: the tokenizer has" in capsys.readouterr().out


def test_what_is_not_learnt_and_the_tools_stay_in_the_file(tmp_path):
    """The mistake: Axolotl and TRL learn what our loop has masked."""
    question, said = CHAT["messages"]
    masked = said | {"train": False}
    turns = [question, said, question, masked]
    tools = [{"type": "function", "function": {"name": "f"}}]
    write_messages([{"messages": turns, "tools": tools}, {"text": "x"}], tmp_path / "a.jsonl")
    first, second = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert first["messages"] == turns and first["tools"] == tools
    assert (first["prompt"], first["completion"]) == ([question], [said])
    assert second == {"text": "x"}
    (data,) = axolotl_config(change())["datasets"]
    assert data["message_field_training"] == "train"


def test_production_files_that_cannot_be_are_left_out_and_named(tmp_path, capsys):
    """A run that is done must not fail for it."""
    run = change(output_dir=str(tmp_path), warmup_steps=1, processes=3, rows_per_step=6)
    write_production(run, [PAIR])
    said = capsys.readouterr().out
    assert "no axolotl.yml, which cannot say this run: warmup_steps=1" in said
    assert "no accelerate.yml, which cannot say this run: cpu=True, processes=3" in said
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]
