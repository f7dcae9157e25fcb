"""The predicted peak of a fine-tuning step is the measured one, whatever the settings."""

import pytest
import torch

from recipes_lib.core.measure import PeakMemory, measure
from recipes_lib.core.model import model_of_shape
from recipes_lib.training.sequence_packing import pack_sequences
from recipes_lib.workflows.finetune.budget import shapes_of
from recipes_lib.workflows.finetune.loop import micro_batches, prepare, training_steps
from tests.workflows.finetune.shared import change, make_rows

PACKED = {"packing": True, "micro_batch_size": 1}
CHECKPOINTED = {"gradient_checkpointing": True}
BF16 = {"precision": "bf16"}
LORA = {"method": "lora"}
QLORA = {"method": "qlora"}
DROPOUT = {"dropout": 0.1}
CASES = [
    # Full fine-tuning.
    ("tiny-qwen3", {"optimizer": "adamw_bnb_8bit", "seq_len": 32}),  # the states weigh most
    ("tiny-gemma2", BF16),
    ("tiny-gpt2", CHECKPOINTED),
    # Adapters on an fp32 base.
    ("tiny-qwen3", LORA | BF16 | {"micro_batch_size": 4}),  # nothing is carried
    ("tiny-llama", LORA | PACKED),
    ("smollm2-135m", LORA | {"micro_batch_size": 1}),  # the logits weigh most
    ("tiny-llama", LORA | DROPOUT | BF16),
    ("tiny-gemma2", LORA | CHECKPOINTED | {"seq_len": 320}),  # eager: the scores' gradients
    # On a 16-bit base.
    ("tiny-mistral", LORA | DROPOUT | {"dtype": torch.bfloat16}),
    # On a 4-bit base.
    ("tiny-qwen2", QLORA | PACKED | CHECKPOINTED),
    ("tiny-llama", QLORA | DROPOUT | BF16),
]


@pytest.mark.parametrize(("shape", "options"), CASES, ids=str)
def test_peak_of_a_step_is_as_predicted(shape, options):
    options = {"dtype": torch.float32, "seq_len": 160, "rows_per_step": 4} | options
    dtype = options.pop("dtype")
    with PeakMemory() as memory:
        before = memory.current
    run = change(**options)
    rows = make_rows(24, shortest=20, longest=run.seq_len)
    if run.packing:
        short = make_rows(24, shortest=20, longest=run.seq_len // 2)
        rows = pack_sequences(short, length=run.seq_len)

    base = model_of_shape(shape, layers=2, dtype=dtype, device="cpu")
    model, plan = prepare(base, rows, run=run, pad_token_id=0, number=1)
    steps = training_steps(model, rows, run=run, pad_token_id=0)
    next(steps)  # makes the states
    measured = measure(lambda: next(steps), warmup=0, repeats=0).peak_bytes - before
    assert plan.peak == pytest.approx(measured, rel=0.1)


def test_the_first_micro_batch_carries_nothing():
    """Each of the others is predicted as if the whole step were like it."""
    rows = make_rows(6, shortest=10, longest=10)
    run = change(rows_per_step=6, micro_batch_size=2)
    micros = micro_batches(rows, run=run, pad_token_id=0, device="cpu")
    shapes = shapes_of(micros)
    assert [shape.micro_batches for shape in shapes] == [1, 3, 3]
    assert [shape.batch for shape in shapes] == [2, 6, 6]
    assert [shape.tokens for shape in shapes] == [20, 20, 20]
