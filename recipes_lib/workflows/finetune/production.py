"""A fine-tuning run in production: the same settings for the Trainer, TRL, Axolotl, accelerate.

    TrainingArguments(**trainer_arguments(settings))  # of transformers
    SFTConfig(**sft_arguments(settings))  # of trl
    write_production(settings, pairs)  # train.jsonl, axolotl.yml and accelerate.yml

Checked against Axolotl 0.19, accelerate 1.15, transformers 5 and trl 1.16. What differs from a
plain loop:

- The order of the rows. At the end of a pass the Trainer takes an incomplete step. Norms get no
  weight decay.
- Axolotl loads the weights in the 16-bit type of `precision`: there is no fp32 copy, not even
  with `method="full"`. On several GPUs it takes the mean of the ranks' means; the Trainer takes
  the mean over all targets.
- TRL also trains on what the template puts behind the end mark (a line break), and holds the
  adapters of a 4-bit model in bf16. It takes `load_instructions(...)` as `train_dataset`, too,
  with those labels as they are.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.data.chat_template import keeps_all
from recipes_lib.core.data.turns import is_learnt
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model.default_model import SMOLLM2
from recipes_lib.workflows.finetune.settings import PRECISIONS, Settings

DATA_FILE = "train.jsonl"
AXOLOTL_FILE = "axolotl.yml"
ACCELERATE_FILE = "accelerate.yml"
WRITTEN = (DATA_FILE, AXOLOTL_FILE, ACCELERATE_FILE)  # by write_production


# --- the Trainer and TRL --------------------------------------------------------------------------


def trainer_arguments(run: Settings) -> dict[str, Any]:
    """Keyword arguments of `transformers.TrainingArguments`; the caller brings model and rows."""
    from transformers import TrainingArguments

    # Newer versions call it "activation" and warn about "gradient".
    checkpointing = "gradient_checkpointing"
    if hasattr(TrainingArguments, "activation_checkpointing"):
        checkpointing = "activation_checkpointing"
    return _common_arguments(run) | {
        "per_device_train_batch_size": run.micro_batch_size,
        "optim": run.optimizer,
        "lr_scheduler_type": "cosine",
        "report_to": run.report_to,
        # The reentrant kind cuts the gradient of adapters: no input of a block requires one.
        checkpointing: run.gradient_checkpointing,
        f"{checkpointing}_kwargs": {"use_reentrant": False},
    }


def sft_arguments(run: Settings) -> dict[str, Any]:
    """Keyword arguments of `trl.SFTConfig`.

    TRL cuts rows of more than `seq_len` tokens, and Axolotl leaves them out: keep them out of the
    file.
    """
    return trainer_arguments(run) | {
        # Not `assistant_only_loss`: few chat templates mark what the assistant says.
        "completion_only_loss": True,
        "max_length": run.seq_len,
        "packing": run.packing,
    }


def _common_arguments(run: Settings) -> dict[str, Any]:
    """What Axolotl and the Trainer call by the same name."""
    return {
        "learning_rate": run.learning_rate,
        "warmup_steps": run.warmup_steps,
        "weight_decay": run.weight_decay,
        "max_grad_norm": run.max_grad_norm,
        "seed": run.seed,
        "max_steps": run.steps,
        "logging_steps": 1,
        "gradient_accumulation_steps": run.micro_batches,
        "adam_beta1": run.betas[0],
        "adam_beta2": run.betas[1],
        "adam_epsilon": run.eps,
        # Both are said: where they are absent, Axolotl and TRL take 16 bits by themselves.
        "bf16": run.precision == "bf16",
        "fp16": run.precision == "fp16",
        "save_steps": run.steps_between_checkpoints,
        "output_dir": str(run.output_dir),
    }


# --- Axolotl --------------------------------------------------------------------------------------


def axolotl_config(run: Settings, *, tokenizer: Any = None) -> dict[str, Any]:
    """The run for `axolotl train`.

    Attention is PyTorch's own, which keeps packed rows apart: flash-attn is not needed. The chat
    template is that of the base's tokenizer, or that of `tokenizer` where the run has set another.
    Raises ValueError for what Axolotl changes in silence or fails on.
    """
    _check_axolotl_can(run)
    template = {"chat_template": "tokenizer_default"}
    if tokenizer is not None and not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template, and Axolotl would need one")
    if run.chat_template and tokenizer is not None:
        template = {"chat_template": "jinja", "chat_template_jinja": tokenizer.chat_template}
    config = {
        "base_model": SMOLLM2 if run.base_model == "smollm2" else run.base_model,
        "datasets": [
            {
                "path": str(run.data_file),
                "ds_type": "json",
                "type": "chat_template",
                "field_messages": "messages",
                "message_field_training": "train",
                **template,
                "roles_to_train": ["assistant"],
                "train_on_eos": "turn",
            }
        ],
        "train_on_inputs": False,
        "val_set_size": 0.0,
        "sequence_len": run.seq_len,
        "excess_length_strategy": "drop",  # a cut answer has no end
        "sample_packing": run.packing,
        "eval_sample_packing": False,
        "pad_to_sequence_len": run.packing,
        "attn_implementation": "sdpa",
        "gradient_checkpointing": run.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "micro_batch_size": run.micro_batch_size,
        "optimizer": run.optimizer,
        "lr_scheduler": "cosine",
        "tf32": False,
    }
    if run.method != "full":
        config |= _axolotl_adapter(run)
    if run.report_to != "none":
        config[f"use_{run.report_to}"] = True
    return config | _common_arguments(run)


def _check_axolotl_can(run: Settings) -> None:
    """Raise ValueError for settings that Axolotl changes in silence or fails on."""
    if run.warmup_steps == 1:
        raise ValueError("warmup_steps=1: Axolotl would take 2; give 0, or 2 or more")
    if run.alpha != int(run.alpha):
        raise ValueError(f"alpha={run.alpha}: Axolotl takes whole numbers")
    if run.method == "full" and run.precision == "fp16":
        raise ValueError("full fine-tuning in fp16 fails in Axolotl: use bf16")
    if run.target_modules == "attention":
        raise ValueError("target_modules='attention': Axolotl takes names of layers, so give those")
    if run.shard:
        raise ValueError(
            "the model is divided, which Axolotl does with an fsdp_config, as in "
            "launch/axolotl/llama-3-70b-qlora-fsdp.yaml"
        )
    if run.add_tokens:
        raise ValueError("add_tokens: Axolotl trains whole tables, and not the rows of some tokens")


def _axolotl_adapter(run: Settings) -> dict[str, Any]:
    config: dict[str, Any] = {
        "adapter": run.method,
        "load_in_4bit": run.method == "qlora",
        "lora_r": run.rank,
        "lora_alpha": int(run.alpha),
        "lora_dropout": run.dropout,
    }
    # One of the two: together Axolotl would adapt every linear layer.
    if run.target_modules:
        config["lora_target_modules"] = list(run.target_modules)
    else:
        config["lora_target_linear"] = True
    if run.dropout:
        # Axolotl's fused kernels drop nothing in front of the down projection.
        config |= {"lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False}
    return config


# --- accelerate -----------------------------------------------------------------------------------


def accelerate_config(
    *, precision: str, processes: int = 1, fsdp: bool = False, cpu: bool = False
) -> dict[str, Any]:
    """For `accelerate launch --config_file`: one GPU, several with DDP or FSDP2, or the CPU.

    One process on a machine with several GPUs needs CUDA_VISIBLE_DEVICES: the Trainer would split
    its batches over all.
    Raises ValueError for what accelerate ignores in silence: several processes or fp16 on a CPU,
    FSDP of one process.
    """
    check_choice(PRECISIONS, precision=precision)
    check_whole(processes=processes, least=2 if fsdp else 1)
    if cpu and processes > 1:
        raise ValueError(
            f"cpu=True, processes={processes}: accelerate starts 1 on a CPU; use torchrun"
        )
    if cpu and precision == "fp16":
        raise ValueError("cpu=True, precision='fp16': there is no fp16 training on a CPU; use bf16")
    kind = "NO" if processes == 1 else "MULTI_GPU"
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if fsdp else kind,
        "num_processes": processes,
        "mixed_precision": "no" if precision == "fp32" else precision,
        "use_cpu": cpu,
    }
    if fsdp:
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            # Every rank loads the model: to load on one and send the shards hangs with 4-bit
            # weights.
            "fsdp_cpu_ram_efficient_loading": False,
        }
    return config


# --- files ----------------------------------------------------------------------------------------


def write_production(
    run: Settings, pairs: Sequence[dict[str, Any]], *, tokenizer: Any = None
) -> None:
    """Leave in the folder of the run what Axolotl and accelerate need to repeat it."""
    folder = Path(run.output_dir)
    write_messages(pairs, folder / DATA_FILE, overwrite=True)
    # The files of Axolotl lie in a folder of their own: ours hold the proven result.
    repeated = dataclasses.replace(run, data_file=folder / DATA_FILE, output_dir=folder / "axolotl")
    # A run that one of them cannot repeat is a good run nevertheless.
    try:
        if any("text" in pair for pair in pairs):
            raise ValueError("texts without a question, for which it has another kind of data")
        if tokenizer is not None and tokenizer.chat_template:
            _check_that_all_is_kept(pairs, tokenizer)
        config = axolotl_config(repeated, tokenizer=tokenizer)
        write_yaml(config, folder / AXOLOTL_FILE, overwrite=True)
    except ValueError as error:
        print(f"no {AXOLOTL_FILE}, which cannot say this run: {error}")
    try:
        launch = accelerate_config(
            precision=run.precision,
            processes=run.processes,
            fsdp=bool(run.shard),
            cpu=machine().device == "cpu",
        )
        write_yaml(launch, folder / ACCELERATE_FILE, overwrite=True)
    except ValueError as error:
        print(f"no {ACCELERATE_FILE}, which cannot say this run: {error}")


def _check_that_all_is_kept(pairs: Iterable[dict[str, Any]], tokenizer: Any) -> None:
    """Raise ValueError for a conversation of which the template cuts a part, as old thinking."""
    for number, pair in enumerate(pairs):
        if not keeps_all(tokenizer, _turns_of(pair), pair.get("tools")):
            raise ValueError(
                f"of pair {number} the chat template leaves a part out, as the thinking of earlier "
                f"answers, and Axolotl learns no more than the template writes"
            )


def _turns_of(pair: dict[str, Any]) -> list[dict[str, Any]]:
    if "messages" in pair:
        return pair["messages"]
    return [
        {"role": "user", "content": pair["prompt"]},
        {"role": "assistant", "content": pair["completion"]},
    ]


def write_messages(
    pairs: Iterable[dict[str, Any]], path: str | Path, *, overwrite: bool = False
) -> int:
    """Write pairs (`prompt` and `completion`) and conversations (`messages`) as JSON Lines.

    Axolotl reads the columns `messages` and `tools`; TRL reads `prompt` and `completion` (the last
    answer of a conversation that is learnt), since it would train on the whole of `messages`. A
    text stays a text. Returns the number of lines.
    Raises ValueError for an empty answer and a file that exists.
    """
    lines = []
    for number, pair in enumerate(pairs):
        if "text" in pair:
            lines.append(json.dumps({"text": pair["text"]}) + "\n")
            continue
        chat = _turns_of(pair)
        # The last answer is the completion, and all before it the prompt.
        answers = [i for i, message in enumerate(chat) if is_learnt(message)]
        last = answers[-1] if answers else 0
        said = chat[last]["content"] or chat[last].get("tool_calls")
        if not answers or not str(said or "").strip():
            raise ValueError(f"pair {number}: the completion is empty")
        row = {"messages": chat, "prompt": chat[:last], "completion": [chat[last]]}
        if "tools" in pair:
            row["tools"] = pair["tools"]
        lines.append(json.dumps(row) + "\n")
    _write("".join(lines), Path(path), overwrite)
    return len(lines)


def write_yaml(config: dict[str, Any], path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a configuration of this file as YAML, whole or not at all.

    Raises ValueError if `path` exists.
    """
    import yaml  # comes with accelerate

    command = f"accelerate launch --config_file {path} train.py"
    if "base_model" in config:
        command = f"axolotl train {path}"
    head = f"# Written by recipes_lib/workflows/finetune/production.py. Run: {command}\n"
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    return _write(head + text, Path(path), overwrite)


def _write(text: str, path: Path, overwrite: bool) -> Path:
    """Write beside `path` first, and give it the name at once: a kill leaves no half file."""
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists: choose another file, or pass overwrite=True")
    # The number of the process: two runs that write here do not share a scratch file.
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        scratch.write_text(text, encoding="utf-8")
        return scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
