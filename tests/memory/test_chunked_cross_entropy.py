"""The same loss and gradients, with the logits of a chunk."""

import copy
import functools
import gc
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import chunked_loss, model_of_shape
from recipes_lib.core.model.mixins import take_out
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.memory import chunked_cross_entropy as module
from recipes_lib.memory.chunked_cross_entropy import (
    LossFromHidden,
    apply_chunked_cross_entropy,
    chunked_cross_entropy,
)
from tests.conftest import assert_same_gradients, distance, gradients
from tests.small_models import small_model, train_a_little


def make_tensors(tokens=(3, 37), width=24, vocab=101, dtype=torch.float32, device="cpu"):
    """hidden [..., D], weight [V, D], bias [V], all trained, and labels [...], a third ignored."""
    tensors = [torch.randn(*tokens, width), torch.randn(vocab, width), torch.randn(vocab)]
    labels = torch.randint(0, vocab, tokens)
    labels[torch.rand(tokens) < 1 / 3] = -100
    trained = [tensor.to(device, dtype).requires_grad_() for tensor in tensors]
    return *trained, labels.to(device)


def reference(
    hidden, weight, labels, *, bias=None, softcap=None, ignore_index=-100, num_items=None
):
    """All logits at once, by torch."""
    logits = linear(hidden, weight, bias).flatten(0, -2)  # [T, V]
    labels = labels.flatten()  # [T]
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    total = cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    if num_items is None:
        num_items = (labels != ignore_index).sum()
    return total / num_items


def with_gradients(loss, tensors, factor=0.7):
    """A factor other than 1 shows whether the incoming gradient is used."""
    return [loss.detach(), *torch.autograd.grad(loss * factor, tensors)]


class Account(TorchDispatchMode):
    """Inside it: the most rows that a tensor of 128 columns has.

    128 is the vocabulary of the small models; no other tensor there is as wide.
    """

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[-1] == 128:
                self.rows = max(self.rows, leaf.numel() // 128)
        return out


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "chunk_size"),
    [({}, 7), ({"softcap": 3.0, "num_items": 77, "ignore_index": 3}, 1)],
)
def test_equals_the_plain_loss(monkeypatch, options, chunk_size):
    """In fp64: a wrong derivative."""
    # Several blocks in a chunk, the last one smaller.
    monkeypatch.setattr(module, "LOGITS_OF_A_BLOCK", 3 * 101)
    hidden, weight, bias, labels = make_tensors(dtype=torch.float64)
    if "ignore_index" in options:
        labels = labels.where(labels != -100, options["ignore_index"])
    tensors = [hidden, weight, bias]
    expected = with_gradients(reference(hidden, weight, labels, bias=bias, **options), tensors)
    loss = chunked_cross_entropy(
        hidden, weight, labels, bias=bias, chunk_size=chunk_size, **options
    )
    assert loss.dtype == torch.float64
    for got, want in zip(with_gradients(loss, tensors), expected):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("dtype", "chunk_size", "native"),
    [
        (torch.bfloat16, 4, True),  # 256 chunks: a sum in bf16 would be off
        (torch.bfloat16, 128, True),  # 8 chunks, summed in bf16
        (torch.float16, 128, False),  # the products of a CPU without units for it are in fp32
    ],
)
def test_16_bit_value_and_gradients_are_right(monkeypatch, device, dtype, chunk_size, native):
    """As near to fp64 as 16-bit products are, whether the CPU has units for them or not."""
    machine = SimpleNamespace(native_bf16=native)
    monkeypatch.setattr(chunked_loss, "machine", lambda: machine)
    hidden, weight, _, labels = make_tensors((1024,), 64, 256, dtype, device)
    weight = (weight.detach() / 8).requires_grad_()  # logits of size one
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = with_gradients(reference(*exact, labels), exact)
    plain = with_gradients(cross_entropy(linear(hidden, weight).float(), labels), [hidden, weight])
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_size=chunk_size)
    got = with_gradients(loss, [hidden, weight])
    assert loss.dtype == torch.float32
    assert [gradient.dtype for gradient in got[1:]] == [dtype] * 2
    assert distance(got[0], expected[0]) < 1e-4
    assert distance(got[1], expected[1]) < 1.5 * distance(plain[1], expected[1])
    slope = (got[1].double() * expected[1]).sum() / expected[1].square().sum()
    # A factor that is rounded to 16 bits would show here.
    assert slope.item() == pytest.approx(1, abs=5e-4)
    tolerance = 1.5
    if chunk_size == 128:
        tolerance = 2.5  # eight sums that round
    assert distance(got[2], expected[2]) < tolerance * distance(plain[2], expected[2])


def test_sum_of_micro_batches_is_the_whole_batch():
    """Dividing each micro-batch by its own targets is the bug."""
    hidden, weight, bias, labels = make_tensors((4, 50))
    tensors = [hidden, weight, bias]
    items = (labels != -100).sum()
    labels[1] = -100  # a micro-batch without a target adds nothing
    labels[0, :40] = -100
    loss_of = functools.partial(chunked_cross_entropy, bias=bias, num_items=items)
    expected = with_gradients(loss_of(hidden, weight, labels), tensors)
    parts = [with_gradients(loss_of(hidden[i], weight, labels[i]), tensors) for i in range(4)]
    for got, want in zip(map(sum, zip(*parts)), expected):
        torch.testing.assert_close(got, want)


def test_backward_runs_once():
    """The second one would multiply the gradients by its factor once more."""
    hidden, weight, _, labels = make_tensors()
    loss = chunked_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()


