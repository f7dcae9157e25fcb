import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.measure import machine as module
from recipes_lib.core.measure.machine import TIERS, choose_sizes, machine


@pytest.fixture
def fresh(monkeypatch):
    """Describe the machine anew in this test, and again after it."""
    monkeypatch.delenv("RECIPES_TIER", raising=False)
    machine.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    machine.cache_clear()


@pytest.fixture
def gpu_of(fresh):
    """Let torch see a GPU of so many bytes and of this generation."""

    def see(memory, major):
        properties = SimpleNamespace(total_memory=memory, name="GPU", major=major)
        fresh.setattr(torch.cuda, "is_available", lambda: True)
        fresh.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    return see


@pytest.mark.parametrize(
    "memory, major, tier, dtype",
    [
        (15, 7, "gpu16", torch.float16),
        (140, 9, "gpu80", torch.bfloat16),
    ],
)
def test_tiers_of_gpus(fresh, gpu_of, memory, major, tier, dtype):
    """A T4 has 15 GiB and no bf16 instructions, whatever torch.cuda.is_bf16_supported() says."""
    gpu_of(memory * 2**30, major)
    fresh.setattr(module, "_let_segments_grow", lambda: None)
    here = machine()
    assert (here.tier, here.compute_dtype) == (tier, dtype)


@pytest.mark.parametrize("theirs", [None, "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_of_a_gpu_grow(fresh, gpu_of, theirs):
    """The mistake: only `make gpu` asked for it, and in notebooks a fifth of the card was lost.

    What the user has set stays.
    """
    for name in module.ALLOCATOR_VARIABLES:
        fresh.delenv(name, raising=False)
    if theirs is not None:
        fresh.setenv(theirs, "max_split_size_mb:512")
    asked = []
    fresh.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append, raising=False)
    gpu_of(15 * 2**30, 7)
    machine()
    assert asked == ([] if theirs else ["expandable_segments:True"])


def test_a_machine_is_described_whatever_its_driver_and_cudnn_do(monkeypatch):
    """With a card in trouble nvidia-smi hangs, and a foreign cuDNN in the path is an error."""

    def hangs(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    def incompatible():
        raise RuntimeError("cuDNN version incompatibility")

    answer = SimpleNamespace(stdout="570.86.15\n570.86.15\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: answer)
    monkeypatch.setattr(torch.backends.cudnn, "version", incompatible)
    assert module._gpu_versions() == {"driver": "570.86.15", "cudnn": "incompatible"}
    monkeypatch.setattr(subprocess, "run", hangs)
    assert module._gpu_versions() == {"cudnn": "incompatible"}


def test_a_driver_whose_card_torch_does_not_see(fresh, tmp_path):
    """The mistake: a PyTorch for a newer driver, and the whole notebook runs on the CPU."""
    fresh.setattr(torch.cuda, "is_available", lambda: False)
    fresh.setattr(module, "NVIDIA_DRIVER", tmp_path)
    fresh.setattr(torch.version, "cuda", "13.0")
    with pytest.warns(UserWarning, match=r"sees no GPU.*CUDA 13\.0"):
        assert machine().tier == "cpu"


SIZES = {tier: {"batch": number, "tokens": 1024} for number, tier in enumerate(["fast", *TIERS])}


def test_sizes_follow_fast_and_the_tier(monkeypatch):
    """The mistake: FAST on a machine with a GPU takes the GPU's sizes, and CI runs for hours."""
    monkeypatch.setenv("RECIPES_FAST", "1")
    assert choose_sizes(**SIZES).batch == 0
    monkeypatch.setenv("RECIPES_FAST", "0")
    for number, tier in enumerate(TIERS, 1):
        here = replace(machine(), tier=tier)
        monkeypatch.setattr(module, "machine", lambda here=here: here)
        sizes = choose_sizes(**SIZES)
        assert sizes.batch == number
        assert str(sizes).splitlines() == [f"tier    {tier}", f"batch   {number}", "tokens  1,024"]


def test_a_gpu_that_is_too_small_says_so(monkeypatch):
    """The mistake: a card of 8 GB takes the sizes of a T4, and runs out in the first row."""
    monkeypatch.setenv("RECIPES_FAST", "0")
    monkeypatch.delenv("RECIPES_TIER", raising=False)
    t4 = replace(machine(), device="cuda", memory_bytes=15_642_329_088, tier="gpu16")
    monkeypatch.setattr(module, "machine", lambda: t4)
    assert choose_sizes(**SIZES).tier == "gpu16"
    small = replace(t4, name="RTX 4060", memory_bytes=8 * 2**30)
    monkeypatch.setattr(module, "machine", lambda: small)
    with pytest.raises(ValueError, match=r"RTX 4060 has 8\.0 GiB.*RECIPES_TIER=cpu"):
        choose_sizes(**SIZES)
