import pytest
import torch

from recipes_lib.core.machine import machine
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.fine_tuning.lora import estimate_lora
from recipes_lib.fine_tuning.qlora import nf4_bytes
from recipes_lib.memory.activation_checkpointing import estimate_activation_checkpointing
from recipes_lib.precision.eight_bit_adam import estimate_eight_bit_adam
from recipes_lib.training.gradient_accumulation import estimate_gradient_accumulation
from recipes_lib.workflows.out_of_memory_doctor import (
    RECIPES,
    diagnose,
    estimate_remedies,
    parse_error,
)
from tests.conftest import FAMILIES

MIB, GIB = 2**20, 2**30

TORCH_1 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.93 GiB (GPU 0; 23.80 GiB total capacity; 12.04 GiB "
    "already allocated; 2.82 GiB free; 19.69 GiB reserved in total by PyTorch) If reserved memory is >> allocated "
    "memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management"
)
TORCH_2_0 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of "
    "6.00 GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is "
    "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting max_split_size_mb"
)
TORCH_2_6 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 142.00 MiB. GPU 0 has a total capacity of "
    "47.27 GiB of which 9.38 MiB is free. Process 2925282 has 29.04 GiB memory in use. Process 3120922 has 14.74 GiB "
    "memory in use. Including non-PyTorch memory, this process has 3.14 GiB memory in use. Of the allocated memory "
    "2.92 GiB is allocated by PyTorch, and 34.62 MiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
GRAPHS_AND_CAP = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 80.00 GiB of which 60.00 GiB is "
    "free. Including non-PyTorch memory, this process has 19.90 GiB memory in use. 20.00 GiB allowed; Of the "
    "allocated memory 19.00 GiB is allocated by PyTorch, with 30.00 MiB allocated in private pools (e.g., CUDA "
    "Graphs), and 240.00 MiB is reserved by PyTorch but unallocated."
)
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 17.50 GiB, other allocations: 384.00 KiB, max allowed: "
    "18.13 GiB). Tried to allocate 1.00 GiB on private pool."
)
CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 116813856768 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            TORCH_1,
            {
                "requested": 2.93,
                "capacity": 23.8,
                "allocated": 12.04,
                "free": 2.82,
                "unallocated": 7.65,
            },
        ),
        (
            TORCH_2_0,
            {
                "requested": 1.7,
                "capacity": 6,
                "free": 0,
                "allocated": 2.93,
                "unallocated": 2.3,
                "others": 0,
            },
        ),
        (
            TORCH_2_6,
            {
                "requested": 142 / 1024,
                "capacity": 47.27,
                "unallocated": 34.62 / 1024,
                "others": 44.12,
            },
        ),
        (
            GRAPHS_AND_CAP,
            {
                "requested": 1.5,
                "allowed": 20,
                "allocated": 19,
                "unallocated": 240 / 1024,
                "others": 0,
            },
        ),
        (MPS, {"requested": 1, "capacity": 18.13, "allocated": 17.5}),
        (CPU, {"requested": 116813856768 / GIB}),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", {}),
        ("CUDA error: out of memory", {}),
    ],
)
def test_reads_the_messages_of_many_versions(error, expected):
    numbers = parse_error(error)
    for name, gib in expected.items():
        assert numbers[name] == pytest.approx(gib * GIB, rel=1e-3, abs=0.01 * GIB), name
    assert diagnose(error=error).remedies


def test_reads_the_emulated_error():
    with pytest.raises(torch.OutOfMemoryError) as error, PeakMemory(limit_bytes=MIB):
        torch.zeros(10 * MIB)
    numbers = parse_error(str(error.value))
    assert numbers["capacity"] == MIB and numbers["allocated"] >= 40 * MIB


def names(diagnosis):
    return [remedy.name for remedy in diagnosis.remedies]


def test_names_the_causes_that_no_recipe_cures():
    fragmented = diagnose(error=TORCH_1).remedies[0]
    assert (
        fragmented.where.endswith("expandable_segments:True")
        and "7.7 GiB in pieces" in fragmented.saves
    )
    assert names(diagnose(error=TORCH_2_0))[0] == "memory in one piece"
    assert names(diagnose(error=TORCH_2_6))[0] == "stop other processes"
    for error in (TORCH_2_6, GRAPHS_AND_CAP, MPS, CPU):
        assert "memory in one piece" not in names(diagnose(error=error))
    for error in (GRAPHS_AND_CAP, MPS, CPU):
        assert names(diagnose(error=error)) == list(RECIPES)


@pytest.fixture(scope="module")
def eight_b():
    return model_of_shape("llama-3.1-8b", device="meta")


def test_an_8b_model_in_24_gib(eight_b):
    """Nothing is allocated; only adapters on a 16-bit base fit, by QLoRA with room to spare."""
    diagnosis = diagnose(model=eight_b, batch_size=8, seq_len=2048, memory_bytes=24 * GIB)
    expected = ["as it is", "8 micro-batches of 1", *list(RECIPES)[1:]]
    assert names(diagnosis) == expected
    assert diagnosis.first_fit.name == "LoRA, 16-bit base"
    peaks = [remedy.peak for remedy in diagnosis.remedies]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] == budget_of(eight_b, batch_size=8, seq_len=2048).peak
    assert 4 * GIB < peaks[-1] < 8 * GIB


