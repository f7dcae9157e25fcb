"""The README's picture, from a run of this test."""

import pytest
from matplotlib.image import imread

from benchmarks import pictures

MIB = 2**20


@pytest.fixture
def run():
    names = ["baseline", "+ LoRA", "everything combined"]
    peaks = [2720, 973, 363]
    rows = [
        {"name": name, "peak_bytes": peak * MIB, "predicted_bytes": peak * MIB, "seconds": seconds}
        for name, peak, seconds in zip(names, peaks, (3.0, 3.6, 6.0), strict=True)
    ]
    return {"name": "AMD EPYC", "device": "cpu", "cores": 2, "date": "2026-11-22", "rows": rows}


def test_the_picture_says_what_the_run_measured(run):
    """Catches a label that is missing for a row, and the machine and day of another run."""
    figure = pictures.ladder_picture(run)
    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert {"2,720", "973  -64%", "363  -87%", "1×", "1.20×", "2.00×"} <= set(texts)
    assert [label.get_text() for label in axes.get_yticklabels()][1] == "LoRA"
    title, source = [text.get_text() for text in figure.texts]
    assert title.endswith("2,720 → 363 MiB") and "2026-11-22" in source
    assert axes.get_xlim()[0] == 0


def test_both_pages_have_their_picture(tmp_path):
    """Catches a dark variant that is a copy of the light one, and words that are cut off."""
    light, dark = (imread(path) for path in pictures.draw(tmp_path))
    assert light.shape == dark.shape
    assert light[0, 0, :3].mean() > 0.9 and dark[0, 0, :3].mean() < 0.1
    for picture in (light, dark):
        edge = picture[:, -10:, :3]
        assert (edge == picture[0, 0, :3]).all(), "something reaches the edge of the paper"
