"""Take a fine-tuning run to production: the same settings for Axolotl, accelerate, the Trainer and TRL.

    write_messages(pairs, "train.jsonl")
    write_yaml(axolotl_config(**run), "axolotl.yml")  # run: the fields of `Settings`
    write_yaml(accelerate_config(precision="bf16"), "accelerate.yml")
    TrainingArguments(**trainer_arguments(**run)), SFTConfig(**sft_arguments(**run))  # of transformers, of trl

Checked against Axolotl 0.19, accelerate 1.15, transformers 5 and trl 1.16. What differs from a plain loop:
- The order of the rows. At the end of a pass the Trainer takes an incomplete step. Norms get no weight decay.
- Axolotl loads the weights in the 16-bit type of `precision`: there is no fp32 copy, not even with `method="full"`.
  On several GPUs it takes the mean of the ranks' means; the Trainer takes the mean over all targets.
- TRL also trains on what the template puts behind the end mark (a line break), and holds the adapters of a 4-bit
  model in bf16. It takes `load_instructions(...)` as `train_dataset`, too, with those labels as they are.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from recipes_lib.core.model import SMOLLM2

CHOICES = {
    "method": ("lora", "qlora", "full"),
    "optimizer": (
        "adamw_torch_fused",
        "adamw_torch",
        "adamw_bnb_8bit",
        "adamw_8bit",
        "paged_adamw_8bit",
    ),
    "precision": ("fp32", "bf16", "fp16"),
    "report_to": ("none", "tensorboard", "mlflow", "wandb"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What `axolotl_config`, `trainer_arguments` and `sft_arguments` take. ValueError for what cannot be."""

    base_model: str  # hub id or folder
    data_file: str | Path  # from `write_messages`
    output_dir: str | Path
    method: str = "lora"
    rank: int = 16  # this and the next three are of the adapters: "full" has none
    alpha: float = 32
    dropout: float = 0.0
    target_modules: Sequence[str] | None = None  # None: every linear layer of the blocks
    learning_rate: float  # after the warm-up; then a cosine to 0
    optimizer: str = "adamw_torch_fused"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0  # 0: no clipping
    steps: int
    warmup_steps: int
    rows_per_step: int  # of all processes and micro-batches together
    micro_batch_size: int  # of one process
    processes: int = 1
    seq_len: int
    packing: bool = False
    precision: str
    gradient_checkpointing: bool = False
    seed: int = 0
    save_steps: int | None = None  # None: only after the last step
    report_to: str = "none"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            _check(
                getattr(self, name) in allowed,
                f"{name}={getattr(self, name)!r}: choose one of {allowed}",
            )
        for name in ("rank", "steps", "rows_per_step", "micro_batch_size", "processes", "seq_len"):
            _check(getattr(self, name) >= 1, f"{name}={getattr(self, name)}: give 1 or more")
        for name in ("alpha", "learning_rate"):
            _check(getattr(self, name) > 0, f"{name}={getattr(self, name)}: give a number above 0")
        _check(0 <= self.dropout < 1, f"dropout={self.dropout}: give 0 or more and less than 1")
        _check(
            self.max_grad_norm >= 0,
            f"max_grad_norm={self.max_grad_norm}: give a norm, or 0 for no clipping",
        )
        _check(
            0 <= self.warmup_steps < self.steps,
            f"warmup_steps={self.warmup_steps}: give 0 to {self.steps - 1}",
        )
        names = self.target_modules is None or (
            self.target_modules and not isinstance(self.target_modules, str)
        )
        _check(
            bool(names),
            f"target_modules={self.target_modules!r}: give a list of names, or None for all",
        )
        rows, message = (
            self.micro_batch_size * self.processes,
            "give a multiple of micro_batch_size x processes =",
        )
        _check(
            self.rows_per_step % rows == 0, f"rows_per_step={self.rows_per_step}: {message} {rows}"
        )

    def common(self) -> dict[str, Any]:
        """What Axolotl and the Trainer call by the same name."""
        names = ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "seed")
        same = {name: getattr(self, name) for name in names} | {
            "max_steps": self.steps,
            "logging_steps": 1,
        }
        same["gradient_accumulation_steps"] = self.rows_per_step // (
            self.micro_batch_size * self.processes
        )
        same |= {"adam_beta1": self.betas[0], "adam_beta2": self.betas[1], "adam_epsilon": self.eps}
        # Both are said: where they are absent, Axolotl and TRL take 16 bits by themselves.
        same |= {"bf16": self.precision == "bf16", "fp16": self.precision == "fp16"}
        return same | {
            "save_steps": self.save_steps or self.steps,
            "output_dir": str(self.output_dir),
        }


