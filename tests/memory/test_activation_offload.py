import contextlib
import errno
import functools
import gc
import io
import os
import tempfile
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from recipes_lib.core.measure import PeakMemory, dry_run
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.memory import _host_and_disk_stores
from recipes_lib.memory.activation_offload import (
    offload_activations,
    offloaded_by_hand,
)
from tests.conftest import assert_equal, assert_near, gradients, make_batch

# Not the system's temporary directory, which may be a RAM disk. The file has no name, and nothing
# of it stays.
HERE = os.path.dirname(__file__)
to_disk = functools.partial(offload_activations, to="disk", min_bytes=512, directory=HERE)


def run_plain(model, batch, backwards=1):
    """Loss and gradients; the seed makes dropout repeatable."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return {"loss": loss.detach()} | gradients(model)


def run_offloaded(model, batch, offload=to_disk, backwards=1):
    with offload(model) as handle:
        result = run_plain(model, batch, backwards)
    assert handle.moved_bytes > 0
    return result


def full_rows(batch_size, seq_len):
    ids = torch.randint(0, 128, (batch_size, seq_len))
    return {"input_ids": ids, "labels": ids}


# --- the idea -------------------------------------------------------------------------------------


def test_by_hand_equals_the_real_one(llama, batch, tmp_path):
    plain = run_plain(llama, batch)
    with offloaded_by_hand(tmp_path):
        by_hand = run_plain(llama, batch)
    assert len(list(tmp_path.iterdir())) > 10  # the tensors have been there
    assert_equal(by_hand, plain)
    assert_equal(run_offloaded(llama, batch), by_hand)


# --- the same training ----------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [0, 1])
def test_short_queues(llama, in_flight):
    """A queue of one waits for each transfer; with none, each comes back when it is needed."""
    everything = functools.partial(to_disk, min_bytes=1, in_flight=in_flight)
    batch = full_rows(3, 7)
    assert_equal(run_offloaded(llama, batch, everything), run_plain(llama, batch))


def test_backward_outside_of_the_context_is_refused(llama, batch):
    """What the file held is gone, and values of nowhere would be gradients."""
    with to_disk(llama):
        loss = llama(**batch, use_cache=False).loss
    with pytest.raises(RuntimeError, match="inside the context"):
        loss.backward()


def test_dropout_eager_attention_autocast_and_two_backwards(batch):
    """The second backward of one graph needs again what the first one has brought back."""
    model = model_of_shape("tiny-gpt2", layers=3, device="cpu")
    model.set_attn_implementation("eager")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    assert_equal(run_offloaded(model, batch, backwards=2), run_plain(model, batch, backwards=2))
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(run_offloaded(model, batch), run_plain(model, batch))


def test_16_bit_copies_of_weights_do_not_travel():
    """The mistake: under autocast every weight goes out in 16 bits, and comes back."""
    model = model_of_shape("tiny-gpt2", layers=4, device="cpu")
    row = full_rows(1, 4)  # so few tokens that nearly all would be weights
    copies = 2 * sum(p.numel() for p in decoder_blocks(model)[0].parameters())
    with torch.autocast("cpu", torch.bfloat16):
        plain = run_plain(model, row)
        with to_disk(model) as handle:
            offloaded = run_plain(model, row)
    assert_equal(offloaded, plain)
    assert 0 < handle.moved_bytes < copies


# --- together with checkpoints --------------------------------------------------------------------


def test_under_checkpointing_only_block_inputs_move():
    model = model_of_shape("tiny-llama", layers=16, device="cpu")
    batch = full_rows(8, 64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)  # few gradients: block inputs set the peak
    expected = run_plain(model, batch)
    for block in decoder_blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    with PeakMemory() as checkpointed:
        assert_equal(run_plain(model, batch), expected)
    with PeakMemory() as both:
        assert_equal(run_offloaded(model, batch), expected)
    block_input = 8 * 64 * model.config.hidden_size * 4
    assert both.peak < checkpointed.peak - 8 * block_input
    with to_disk(model) as handle:
        model(**batch, use_cache=False)
    assert handle.moved_bytes == 15 * block_input


# --- tensors that change, forwards that fail ------------------------------------------------------


class InPlace(torch.nn.Module):
    """An activation that modifies in place what autograd will save, has saved, or has dropped."""

    def __init__(self, when):
        super().__init__()
        self.when = when

    def forward(self, x):
        y = x * 2
        if self.when == "before":
            return y.relu_().square()
        if self.when == "after":
            return y.sigmoid().mul_(2)
        self.unused = y.square()
        (x * 3).square()  # has the first value of y written out
        return y.sigmoid_().square()


@pytest.mark.parametrize("when", ["before", "unused"])
def test_modified_in_place_as_autograd_allows(llama, batch, when):
    """One storage has two values here: the second must not come back as the first."""
    decoder_blocks(llama)[0].mlp.act_fn = InPlace(when)
    one_at_a_time = functools.partial(to_disk, in_flight=1)
    assert_equal(run_offloaded(llama, batch, one_at_a_time), run_plain(llama, batch))


def test_modified_in_place_after_it_was_saved(llama, batch):
    """Autograd leaves this check to whoever sets hooks: its own error, and ours."""
    decoder_blocks(llama)[0].mlp.act_fn = InPlace("after")
    for run in (run_plain, run_offloaded):
        with pytest.raises(RuntimeError, match="modified by an in"):
            run(llama, batch)


# --- nothing stays --------------------------------------------------------------------------------


def test_graph_and_file_are_gone(llama, monkeypatch):
    """The file is as large as one step needs, has no name in use, and is closed after an error."""
    files = []
    outputs = []
    make = tempfile.TemporaryFile

    def make_and_keep(**options):
        files.append(make(**options))
        return files[-1]

    def keep_weakly(module, args, output):
        outputs.append(weakref.ref(output.untyped_storage()))

    monkeypatch.setattr(tempfile, "TemporaryFile", make_and_keep)
    decoder_blocks(llama)[0].register_forward_hook(keep_weakly)
    sizes = []
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt), to_disk(llama):
            for _ in range(3):
                llama(**full_rows(4, 32), use_cache=False).loss.backward()
                file = os.fstat(files[0].fileno())
                assert file.st_nlink == 0
                sizes.append(file.st_size)
                assert outputs.pop()() is None  # without the garbage collector
            raise KeyboardInterrupt
    finally:
        gc.enable()
    assert files[0].closed and sizes[0] > 0 and len(set(sizes)) == 1


class FullDisk(io.BytesIO):
    def write(self, view):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_disk_without_room(llama, batch, monkeypatch):
    """The mistake: the error stays in the thread, and training goes on with what is not there."""
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: FullDisk())
    with pytest.raises(OSError, match=r"No space left on device: [\d,]+ bytes in /"):
        run_offloaded(llama, batch)


# --- what is refused ------------------------------------------------------------------------------


def test_what_saves_nothing_is_refused(llama):
    """Activations that are on the host already, and a RAM disk."""
    for place in (contextlib.nullcontext, dry_run):  # a prediction refuses what a step does
        with place(), pytest.raises(ValueError, match="to='disk'"), offload_activations(llama):
            pass
    if os.path.exists("/dev/shm"):
        with pytest.raises(ValueError, match="RAM disk"), to_disk(llama, directory="/dev/shm"):
            pass
    assert not any(block._forward_pre_hooks for block in decoder_blocks(llama))


# --- what it saves --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("to", ["host", "disk"])
@pytest.mark.parametrize("in_flight", [1, 4])
def test_same_loss_and_gradients_for_less_memory_on_gpu(monkeypatch, to, in_flight):
    """Too early back, or its pieces in another order."""
    monkeypatch.setattr(_host_and_disk_stores, "PIECE", 10_000)
    model = model_of_shape("tiny-llama", layers=8, dtype=torch.bfloat16, device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch(64, 256).items()}
    with PeakMemory() as plain:
        expected = run_plain(model, batch)
    offload = functools.partial(to_disk, to=to, in_flight=in_flight)
    for _ in range(3):  # a race would not show every time
        with PeakMemory() as offloaded:
            got = run_offloaded(model, batch, offload)
        assert_near(got, expected, 2e-2)  # kernels with atomics do not repeat to the last bit
        assert offloaded.peak < 0.7 * plain.peak
