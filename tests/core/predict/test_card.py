"""A GPU that is not there, against PyTorch's own allocator.

The numbers of REFERENCE come from PyTorch 2.13's CUDA build over a pretended driver: its allocator
and the code of the host are real there, and no kernel runs. They are a test of the arithmetic of
memory, and no measurement. Each is of the second step in a process of its own, by
`torch.cuda.memory_stats()`: requested, allocated and reserved bytes.
"""

import functools

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import CARDS, Card, predict
from recipes_lib.core.predict import card as card_module
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.optimizer_offload import offload_optimizer

REFERENCE = {
    ("8.9", ""): (939_285_664, 943_114_752, 1_277_165_568),
    ("9.0", "checkpointed"): (973_170_080, 980_163_584, 1_277_165_568),
    ("9.0", "bf16, in backward, checkpointed"): (628_696_864, 631_939_584, 742_391_808),
    ("9.0", "offload"): (649_574_920, 651_807_232, 981_467_136),
    ("8.9", "autocast, checkpointed"): (893_067_424, 897_945_088, 1_117_782_016),
    ("7.5", "autocast"): (998_464_672, 1_007_208_960, 1_189_085_184),
    ("7.5", "bf16"): (646_275_872, 653_909_504, 752_877_568),
}
# By how much a prediction may differ, as shares.
ALLOCATED = 0.005
RESERVED = 0.18  # which holes are left hangs on the order of every single request


def build_of(stack):
    """SmolLM2's shape with four blocks, and a step on 4 rows of 128 tokens."""

    def build():
        ids = torch.zeros(4, 128, dtype=torch.long)
        labels = torch.zeros(4, 128, dtype=torch.long)
        batch = {"input_ids": ids, "labels": labels, "use_cache": False}
        step = functools.partial(step_on, batch)
        dtype = torch.bfloat16 if "bf16" in stack else torch.float32
        model = model_of_shape("smollm2-135m", layers=4, dtype=dtype, device="cpu")
        if "checkpointed" in stack:
            apply_activation_checkpointing(model, check=False)
        if "in backward" in stack:
            return model, apply_optimizer_in_backward(model, lr=1e-5, fused=True), step
        if "offload" in stack:
            return model, offload_optimizer(model, lr=1e-5), step
        return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), step

    def step_on(batch, model, optimizer):
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in stack):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return build


@pytest.mark.parametrize("case", REFERENCE, ids=" ".join)
def test_bytes_are_those_of_pytorchs_allocator(case):
    """The mistakes: another kernel of attention, host tensors on the card, no workspaces."""
    capability, stack = case
    card = Card("pretended", tuple(map(int, capability.split("."))), 2**36)
    requested, allocated, reserved = REFERENCE[case]
    predicted = predict(build_of(stack), card=card)
    with_workspaces = predicted.peak + 2 * card.workspace
    assert with_workspaces == pytest.approx(requested, rel=1e-9)
    assert predicted.allocated == pytest.approx(allocated, rel=ALLOCATED)
    assert predicted.reserved == pytest.approx(reserved, rel=RESERVED)
    if case == ("9.0", "checkpointed"):
        assert predicted.reserved == reserved


def test_the_hosts_memory_is_apart():
    """The mistake: masters and states of an offloaded optimizer counted on the card."""
    predicted = predict(build_of("offload"), card=CARDS["L4"], allocator=False)
    assert predicted.timeline.points[-1].bytes["states"] == 0
    assert predicted.peak == predict(build_of("offload"), card=CARDS["L4"]).peak
    on_a_cpu = "the parameters are in host memory already"
    with pytest.raises(ValueError, match=on_a_cpu):
        predict(build_of("offload"))


def test_flash_attention_has_sums_while_its_backward_runs(monkeypatch):
    """The mistake: long texts are predicted without what the kernel adds up in."""
    heads, shared, tokens, width = 8, 2, 512, 64

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"q": heads, "k": shared, "v": shared}
            for name, of in sizes.items():
                weights = torch.zeros(1, of, tokens, width, dtype=torch.bfloat16)
                setattr(self, name, torch.nn.Parameter(weights))

    def build():
        model = Attention()
        return model, torch.optim.SGD(model.parameters()), step

    def step(model, optimizer):
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(model.q, model.k, model.v, is_causal=True, enable_gqa=True)
        out.sum().backward()

    on = {"card": CARDS["H100"], "allocator": False}
    with_sums = predict(build, **on).peak
    monkeypatch.setattr(card_module, "_with_scratch_memory", lambda *_: None)
    numbers = heads * tokens * width
    assert with_sums - predict(build, **on).peak == (4 + 2 + 2) * numbers
