"""The same run for Axolotl: a file `axolotl.yml` in the folder of the run, and its pairs beside it.

    write_axolotl(settings, pairs, tokenizer=tokenizer)

Checked against Axolotl 0.19. What differs from our loop:

- The order of the rows. At the end of a pass it takes an incomplete step. Norms get no weight
  decay.
- The weights are loaded in the 16-bit type of `precision`: there is no fp32 copy, not even with
  `method="full"`.
- On several GPUs it takes the mean of the ranks' means, and we take the mean over all targets.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from recipes_lib.core.data.chat_template import keeps_all
from recipes_lib.core.model.default_model import SMOLLM2
from recipes_lib.workflows.finetune.settings import Settings

FOLDER = "axolotl"  # of the pairs, and of what Axolotl will train


def write_axolotl(run: Settings, pairs: Sequence[dict[str, Any]], *, tokenizer: Any) -> None:
    """Leave in the folder of the run what Axolotl needs to repeat it, or say why it cannot."""
    folder = Path(run.output_dir) / FOLDER
    data = folder / "train.jsonl"
    repeated = dataclasses.replace(run, data_files=[str(data)], output_dir=folder / "model")
    try:
        config = axolotl_config(repeated, tokenizer=tokenizer)
        lines = lines_of_messages(pairs, tokenizer)
    except ValueError as error:  # the run is a good one nevertheless
        print(f"no axolotl.yml, which cannot say this run: {error}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(lines), encoding="utf-8")
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    (folder.parent / "axolotl.yml").write_text(text, encoding="utf-8")


def lines_of_messages(pairs: Sequence[dict[str, Any]], tokenizer: Any) -> list[str]:
    """The conversations for Axolotl, as JSON Lines.

    Raises ValueError for a text, and for a conversation of which the template cuts a part.
    """
    lines = []
    for number, pair in enumerate(pairs):
        if "text" in pair:
            raise ValueError("texts without a question, for which it has another kind of data")
        turns = _turns_for_axolotl(pair)
        if not keeps_all(tokenizer, turns, pair.get("tools")):
            raise ValueError(
                f"of pair {number} the chat template leaves a part out, as the thinking of earlier "
                f"answers, and Axolotl learns no more than the template writes"
            )
        row = {"messages": turns}
        if "tools" in pair:
            row["tools"] = pair["tools"]
        lines.append(json.dumps(row) + "\n")
    return lines


def _turns_for_axolotl(pair: dict[str, Any]) -> list[dict[str, Any]]:
    if "messages" in pair:
        return pair["messages"]
    return [
        {"role": "user", "content": pair["prompt"]},
        {"role": "assistant", "content": pair["completion"]},
    ]


def axolotl_config(run: Settings, *, tokenizer: Any) -> dict[str, Any]:
    """The run for `axolotl train`.

    Attention is PyTorch's own, which keeps packed rows apart: flash-attn is not needed. The chat
    template is that of the base's tokenizer, or that of `tokenizer` where the run has set another.
    Raises ValueError for what Axolotl changes in silence or fails on.
    """
    _check_axolotl_can(run, tokenizer)
    micro_batches = run.rows_per_step // (run.micro_batch_size * run.processes)
    template = {"chat_template": "tokenizer_default"}
    if run.chat_template:
        template = {"chat_template": "jinja", "chat_template_jinja": tokenizer.chat_template}
    config = {
        "base_model": SMOLLM2 if run.base_model == "smollm2" else run.base_model,
        "datasets": [
            {
                "path": run.data_files[0],
                "ds_type": "json",
                "type": "chat_template",
                "field_messages": "messages",
                "message_field_training": "train",
                **template,
                "roles_to_train": ["assistant"],
                "train_on_eos": "turn",
            }
        ],
        "output_dir": str(run.output_dir),
        "train_on_inputs": False,
        "val_set_size": 0.0,
        "sequence_len": run.seq_len,
        "excess_length_strategy": "drop",  # a cut answer has no end
        "sample_packing": run.packing,
        "eval_sample_packing": False,
        "pad_to_sequence_len": run.packing,
        "attn_implementation": "sdpa",
        # The reentrant kind cuts the gradient of adapters: no input of a block requires one.
        "gradient_checkpointing": run.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "micro_batch_size": run.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "max_steps": run.steps,
        "save_steps": run.save_steps,
        "logging_steps": 1,
        "optimizer": run.optimizer,
        "learning_rate": run.learning_rate,
        "lr_scheduler": "cosine",
        "warmup_steps": run.warmup_steps,
        "weight_decay": 0.01,  # that of torch.optim.AdamW
        "max_grad_norm": run.max_grad_norm,
        # Both are said: where they are absent, Axolotl takes 16 bits by itself.
        "bf16": run.precision == "bf16",
        "fp16": run.precision == "fp16",
        "tf32": False,
        "seed": run.seed,
    }
    if run.report_to != "none":
        config[f"use_{run.report_to}"] = True
    return config | _adapter_of_axolotl(run)


def _adapter_of_axolotl(run: Settings) -> dict[str, Any]:
    """What the file says of LoRA or QLoRA."""
    if run.method == "full":
        return {}
    config = {
        "adapter": run.method,
        "load_in_4bit": run.method == "qlora",
        "lora_r": run.rank,
        "lora_alpha": int(run.alpha),
        "lora_dropout": run.dropout,
        "lora_target_linear": True,
    }
    if run.dropout > 0:
        # Axolotl's fused kernels drop nothing in front of the down projection.
        config |= {"lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False}
    return config


def _check_axolotl_can(run: Settings, tokenizer: Any) -> None:
    """Raise ValueError for settings that Axolotl changes in silence or fails on."""
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template, and Axolotl would need one")
    if run.warmup_steps == 1:
        raise ValueError("warmup_steps=1: Axolotl would take 2; give 0, or 2 or more")
    if run.alpha != int(run.alpha):
        raise ValueError(f"alpha={run.alpha}: Axolotl takes whole numbers")
    if run.method == "full" and run.precision == "fp16":
        raise ValueError("full fine-tuning in fp16 fails in Axolotl: use bf16")
    if run.shard:
        raise ValueError(
            "the model is divided, which Axolotl does with an fsdp_config, as in "
            "launch/axolotl/llama-3-70b-qlora-fsdp.yaml"
        )
    if run.add_tokens:
        raise ValueError("add_tokens: Axolotl trains whole tables, and not the rows of some tokens")