def axolotl_config(**settings: Any) -> dict[str, Any]:
    """The run for `axolotl train`, from the fields of `Settings`.

    Attention is PyTorch's own, which keeps packed rows apart: flash-attn is not needed. ValueError for what Axolotl
    changes in silence or fails on: one warm-up step, an alpha with a fraction, full fine-tuning in fp16.
    """
    run = Settings(**settings)
    _check(run.warmup_steps != 1, "warmup_steps=1: Axolotl would take 2; give 0, or 2 or more")
    _check(run.alpha == int(run.alpha), f"alpha={run.alpha}: Axolotl takes whole numbers")
    _check(
        (run.method, run.precision) != ("full", "fp16"),
        "full fine-tuning in fp16 fails in Axolotl: use bf16",
    )
    data = {
        "path": str(run.data_file),
        "ds_type": "json",
        "type": "chat_template",
        "field_messages": "messages",
    }
    data |= {
        "chat_template": "tokenizer_default",
        "roles_to_train": ["assistant"],
        "train_on_eos": "turn",
    }
    base = (
        SMOLLM2 if run.base_model == "smollm2" else run.base_model
    )  # our short name is none of theirs
    config = {"base_model": base, "datasets": [data], "train_on_inputs": False, "val_set_size": 0.0}
    config |= {
        "sequence_len": run.seq_len,
        "excess_length_strategy": "drop",
    }  # a cut answer has no end
    config |= {
        "sample_packing": run.packing,
        "eval_sample_packing": False,
        "pad_to_sequence_len": run.packing,
    }
    config |= {"attn_implementation": "sdpa", "gradient_checkpointing": run.gradient_checkpointing}
    if run.method != "full":
        config |= (
            {"lora_target_modules": [*run.target_modules]}
            if run.target_modules
            else {"lora_target_linear": True}
        )
        config |= {"adapter": run.method, "load_in_4bit": run.method == "qlora", "lora_r": run.rank}
        config |= {"lora_alpha": int(run.alpha), "lora_dropout": run.dropout}
        if run.dropout:  # Axolotl's fused kernels drop nothing in front of the down projection
            config |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    config |= {} if run.report_to == "none" else {f"use_{run.report_to}": True}
    config |= {
        "micro_batch_size": run.micro_batch_size,
        "optimizer": run.optimizer,
        "lr_scheduler": "cosine",
    }
    return (
        config
        | run.common()
        | {"tf32": False, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    )


def trainer_arguments(**settings: Any) -> dict[str, Any]:
    """Keyword arguments of `transformers.TrainingArguments`, from `Settings`; the caller brings model and rows."""
    from transformers import TrainingArguments

    run = Settings(**settings)
    arguments = run.common() | {
        "per_device_train_batch_size": run.micro_batch_size,
        "optim": run.optimizer,
    }
    arguments |= {"lr_scheduler_type": "cosine", "report_to": run.report_to}
    name = (
        "activation" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient"
    ) + "_checkpointing"
    return arguments | {
        name: run.gradient_checkpointing,
        f"{name}_kwargs": {"use_reentrant": False},
    }


def sft_arguments(**settings: Any) -> dict[str, Any]:
    """Keyword arguments of `trl.SFTConfig`, from the fields of `Settings`.

    TRL cuts rows of more than `seq_len` tokens, and Axolotl leaves them out: keep them out of the file.
    """
    run = Settings(
        **settings
    )  # not `assistant_only_loss`: few chat templates mark what the assistant says
    own = {"completion_only_loss": True, "max_length": run.seq_len, "packing": run.packing}
    return trainer_arguments(**settings) | own


def accelerate_config(
    *, precision: str, processes: int = 1, fsdp: bool = False, cpu: bool = False
) -> dict[str, Any]:
    """For `accelerate launch --config_file` on one machine: one GPU, several with DDP or FSDP2, or the CPU.

    One process on a machine with several GPUs needs CUDA_VISIBLE_DEVICES: the Trainer would split its batches over all.
    ValueError for what accelerate ignores in silence: several processes or FSDP on a CPU, FSDP of one process.
    """
    _check(
        precision in CHOICES["precision"],
        f"precision={precision!r}: choose one of {CHOICES['precision']}",
    )
    _check(
        processes >= 1 + fsdp,
        f"processes={processes}, fsdp={fsdp}: give 1 or more, for fsdp 2 or more",
    )
    _check(
        not cpu or processes == 1,
        f"cpu=True, processes={processes}: accelerate starts 1 on a CPU; use torchrun",
    )
    _check(
        not cpu or precision != "fp16",
        "cpu=True, precision='fp16': there is no fp16 training on a CPU; use bf16",
    )
    kind = "FSDP" if fsdp else "MULTI_GPU" if processes > 1 else "NO"
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_processes": processes,
    }
    config |= {"mixed_precision": "no" if precision == "fp32" else precision, "use_cpu": cpu}
    if fsdp:  # every rank loads the model: loading on one rank and sending the shards hangs with 4-bit weights
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        }
        config["fsdp_config"] |= {
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
        }
    return config


