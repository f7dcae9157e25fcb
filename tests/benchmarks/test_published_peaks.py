"""Published peaks beside ours: the arithmetic of a row, and that no difference lacks its reason."""

import re
from dataclasses import replace

import pytest

from benchmarks.predictions_page import PAGE
from benchmarks.published_peaks import (
    FP32_ADAPTERS,
    PUBLISHED,
    THREE_B,
    Compared,
    chunked_loss_bytes,
    compare,
    model_without_data,
)
from recipes_lib.core.measure.machine import GIB
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of

ROWS = {row.name: row for row in PUBLISHED}


def test_a_row_by_hand():
    """Weights, two averages and gradients in 16 bits, and the tied embedding's gradient twice."""
    embedding = 128256 * 3072
    attention = 3072 * (3072 + 2 * 1024) + 3072 * 3072
    block = attention + 3 * 3072 * 8192 + 2 * 3072
    parameters = embedding + 28 * block + 3072
    row = compare(ROWS["3B, and checkpoints"])
    expected = 2 * (4 * parameters + 2 * embedding) / GIB
    assert row.predicted == pytest.approx(expected)
    assert row.difference == pytest.approx(expected / 24.9 - 1)
    assert row.reason == ""


def test_the_chunked_loss_by_hand():
    """The mistake: the fp32 logits of our own loss, or no logits between the chunks."""
    model = model_without_data(THREE_B.model)
    shape = Shape(batch=2, seq=4096)
    logits = 2 * 8192 * 128256
    found = chunked_loss_bytes(budget_of(model, shape), model, shape)
    assert found == logits + logits // 8 + 2 * 2 * 128256 * 3072


def test_a_large_difference_without_a_reason_is_an_error():
    row = ROWS["3B, QLoRA"]
    assert Compared(row, predicted=5.5).reason == FP32_ADAPTERS
    with pytest.raises(ValueError, match="no reason"):
        _ = Compared(replace(row, reason=""), predicted=5.5).reason


def test_the_page_has_todays_rows():
    """The mistake: a row that was added or changed, and a page that was not written again."""
    page = PAGE.read_text()
    for row in PUBLISHED:
        pattern = rf"\| {re.escape(row.name)} \| {row.gib:.1f} GiB \| ([\d.]+) GiB \| ([-+][\d.]+)%"
        assert re.search(pattern, page), row.name
