"""Runs as other libraries are asked to repeat them."""

import dataclasses

from recipes_lib.workflows.finetune.settings import CHOICES, Settings

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