def write_messages(
    pairs: Iterable[dict[str, Any]], path: str | Path, *, overwrite: bool = False
) -> int:
    """Write pairs (`prompt` and `completion`) and conversations (`messages`) as JSON Lines; returns their number.

    Axolotl reads the column `messages`; TRL reads `prompt` and `completion` (a conversation's last answer), since it
    would train on the whole of `messages`. ValueError for no pair, an empty answer, and a file that exists.
    """
    lines = []
    for pair in pairs:
        chat = pair.get("messages")
        if not chat:
            chat = [
                {"role": "user", "content": pair["prompt"]},
                {"role": "assistant", "content": pair["completion"]},
            ]
        last = max(
            (i for i, message in enumerate(chat) if message["role"] == "assistant"), default=0
        )
        answered = chat[last]["role"] == "assistant" and bool(chat[last]["content"].strip())
        _check(answered, f"pair {len(lines)}: the completion is empty")
        lines.append(
            json.dumps({"messages": chat, "prompt": chat[:last], "completion": [chat[last]]}) + "\n"
        )
    _check(bool(lines), "there is no pair to write")
    _write("".join(lines), Path(path), overwrite)
    return len(lines)


def write_yaml(config: dict[str, Any], path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a configuration of this file as YAML, whole or not at all; ValueError if `path` exists."""
    import yaml  # comes with accelerate

    run = (
        f"axolotl train {path}"
        if "base_model" in config
        else f"accelerate launch --config_file {path} train.py"
    )
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    return _write(f"# Written by recipes_lib/export.py. Run: {run}\n{text}", Path(path), overwrite)


def _write(text: str, path: Path, overwrite: bool) -> Path:
    _check(
        overwrite or not path.exists(),
        f"{path} exists: choose another file, or pass overwrite=True",
    )
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        scratch.write_text(text, encoding="utf-8")
        return scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _check(fine: bool, message: str) -> None:
    if not fine:
        raise ValueError(message)
