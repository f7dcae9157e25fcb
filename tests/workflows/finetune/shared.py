"""A short run on a small model, and rows of unequal lengths, for the tests of this folder."""

import contextlib
import dataclasses
import io

import torch

from recipes_lib.core.data.tokens_and_labels import IGNORED
from recipes_lib.core.measure.machine import seed_everything
from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.finetune.command import STEP_LINE, finetune
from recipes_lib.workflows.finetune.loop import adapt
from recipes_lib.workflows.finetune.settings import Settings

STEPS = 10
SAVE_STEPS = 4  # a kill takes a moment, and the process goes on for a step or two meanwhile
RUN = Settings(
    base_model="tiny",
    data_files=[],
    output_dir="unused",
    method="full",
    learning_rate=1e-3,
    max_grad_norm=0.5,
    steps=5,
    warmup_steps=2,
    rows_per_step=4,
    micro_batch_size=2,
    seq_len=64,
    precision="fp32",
)


def change(**values):
    return dataclasses.replace(RUN, **values)


def make_rows(count=12, *, shortest=5, longest=39):
    """Rows of unequal lengths; the second half of each is its answer."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator)
    rows = []
    for length in lengths.tolist():
        ids = torch.randint(1, 128, (length,), generator=generator).tolist()
        half = length // 2
        rows.append({"input_ids": ids, "labels": [IGNORED] * half + ids[half:]})
    return rows


def fresh(shape="tiny-llama", **values):
    """The same adapted model at every call."""
    seed_everything(0)
    return adapt(model_of_shape(shape, device="cpu"), run=change(**values))


def apart(weights, others):
    """How far weights are apart, as a part of them.

    Of all together: in Adam's first steps a gradient near zero is a sign, which rounding flips.
    """
    found, expected = (torch.cat([each.flatten() for each in some]) for some in (weights, others))
    return ((found - expected).norm() / expected.norm()).item()


def losses_of(steps):
    return [step.loss for step in steps]


def settings(small_model, pairs, output, **values):
    given = {
        "base_model": str(small_model),
        "data_files": [str(pairs)],
        "output_dir": str(output),
        "dropout": 0.1,  # its random states have to come back
        "learning_rate": 1e-3,
        "steps": STEPS,
        "warmup_steps": 5,
        "rows_per_step": 2,
        "micro_batch_size": 1,
        "seq_len": 64,
        "packing": True,
        "precision": "fp32",
        "save_steps": SAVE_STEPS,
        "report_to": "tensorboard",
    }
    return Settings(**given | values)


def finetune_here(run, **options):
    """`finetune` in this process: step -> loss, as it printed them, and all that it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        finetune(run, **options)
    lines = printed.getvalue().splitlines()
    matches = filter(None, map(STEP_LINE.match, lines))
    return {int(match[1]): match[2] for match in matches}, printed.getvalue()
