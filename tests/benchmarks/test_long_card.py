"""The page about 262,144 tokens on a card of 24 GB."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.long_card import step_of
from benchmarks.long_steps import qlora_build
from recipes_lib.core.predict import predict

SMALL = {"tokens": 512, "in_groups": False, "in_flight": 1}


def test_a_few_blocks_say_what_many_need():
    """The mistake: so few blocks that none waits for the host while backward is in another."""
    build = partial(qlora_build, "tiny-llama", tile=512, dtype=torch.bfloat16, device="cpu")
    whole = predict(build(layers=7, **SMALL)).peak
    assert abs(step_of(shape="tiny-llama", **SMALL).peak(layers=7) / whole - 1) < 1e-3