def test_memory_is_a_chunk_and_the_gradients_of_what_trains():
    """Logits of the chunk before, or a gradient that nobody asked for."""
    hidden, weight, _, labels = make_tensors((2048,), 32, 4096)

    def extra(loss_of, frozen=None):
        for tensor in (hidden, weight):
            tensor.requires_grad_(tensor is not frozen).grad = None
        gc.collect()
        with PeakMemory() as memory:
            before = memory.current
            loss_of().backward()
        return memory.peak - before

    logits = 4 * 2048 * 4096
    of_hidden = 4 * hidden.numel()
    of_weight = 4 * weight.numel()
    assert extra(lambda: cross_entropy(linear(hidden, weight), labels)) > 2 * logits
    chunk = 2 * logits * 64 // 2048  # the block that is worked on is as large as the chunk here
    for frozen, gradient in ((weight, of_hidden), (hidden, of_weight)):
        got = extra(lambda: chunked_cross_entropy(hidden, weight, labels, chunk_size=64), frozen)
        assert got == pytest.approx(gradient + chunk, rel=0.05)
        assert (hidden.grad is None, weight.grad is None) == (hidden is frozen, weight is frozen)


def test_labels_of_another_length_are_refused():
    """They are those of other tokens."""
    hidden, weight, _, labels = make_tensors()
    with pytest.raises(ValueError, match="one label per token"):
        chunked_cross_entropy(hidden, weight, labels[:, 1:])


def test_without_a_target_there_is_no_mean():
    """A mean would be no number, and nobody would be told."""
    hidden, weight, _, labels = make_tensors()
    nothing = torch.full_like(labels, -100)
    with pytest.raises(ValueError, match="mean over 0 targets"):
        chunked_cross_entropy(hidden, weight, nothing)
    loss = chunked_cross_entropy(hidden, weight, nothing, num_items=7)
    value, *grads = with_gradients(loss, [hidden, weight])
    assert value == 0 and not any(grad.any() for grad in grads)


# --- the model -----------------------------------------------------------------------------------


def run(model, batch, **options):
    """Output, and loss with gradients; the seed makes dropout repeatable."""
    torch.manual_seed(1)
    model.zero_grad()
    output = model(**batch, **{"use_cache": False} | options)
    (output.loss * 0.5).backward()
    return output, {"loss": output.loss.detach()} | gradients(model)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-gemma2"])
def test_model_has_the_same_loss_and_gradients_without_logits(shape, batch):
    """With a soft cap and without; with the batch's number of targets, as Trainer gives it."""
    tiny = model_of_shape(shape, device="cpu")
    items = torch.tensor(50)
    with Account() as account:
        expected = run(tiny, batch, num_items_in_batch=items)[1]
    assert account.rows == 4 * 23
    apply_chunked_cross_entropy(tiny, chunk_size=5)
    with Account() as account:
        output, got = run(tiny, batch, num_items_in_batch=items)
    assert_same_gradients(got, expected)
    assert output.logits is None and "logits" not in output
    assert output["loss"] is output[0]
    assert account.rows == 64  # of W^T [D, V]: no tensor has the rows of the whole batch
    take_out(tiny, LossFromHidden)
    output, got = run(tiny, batch, num_items_in_batch=items)
    assert_same_gradients(got, expected, atol=0, rtol=0)
    assert output.logits.shape == (4, 23, 128)


def test_other_forwards_are_ordinary(llama, batch):
    """Evaluation and generation need their logits."""
    model = llama
    plain = copy.deepcopy(model).eval()
    apply_chunked_cross_entropy(model)
    prompt = {"input_ids": batch["input_ids"]}
    assert torch.equal(model(**prompt).logits, plain(**prompt).logits)  # training without labels
    model.eval()
    expected = plain(**batch)
    got = model(**batch)
    assert torch.equal(got.logits, expected.logits) and torch.equal(got.loss, expected.loss)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    answers = [each.generate(prompt["input_ids"], **options) for each in (model, plain)]
    assert torch.equal(*answers)


def test_adapters(llama, batch):
    """Frozen weights, adapters put on before or after."""
    base = llama
    twin = copy.deepcopy(base)
    model = train_a_little(apply_lora(base), std=1.0)
    expected = run(model, batch)[1]
    apply_chunked_cross_entropy(model, chunk_size=5)
    output, got = run(model, batch)
    assert output.logits is None
    trained = got.keys() - {"loss"}
    assert trained and all("lora" in name for name in trained)
    assert_same_gradients(got, expected)
    other = apply_lora(apply_chunked_cross_entropy(twin, chunk_size=5))
    other.load_state_dict(model.state_dict())
    assert_same_gradients(run(other, batch)[1], expected)
    assert run(take_out(other, LossFromHidden), batch)[0].logits is not None


def test_labels_by_position(llama, batch):
    """They would bring all logits, and nobody would be told."""
    apply_chunked_cross_entropy(llama.train())
    expected = llama(**batch, use_cache=False)
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    output = llama(ids, mask, None, None, None, labels, use_cache=False)
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected.loss)


def test_a_routers_loss_is_refused(batch):
    """Asked for by the configuration, and later, in a call: it would be left out."""
    model = small_model("Mixtral", num_local_experts=2, num_key_value_heads=2).train()
    apply_chunked_cross_entropy(model)
    with pytest.raises(ValueError, match="adds a router's loss"):
        model(**batch, output_router_logits=True)
    assert model.eval()(**batch).logits.shape == (4, 23, 128)  # the two tokens left no hook


def test_adapters_on_the_output_layer_are_refused(llama, batch):
    """They are beside the weight that the loss reads."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="adapters on its output layer"):
        apply_chunked_cross_entropy(get_peft_model(copy.deepcopy(llama), config))
    model = get_peft_model(apply_chunked_cross_entropy(llama), config)
    with pytest.raises(ValueError, match="adapters on its output layer"):
        model(**batch)
