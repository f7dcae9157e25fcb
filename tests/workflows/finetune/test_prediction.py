"""The predicted peak of a fine-tuning step is the measured one, whatever the settings."""

import pytest
import torch

from recipes_lib.core.measure import bytes_alive, measure
from recipes_lib.core.model import model_of_shape
from recipes_lib.fine_tuning.qlora import quantize_nf4
from recipes_lib.training.sequence_packing import pack_sequences
from recipes_lib.workflows.finetune.loop import prepare, training_steps
from tests.workflows.finetune.shared import change, make_rows

PACKED = {"packing": True, "micro_batch_size": 1}
LORA = {"method": "lora"}
QLORA = {"method": "qlora"}
CASES = [
    ("tiny-qwen3", {"optimizer": "adamw_bnb_8bit", "seq_len": 32}),  # the states weigh most
    ("tiny-gpt2", {"gradient_checkpointing": True}),
    ("tiny-llama", LORA | PACKED),  # documents, which a mask keeps apart
    ("tiny-llama", LORA | {"dtype": torch.float16, "precision": "fp16"}),  # scaled gradients
    ("tiny-gemma2", LORA | {"dropout": 0.1, "precision": "bf16", "rows_per_step": 6}),
    ("tiny-qwen2", QLORA | PACKED | {"gradient_checkpointing": True}),
]


def predicted_and_measured(base, rows, run, *, before):
    model, predicted = prepare(base, rows, run=run, pad_token_id=0, number=1)
    steps = training_steps(model, rows, run=run, pad_token_id=0)
    next(steps)  # makes the states
    measured = measure(lambda: next(steps), warmup=0, repeats=0).peak_bytes - before
    return predicted.peak, measured


@pytest.mark.parametrize(("shape", "options"), CASES, ids=str)
def test_peak_of_a_step_is_as_predicted(shape, options):
    """The mistake: other rows than those of the step, or a largest micro-batch that is not."""
    options = {"dtype": torch.float32, "seq_len": 160, "rows_per_step": 4} | options
    dtype = options.pop("dtype")
    before = bytes_alive()
    run = change(**options)
    rows = make_rows(24, shortest=20, longest=run.seq_len)
    if run.packing:
        short = make_rows(24, shortest=20, longest=run.seq_len // 2)
        rows = pack_sequences(short, length=run.seq_len)
    base = model_of_shape(shape, layers=2, dtype=dtype, device="cpu")
    predicted, measured = predicted_and_measured(base, rows, run, before=before)
    assert predicted == pytest.approx(measured, rel=0.0005)


def test_a_base_that_was_quantized_before():
    """The mistake: its weights come into the dry run as those of 16 bits, or not at all."""
    before = bytes_alive()
    base = quantize_nf4(model_of_shape("tiny-llama", layers=2, device="cpu"))
    run = change(**QLORA, seq_len=160)
    rows = make_rows(24, shortest=20, longest=160)
    predicted, measured = predicted_and_measured(base, rows, run, before=before)
    assert predicted == pytest.approx(measured, rel=0.005)
