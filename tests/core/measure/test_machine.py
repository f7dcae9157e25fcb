import subprocess
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.measure import machine as machine_file
from recipes_lib.core.measure import machine as module
from recipes_lib.core.measure.machine import (
    TIERS,
    choose_sizes,
    fast,
    free_memory_bytes,
    machine,
    provenance,
    release_memory,
    runs_dir,
    seed_everything,
)


@pytest.fixture
def fresh(monkeypatch):
    """Describe the machine anew in this test, and again after it."""
    machine.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    machine.cache_clear()


def test_describes_this_machine():
    here = machine()
    assert here.tier in TIERS and here.cores >= 1 and here.memory_bytes > 2**30
    assert here.name in str(here) and torch.__version__ in str(here)
    assert here.compute_dtype == (torch.bfloat16 if here.native_bf16 else torch.float32)


def test_unknown_tier(fresh):
    fresh.setenv("RECIPES_TIER", "tpu")
    with pytest.raises(ValueError, match="choose one of cpu, gpu16"):
        machine()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error is for machines without a GPU")
def test_gpu_tier_without_gpu(fresh):
    fresh.setenv("RECIPES_TIER", "gpu24")
    with pytest.raises(ValueError, match="torch sees none"):
        machine()


@pytest.mark.parametrize(
    "memory, major, tier, dtype",
    [
        (16, 7, "gpu16", torch.float16),
        (24, 8, "gpu24", torch.bfloat16),
        (141, 9, "gpu80", torch.bfloat16),
    ],
)
def test_tiers_of_gpus(fresh, memory, major, tier, dtype):
    """A T4 has 15 GiB and no bf16 instructions, whatever torch.cuda.is_bf16_supported() says."""
    properties = type(
        "Properties", (), {"total_memory": (memory - 1) * 2**30, "name": "GPU", "major": major}
    )
    fresh.delenv("RECIPES_TIER", raising=False)
    fresh.setattr(torch.cuda, "is_available", lambda: True)
    fresh.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    fresh.setattr(module, "_let_segments_grow", lambda: None)
    here = machine()
    assert (here.tier, here.compute_dtype) == (tier, dtype)


@pytest.mark.parametrize("theirs", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_of_a_gpu_grow(fresh, theirs):
    """The mistake: only `make gpu` asked for it, and in notebooks a fifth of the card was lost.

    What the user has set stays.
    """
    for name in module.ALLOCATOR_VARIABLES:
        fresh.delenv(name, raising=False)
    if theirs is not None:
        fresh.setenv(theirs, "max_split_size_mb:512")
    asked = []
    fresh.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append, raising=False)
    properties = SimpleNamespace(total_memory=15 * 2**30, name="GPU", major=7)
    fresh.delenv("RECIPES_TIER", raising=False)
    fresh.setattr(torch.cuda, "is_available", lambda: True)
    fresh.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    machine()
    assert asked == ([] if theirs else ["expandable_segments:True"])


def test_results_of_a_gpu_carry_driver_and_cudnn(fresh):
    """Without the tool that knows the driver, the rest of the facts is still there."""
    fresh.setattr(torch.backends.cudnn, "version", lambda: 91002)
    answer = subprocess.CompletedProcess([], 0, stdout="570.86.15\n570.86.15\n")
    fresh.setattr(subprocess, "run", lambda *args, **options: answer)
    assert module._gpu_versions() == {"driver": "570.86.15", "cudnn": "91002"}

    def missing(*args, **options):
        raise OSError

    fresh.setattr(subprocess, "run", missing)
    assert module._gpu_versions() == {"cudnn": "91002"}


def test_a_driver_that_does_not_answer_is_left_out(monkeypatch):
    """With a card in trouble nvidia-smi hangs, and so would every notebook."""

    def hangs(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert "driver" not in module._gpu_versions()


def test_fast(monkeypatch):
    monkeypatch.setenv("RECIPES_FAST", "0")
    assert not fast()
    monkeypatch.setenv("RECIPES_FAST", "1")
    assert fast()


def test_seed_everything():
    seed_everything(1)
    first = torch.rand(3)
    seed_everything(1)
    assert torch.equal(first, torch.rand(3))


def test_provenance_names_machine_versions_date_commit():
    facts = provenance()
    assert {"name", "versions", "date", "commit", "tier", "fast"} <= facts.keys()


def test_runs_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path / "mine"))
    assert runs_dir() == tmp_path / "mine" and runs_dir().is_dir()


def test_commit_is_none_outside_git(monkeypatch):
    def missing(*args, **kwargs):
        raise OSError

    monkeypatch.setattr(subprocess, "run", missing)
    assert module._commit() is None


