"""The settings of a fine-tuning run, checked as they are made.

One frozen record goes to our loop and to Axolotl, so both run the same.
`dataclasses.replace(settings, rank=8)` gives a changed copy, checked again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from recipes_lib.core.checks import check_choice, check_number, check_whole

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHOICES = {
    "method": ("lora", "qlora", "full"),
    "optimizer": (
        "adamw_torch_fused",
        "adamw_torch",
        "adamw_bnb_8bit",
        "adamw_8bit",
        "paged_adamw_8bit",
    ),
    "precision": tuple(PRECISIONS),
    "report_to": ("none", "tensorboard", "mlflow", "wandb"),
}
MAY_CHANGE_ON_RESUME = ("base_model", "data_files", "output_dir", "save_steps", "report_to")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What one run is. Raises ValueError for what cannot be."""

    base_model: str  # hub id or folder
    data_files: Sequence[str]  # all are read; none: the functions of the standard library
    output_dir: str | Path
    method: str = "lora"

    # The adapters. "full" has none, and does not read these.
    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0

    # Tokens that the base does not have, or has no trained rows for; their rows are trained.
    add_tokens: Sequence[str] = ()
    # In place of the tokenizer's own: "chatml", or a file of Jinja.
    chat_template: str = ""

    # The optimizer.
    learning_rate: float  # after the warm-up; then a cosine to 0
    optimizer: str = "adamw_torch_fused"
    max_grad_norm: float = 1.0  # 0: no clipping

    # The batch.
    steps: int
    warmup_steps: int
    rows_per_step: int  # of all processes and micro-batches together
    micro_batch_size: int  # of one process
    processes: int = 1
    # Each process has a part of the model. None: where the whole does not fit one device.
    shard: bool | None = None
    seq_len: int
    packing: bool = False

    precision: str
    gradient_checkpointing: bool = False
    seed: int = 0
    save_steps: int = 10  # between checkpoints; one more follows the last step
    report_to: str = "none"

    def __post_init__(self) -> None:
        """Raise ValueError for settings that cannot be."""
        # A checkpoint gives back lists, and a resumed run is compared with its first part.
        object.__setattr__(self, "add_tokens", list(self.add_tokens))
        for name, allowed in CHOICES.items():
            check_choice(allowed, **{name: getattr(self, name)})
        whole = ("rank", "steps", "rows_per_step", "micro_batch_size", "processes", "seq_len")
        for name in (*whole, "save_steps"):
            check_whole(**{name: getattr(self, name)})
        check_whole(least=0, most=self.steps - 1, warmup_steps=self.warmup_steps)
        check_whole(least=0, seed=self.seed)
        check_number(above=0, alpha=self.alpha, learning_rate=self.learning_rate)
        check_number(least=0, below=1, dropout=self.dropout)
        check_number(least=0, max_grad_norm=self.max_grad_norm)
        if self.shard and self.processes == 1:
            raise ValueError("shard=True, processes=1: start several with torchrun")
        if self.shard and "8bit" in self.optimizer:
            raise ValueError(
                f"shard=True, optimizer={self.optimizer!r}: states in 8 bits are not divided, so "
                f"take adamw_torch_fused"
            )
        if self.shard and self.add_tokens and self.method != "full":
            raise ValueError(
                f"shard=True, add_tokens={self.add_tokens!r}: adapters of single rows are not "
                f"divided, so take method='full'"
            )
        rows_at_once = self.micro_batch_size * self.processes
        if self.rows_per_step % rows_at_once != 0:
            raise ValueError(
                f"rows_per_step={self.rows_per_step}: "
                f"give a multiple of micro_batch_size x processes = {rows_at_once}"
            )
