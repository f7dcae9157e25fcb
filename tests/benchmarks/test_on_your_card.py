"""The sizes of every notebook fit the cards that they are for. Arithmetic, without a card."""

import re

import pytest
import torch

from benchmarks import gpu, long_steps, on_your_card
from benchmarks.on_your_card import CARDS, USABLE, needs
from benchmarks.sizes import TIER_SIZES
from recipes_lib.core.measure.machine import GIB, Sizes
from recipes_lib.core.model import model_of_shape
from recipes_lib.training.curriculum import flops_per_token

NOTEBOOK_01 = on_your_card.ROOT / "notebooks/source/01_large_models_limited_hardware.py"


@pytest.mark.parametrize("tier", CARDS)
def test_every_notebook_fits_its_card(tier):
    """The mistake: sizes that nobody could try, with no room for context and fragments."""
    _, gib = CARDS[tier]
    for need in needs(tier):
        assert 0.1 < need.gib < USABLE * gib, need


def test_the_page_is_that_of_today():
    """The mistake: sizes change, and the page promises the old ones."""
    assert on_your_card.PAGE.read_text(encoding="utf-8") == on_your_card.page(), (
        "run `python -m benchmarks.on_your_card`"
    )


@pytest.mark.parametrize("tier", CARDS)
def test_full_fine_tuning_of_make_gpu_fits_its_card(tier):
    """The mistake: on a T4 mixed precision needs more than plain fp32, for attention has scores."""
    full = TIER_SIZES[tier]["full"]
    sizes = Sizes(
        tier=tier,
        shape=full["shape"],
        layers=full["layers"],
        rows=full["batch_size"],
        tokens=full["seq_len"],
    )
    _, gib = on_your_card.training_step(sizes)
    assert gib < USABLE * CARDS[tier][1]


@pytest.mark.parametrize("tier", CARDS)
def test_the_limits_of_make_gpu_are_below_the_card(tier):
    """The mistake: a part that is capped above what its card has runs out in the last minute."""
    _, gib = CARDS[tier]
    for part in ("ablation", "context"):
        assert TIER_SIZES[tier][part]["cap"] < 0.98 * gib * GIB


# Of each card: its tier, its GiB, and the operations per second of dense products in NVIDIA's data
# sheet, in the dtype that a part trains in.
RATES = {
    "T4": ("gpu16", 14.6, torch.float32, 8.1e12),
    "L4": ("gpu24", 22.0, torch.bfloat16, 121e12),
    "H100": ("gpu80", 79.1, torch.bfloat16, 989e12),
    "H200": ("gpu80", 139.8, torch.bfloat16, 989e12),
}


@pytest.mark.parametrize("card", RATES)
def test_the_longest_steps_of_make_gpu_end_in_their_minutes(card):
    """The mistake: a step that computes for so long that its process is killed before it ends.

    At half of the card's rate. Forward runs three times, because blocks and groups of blocks (or of
    heads) are computed again: that is 5 / 3 of the operations of a plain step.
    """
    tier, gib, dtype, rate = RATES[card]
    longest = TIER_SIZES[tier]["longest"]
    context = TIER_SIZES[tier]["context"]
    of_longest = model_of_shape(
        longest["shape"], layers=longest["layers"], device="meta", dtype=dtype
    )
    of_context = model_of_shape(
        context["shape"], layers=context["layers"], device="meta", dtype=dtype
    )
    fits = long_steps.predicted_to_fit(of_longest, int(gib * GIB))
    steps = {
        "longest": (of_longest, min(longest["seq_len"], fits)),
        "context": (of_context, context["most"]),
    }
    for part, (model, tokens) in steps.items():
        operations = 5 / 3 * tokens * flops_per_token(model, seq_len=tokens)
        assert operations / (rate / 2) < gpu.SECONDS[part], part


class Asked(Exception):
    """The model that a cell wants."""


def asks_for(*model):
    def ask(*_):
        raise Asked(*model)

    return ask


def weights(shape, layers):
    return model_of_shape(shape, layers=layers, device="meta").num_parameters()


@pytest.mark.parametrize("tier", CARDS)
def test_the_check_of_gradients_fits_beside_the_baseline(tier):
    """The mistake: five sets of gradients of a model that fills the card, while another waits.

    There are the weights, two sets of gradients, both as vectors, and their difference.
    """
    sizes = on_your_card.sizes_of("01")[tier]
    source = NOTEBOOK_01.read_text(encoding="utf-8")
    (cell,) = re.findall(
        r"^def error_of_the_popular_way\(\):\n(?:    .*\n|\n)+", source, flags=re.M
    )
    names = {
        "fresh": asks_for(sizes.shape, sizes.layers),
        "load_model": asks_for("smollm2-135m", None),
        "sizes": sizes,
    }
    exec(cell, names)
    with pytest.raises(Asked) as asked:
        names["error_of_the_popular_way"]()
    checked = 6 * 4 * weights(*asked.value.args)
    waiting = 3 * 4 * weights(sizes.shape, sizes.layers)
    _, gib = CARDS[tier]
    assert waiting + checked < USABLE * gib * GIB