def test_import_does_not_start_cuda():
    code = "import recipes_lib.core.measure.machine, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


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
    small = replace(machine(), device="cuda", name="RTX 4060", memory_bytes=8 * 2**30, tier="gpu16")
    monkeypatch.setattr(module, "machine", lambda: small)
    with pytest.raises(ValueError, match=r"RTX 4060 has 8\.0 GiB.*RECIPES_TIER=cpu"):
        choose_sizes(**SIZES)
    monkeypatch.setenv("RECIPES_TIER", "gpu16")
    assert choose_sizes(**SIZES).tier == "gpu16"
    t4 = replace(small, memory_bytes=15_642_329_088)
    monkeypatch.delenv("RECIPES_TIER")
    monkeypatch.setattr(module, "machine", lambda: t4)
    assert choose_sizes(**SIZES).tier == "gpu16"


def test_a_driver_whose_card_torch_does_not_see(fresh, tmp_path):
    """The mistake: a PyTorch for a newer driver, and the whole notebook runs on the CPU."""
    fresh.delenv("RECIPES_TIER", raising=False)
    fresh.setattr(torch.cuda, "is_available", lambda: False)
    fresh.setattr(module, "NVIDIA_DRIVER", tmp_path)
    fresh.setattr(torch.version, "cuda", "13.0")
    with pytest.warns(UserWarning, match=r"sees no GPU.*CUDA 13\.0"):
        assert machine().tier == "cpu"


def test_every_tier_names_the_same_sizes():
    """The mistake: a notebook that nobody runs on a T4 lacks a size there."""
    with pytest.raises(ValueError, match="gpu16 and cpu do not both have batch"):
        choose_sizes(**SIZES | {"gpu16": {"tokens": 1}})


def test_free_memory_is_a_part_of_all():
    """The mistake: all memory taken for free. Models that are kept together then swap, or fail."""
    assert 0 < free_memory_bytes() < machine().memory_bytes


@pytest.mark.gpu
def test_memory_of_freed_tensors_is_free_on_gpu():
    """PyTorch keeps it. The mistake: a ladder sees no room for models, and builds them anew."""
    before = free_memory_bytes()
    tensor = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    assert before - free_memory_bytes() >= 2**28
    del tensor
    assert free_memory_bytes() == pytest.approx(before, abs=2**22)


VERSION_2 = {"memory.max": "3000", "memory.current": "2500", "memory.stat": "inactive_file 100"}
VERSION_1 = {
    "memory/memory.limit_in_bytes": "3000",
    "memory/memory.usage_in_bytes": "2500",
    "memory/memory.stat": "cache 7\ntotal_inactive_file 100",
}
NO_LIMIT = [{}, VERSION_2 | {"memory.max": "max"}]
NO_LIMIT += [VERSION_1 | {"memory/memory.limit_in_bytes": "9223372036854771712"}]


class Cycle:
    def __init__(self):
        self.me = self


def test_between_two_models_memory_goes_back(monkeypatch):
    """The mistake: the next model is built in gaps of the last one, beside its reference cycle."""
    given_back = []
    monkeypatch.setattr(module, "machine", lambda: SimpleNamespace(device="cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append("device"))

    def give_back_on_host():  # PyTorch for CPUs does not have it
        given_back.append("host")

    monkeypatch.setattr(torch._C, "_host_emptyCache", give_back_on_host, raising=False)
    dead = weakref.ref(Cycle())
    release_memory()
    assert dead() is None
    assert given_back == ["device", "host"]


@pytest.mark.gpu
@pytest.mark.parametrize("turn", ["leaves a gap", "finds none"])
def test_every_test_on_a_gpu_begins_without_gaps(turn):
    """The mistake: in one process of `pytest -m gpu` the peaks of later tests are too high."""
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 32 * 2**20
    torch.zeros(2**28, device="cuda")


def in_a_container(monkeypatch, folder, files):
    (folder / "memory").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    monkeypatch.setattr(module, "CGROUP", folder)


@pytest.mark.parametrize("files", [VERSION_2, VERSION_1])
def test_a_containers_limit_counts(monkeypatch, tmp_path, files):
    """The mistake: what the host has free. The container is killed before it has used that."""
    in_a_container(monkeypatch, tmp_path, files)
    assert free_memory_bytes() == 3000 - 2500 + 100


@pytest.mark.parametrize("files", NO_LIMIT)
def test_without_a_limit_the_system_says_what_is_free(monkeypatch, tmp_path, files):
    in_a_container(monkeypatch, tmp_path, files)
    assert free_memory_bytes() > 2**20


def test_a_foreign_cudnn_is_reported_and_stops_nothing(monkeypatch):
    """The mistake: a system library in the path, and not even the machine can be described."""

    def incompatible():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", incompatible)
    assert machine_file._gpu_versions()["cudnn"] == "incompatible"
