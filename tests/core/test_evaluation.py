"""What a model does on rows that it did not train on."""

import pytest
import torch

from recipes_lib.core.evaluation import evaluate
from tests.conftest import make_batch


def test_evaluate_is_the_mean_over_tokens(llama):
    """Rows of unequal lengths in batches of unequal size, without a mask: the loss of all targets
    at once, masked.
    """
    batch = make_batch(5)
    rows = []
    for ids, labels, mask in zip(
        batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
    ):
        rows.append(
            {"input_ids": ids[mask.bool()].tolist(), "labels": labels[mask.bool()].tolist()}
        )
    with torch.no_grad():
        expected = llama(**batch).loss.item()
    assert evaluate(llama, rows, pad_token_id=0, batch_size=2) == pytest.approx(expected, rel=1e-5)
    assert llama.training