@pytest.mark.parametrize(
    ("gib", "first"),
    [
        (500, "as it is"),
        (200, "4 micro-batches of 2"),
        (160, "8 micro-batches of 1"),
        (140, "checkpointing"),
        (90, "8-bit AdamW"),
        (48, "optimizer offload"),
        (24, "LoRA, 16-bit base"),
        (12, "QLoRA"),
        (6, None),
    ],
)
def test_the_first_fit_follows_the_memory(eight_b, gib, first):
    diagnosis = diagnose(model=eight_b, batch_size=8, seq_len=2048, memory_bytes=gib * GIB)
    assert (diagnosis.first_fit and diagnosis.first_fit.name) == first
    assert f"First that fits: {first or 'none'}" in str(diagnosis)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_device(family):
    diagnosis = diagnose(
        model=model_of_shape(family, device="cpu"), batch_size=6, seq_len=64, memory_bytes=MIB
    )
    assert names(diagnosis)[:2] == ["as it is", "6 micro-batches of 1"]
    assert "optimizer offload" not in names(diagnosis)  # a CPU has nowhere to move them to
    peaks = [remedy.peak for remedy in diagnosis.remedies]
    assert peaks == sorted(peaks, reverse=True)


def test_agrees_with_the_estimates_of_the_recipes():
    """The doctor imports no recipe: here its arithmetic meets theirs."""
    model, sizes = model_of_shape("smollm2-135m", device="meta"), {"batch_size": 8, "seq_len": 512}
    plan = budget_of(model, **sizes)
    remedies = estimate_remedies(plan, model, **sizes, memory_bytes=1)
    peak = {remedy.where.rpartition("/")[2]: remedy.peak for remedy in remedies}
    split = estimate_gradient_accumulation(plan, model, **sizes, micro_batches=8)
    assert peak["gradient_accumulation.py"] == split.peak
    sizes = {"batch_size": 1, "seq_len": 2048}
    plan = budget_of(model, **sizes).change(loss=0)  # compare one at a time
    alone = estimate_remedies(plan, model, **sizes, memory_bytes=1)
    peak = {remedy.where.rpartition("/")[2]: remedy.peak for remedy in alone}
    plan = estimate_activation_checkpointing(plan, model, **sizes)
    assert peak["activation_checkpointing.py"] == pytest.approx(plan.peak, rel=0.05)
    plan = estimate_eight_bit_adam(plan, model)
    assert peak["eight_bit_adam.py"] == pytest.approx(plan.peak, rel=0.05)
    base = model_of_shape("smollm2-135m", dtype=torch.bfloat16, device="meta")
    lora = estimate_lora(budget_of(base, **sizes).change(loss=0), base, **sizes)
    assert peak["lora.py"] == pytest.approx(
        estimate_activation_checkpointing(lora, base, **sizes).peak, rel=0.1
    )
    frozen = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    assert peak["lora.py"] - peak["qlora.py"] == pytest.approx(
        2 * frozen - nf4_bytes(model), rel=0.01
    )


def test_a_model_with_adapters_gets_no_second_ones():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        model_of_shape("tiny-llama", device="cpu"), peft.LoraConfig(target_modules="all-linear")
    )
    model.requires_grad_(False)
    found = names(diagnose(model=model, batch_size=1, seq_len=64, memory_bytes=MIB))
    assert "LoRA, 16-bit base" not in found and "QLoRA" in found


def test_error_and_model_together(eight_b):
    """Memory is what the error leaves to this process; a model that should fit points at a leak."""
    together = diagnose(error=TORCH_2_6, model=eight_b, batch_size=1, seq_len=512)
    assert names(together)[:2] == ["stop other processes", "as it is"]
    assert "of 3.1 GiB" in together.findings[1] and together.first_fit is None
    tiny = model_of_shape("tiny-llama", device="meta")
    assert "loss.item()" in str(diagnose(error=TORCH_2_0, model=tiny, batch_size=1, seq_len=8))
    assert "loss.item()" not in str(diagnose(model=tiny, batch_size=1, seq_len=8))
    assert (
        "of 20.0 GiB"
        in diagnose(error=GRAPHS_AND_CAP, model=tiny, batch_size=1, seq_len=8).findings[1]
    )
    here = machine().memory_bytes / GIB
    assert f"of {here:,.1f} GiB" in diagnose(model=tiny, batch_size=1, seq_len=8).findings[0]


def test_a_wrapped_message_reads_the_same():
    wrapped = TORCH_1.replace(" ", "\n", 20)
    assert repr(diagnose(error=wrapped)) == str(diagnose(error=TORCH_1))


def test_shows_itself_as_text_and_table(eight_b):
    diagnosis = diagnose(
        error=TORCH_1, model=eight_b, batch_size=8, seq_len=2048, memory_bytes=24 * GIB
    )
    text, page = str(diagnosis), diagnosis._repr_html_()
    assert "weights 29.9 GiB → 15.1 GiB" in text and diagnosis.remedies[-1].outcome in text
    assert page.count("<tr>") == len(diagnosis.table()) == 10
    assert "fine_tuning/qlora.py" in text and "fine_tuning/qlora.py" in page


def test_bad_input(llama):
    with pytest.raises(ValueError, match="nothing to diagnose"):
        diagnose()
    with pytest.raises(ValueError, match="both must be 1 or more"):
        diagnose(model=llama)
    with pytest.raises(ValueError, match="not an out-of-memory error"):
        diagnose(error="RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)")
