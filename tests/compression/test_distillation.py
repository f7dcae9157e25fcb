import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

from recipes_lib.compression.distillation import (
    Taught,
    apply_distillation,
    distillation_loss,
    hidden_state_loss,
    loss_in_chunks,
    plain_distillation_loss,
    require_same_tokens,
)
from recipes_lib.core.measure import PeakMemory, dry_run
from recipes_lib.core.model import chunked_loss, model_of_shape
from recipes_lib.core.model.mixins import take_out
from recipes_lib.core.model.output_layer import OutputLayer
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.precision.int8 import apply_int8
from tests.conftest import assert_same_gradients, distance, make_batch, run
from tests.small_models import small_model


def make_tensors(tokens=(3, 37), widths=(24, 40), vocab=101, dtype=torch.float32, device="cpu"):
    """Two hidden states and two output layers with biases, and labels, of which a third is ignored.

    Those of the student train.
    """
    found = []
    for width, trains in zip(widths, (True, False)):
        tensors = [torch.randn(*tokens, width), torch.randn(vocab, width) / width**0.5]
        tensors.append(torch.randn(vocab))
        hidden, weight, bias = [each.to(device, dtype).requires_grad_(trains) for each in tensors]
        found += [hidden, OutputLayer(weight, bias)]
    labels = torch.randint(0, vocab, tokens)
    labels[torch.rand(tokens) < 1 / 3] = -100
    return *found, labels.to(device)


def all_logits(hidden, layer):
    """[T, V], as a model makes them."""
    logits = linear(hidden, layer.weight, layer.bias).flatten(0, -2)
    if layer.softcap:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    return logits


def reference(hidden, layer, teacher_hidden, teacher_layer, labels, **options):
    """Both tables whole."""
    labels = labels.flatten()
    rows = labels != -100
    logits = all_logits(hidden, layer)[rows]
    teacher_logits = all_logits(teacher_hidden, teacher_layer)[rows].detach()
    return plain_distillation_loss(logits, teacher_logits, labels[rows], **options)


def with_gradients(loss, tensors, factor=0.7):
    """A factor other than 1 shows whether the incoming gradient is used."""
    return [loss.detach(), *torch.autograd.grad(loss * factor, tensors)]


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "teacher_share", "softcaps", "chunk_size"),
    [
        (3.0, 0.25, (None, None), 1),  # t² and t, and both shares
        (0.5, 1.0, (None, None), 1000),  # the teacher alone
        (2.0, 0.5, (4.0, 3.0), 7),  # each model has its own soft cap
    ],
)
def test_equals_the_plain_formula(monkeypatch, temperature, teacher_share, softcaps, chunk_size):
    """In fp64, value and gradients: a missing t², one share for both, a wrong derivative."""
    # Several blocks in a chunk, the last one smaller.
    monkeypatch.setattr(loss_in_chunks, "LOGITS_OF_A_BLOCK", 3 * 101)
    tensors = make_tensors(dtype=torch.float64)
    hidden, layer, teacher_hidden, teacher_layer, labels = tensors
    layer = layer._replace(softcap=softcaps[0])
    teacher_layer = teacher_layer._replace(softcap=softcaps[1])
    given = (hidden, layer, teacher_hidden, teacher_layer, labels)
    options = {"temperature": temperature, "teacher_share": teacher_share}
    trained = [hidden, layer.weight, layer.bias]
    expected = with_gradients(reference(*given, **options), trained)
    loss = distillation_loss(*given, **options, chunk_size=chunk_size)
    assert loss.dtype == torch.float64
    for got, want in zip(with_gradients(loss, trained), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("native", [True, False])
def test_16_bit_value_and_gradients_are_right(monkeypatch, native):
    """As near to fp64 as all logits in bf16 with a loss in fp32, with bf16 units and without."""
    machine = SimpleNamespace(native_bf16=native)
    monkeypatch.setattr(chunked_loss, "machine", lambda: machine)
    tensors = make_tensors((1021,), (64, 32), 257, torch.bfloat16)
    hidden, layer, teacher_hidden, teacher_layer, labels = tensors
    options = {"temperature": 2.0, "teacher_share": 0.5}
    exact = [hidden.detach().double().requires_grad_()]
    exact += [OutputLayer(*[each.detach().double().requires_grad_() for each in layer[:2]])]
    exact += [teacher_hidden.double(), OutputLayer(*[e.double() for e in teacher_layer[:2]])]
    trained_exact = [exact[0], exact[1].weight]
    expected = with_gradients(reference(*exact, labels, **options), trained_exact)

    trained = [hidden, layer.weight]
    rows = labels != -100
    plain = plain_distillation_loss(
        all_logits(hidden, layer)[rows].float(),
        all_logits(teacher_hidden, teacher_layer)[rows].float(),
        labels[rows],
        **options,
    )
    plain = with_gradients(plain, trained)
    got = with_gradients(distillation_loss(*tensors, **options, chunk_size=50), trained)
    assert [each.dtype for each in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert distance(got[0], expected[0]) < 1e-3
    for ours, theirs, want in zip(got[1:], plain[1:], expected[1:], strict=True):
        assert distance(ours, want) < 1.5 * distance(theirs, want)


def test_hidden_states_count_by_their_length():
    """Tokens with hidden states a thousand times as long count like the others."""
    theirs = torch.randn(2, 5, 8)
    theirs[:, 0] *= 1000
    ours = (1.1 * theirs).requires_grad_()
    rows = torch.tensor([0, 1, 4, 7])
    loss = hidden_state_loss(ours, theirs, rows, divisor=torch.tensor(4))
    torch.testing.assert_close(loss.item(), 0.01, rtol=1e-4, atol=0)
    loss.backward()
    others = [row for row in range(10) if row not in rows]
    assert ours.grad.view(10, 8)[others].abs().max() == 0  # what is ignored does not count


# --- memory ---------------------------------------------------------------------------------------


def memory_of(loss_of, *, tokens, vocab, widths):
    """Bytes beside the inputs of a loss and its backward."""
    hidden, teacher_hidden = [torch.randn(tokens, width) for width in widths]
    weight, teacher_weight = [torch.randn(vocab, width) for width in widths]
    labels = torch.zeros(tokens, dtype=torch.long)
    hidden.requires_grad_()
    weight.requires_grad_()
    with PeakMemory() as memory:
        before = memory.current
        layers = OutputLayer(weight), OutputLayer(teacher_weight)
        loss_of(hidden, layers[0], teacher_hidden, layers[1], labels).backward()
    return memory.peak - before


def plain(hidden, layer, teacher_hidden, teacher_layer, labels):
    with torch.no_grad():
        teacher_logits = all_logits(teacher_hidden, teacher_layer)
    options = {"temperature": 2.0, "teacher_share": 0.5}
    return plain_distillation_loss(all_logits(hidden, layer), teacher_logits, labels, **options)


def chunked(*tensors):
    return distillation_loss(*tensors, temperature=2.0, teacher_share=0.5)


def test_an_eighth_of_the_memory_at_a_large_vocabulary(monkeypatch):
    """8K tokens and the vocabulary of Llama 3, in a dry run. Nothing has the size of a table."""
    # As on a GPU: with larger blocks a dry run has fewer operators.
    monkeypatch.setattr(loss_in_chunks, "LOGITS_OF_A_BLOCK", 2**23)
    sizes = {"tokens": 8192, "vocab": 128_256, "widths": (2048, 4096)}
    with dry_run():
        naive = memory_of(plain, **sizes)
        ours = memory_of(chunked, **sizes)
    assert 8 * ours < naive
    one_table = 4 * 8192 * 128_256
    assert ours < one_table / 2


# --- two models -----------------------------------------------------------------------------------


def teacher_of(name, **options):
    torch.manual_seed(3)
    return model_of_shape(name, layers=3, device="cpu", **options)


def test_a_teacher_with_dropout_teaches_without():
    """The mistake: a teacher that is asked in training mode gives another answer each time."""
    student = model_of_shape("tiny-gpt2", device="cpu")
    teacher = teacher_of("tiny-gpt2").train()
    for module in teacher.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    batch = make_batch()
    apply_distillation(student, teacher)
    losses = {student(**batch, use_cache=False).loss.item() for _ in range(3)}
    assert len(losses) == 1


def test_hidden_states_of_pairs_are_added(batch):
    """Of the blocks that were named, not of their neighbours; prompts and padding do not count."""
    student = model_of_shape("tiny-llama", device="cpu")
    teacher = teacher_of("tiny-llama").eval()
    pairs = [(0, 1), (1, 2)]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    alone = run(apply_distillation(copy.deepcopy(student), teacher), batch)["loss"]
    rows = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100).flatten() != -100
    kept = {}
    for model in (student, teacher):
        for number, block in enumerate(model.model.layers):
            block.register_forward_hook(
                lambda _m, _i, out, key=(model is teacher, number): kept.__setitem__(key, out)
            )
        model(**inputs, use_cache=False)
    distances = []
    for ours, theirs in pairs:
        ours = kept[False, ours].flatten(0, 1)[rows]
        theirs = kept[True, theirs].flatten(0, 1)[rows]
        distances.append(((ours - theirs).square().sum(-1) / theirs.square().sum(-1)).mean())
    expected = alone + 0.3 * sum(distances) / 2
    apply_distillation(student, teacher, block_pairs=pairs, hidden_weight=0.3)
    torch.testing.assert_close(run(student, batch)["loss"], expected.detach())


def test_the_student_stays_what_it_was(tmp_path, llama, batch):
    """In eval mode, in what it saves, for its copies, and after the teacher has gone."""
    teacher = teacher_of("tiny-llama")
    names = list(llama.state_dict())
    plain = run(llama.eval(), batch)["loss"]
    apply_distillation(llama, teacher)
    assert list(llama.state_dict()) == names
    assert len(list(llama.parameters())) == len(set(llama.parameters()))
    torch.testing.assert_close(run(llama.eval(), batch)["loss"], plain)
    assert llama(**batch).logits.shape[-1] == 128

    taught = run(llama.train(), batch)["loss"]
    twin = copy.deepcopy(llama)
    assert twin.teaching.teacher is teacher
    torch.testing.assert_close(run(twin, batch)["loss"], taught)

    llama.save_pretrained(tmp_path)
    loaded = type(teacher).from_pretrained(tmp_path)
    torch.testing.assert_close(run(loaded.eval(), batch)["loss"], plain)
    take_out(llama, Taught)
    assert type(llama) is type(teacher)
    torch.testing.assert_close(run(llama.train(), batch)["loss"], plain)


def test_together_with_other_techniques(llama, batch):
    """Checkpoints change nothing. A chunked loss below is passed by; one above would take the
    labels away, and the student would train without its teacher: it is refused."""
    teacher = teacher_of("tiny-llama")
    expected = run(apply_distillation(copy.deepcopy(llama), teacher, block_pairs=[(1, 2)]), batch)
    apply_chunked_cross_entropy(llama)
    apply_activation_checkpointing(llama)
    apply_distillation(llama, teacher, block_pairs=[(1, 2)])
    assert_same_gradients(run(llama, batch), expected)

    taught = apply_distillation(model_of_shape("tiny-llama", device="cpu"), teacher)
    with pytest.raises(ValueError, match="the loss is off"):
        apply_chunked_cross_entropy(taught)


# --- what is refused ------------------------------------------------------------------------------


def test_refuses_models_that_do_not_fit(llama):
    """The mistakes: a teacher of other tokens, and a second teacher."""
    larger = teacher_of("tiny-llama")
    larger.resize_token_embeddings(136)
    with pytest.raises(ValueError, match=r"128 tokens.*136.*resize_token_embeddings\(128\)"):
        apply_distillation(llama, larger)
    apply_distillation(llama, teacher_of("tiny-llama"))
    with pytest.raises(ValueError, match="computes its loss itself"):
        apply_distillation(llama, teacher_of("tiny-llama"))


def test_a_teacher_in_few_bits_keeps_its_output_layer(llama):
    """The mistake: the loss multiplies with whole numbers."""
    apply_int8(llama)
    student = teacher_of("tiny-llama")
    with pytest.raises(ValueError, match=r"output layer .* adapters or is quantized"):
        apply_distillation(student, apply_int8(teacher_of("tiny-llama"), names=["lm_head"]))
    apply_distillation(student, llama)


def test_refuses_a_router_whose_loss_would_be_left_out():
    """The mistake: a mixture learns from its teacher and its router collapses."""
    student = small_model("Mixtral", num_key_value_heads=2, output_router_logits=True)
    with pytest.raises(ValueError, match=r"as it was: .* adds a router's loss"):
        apply_distillation(student, teacher_of("tiny-llama"))


def test_a_teacher_that_scales_its_logits(llama, batch):
    """Without the factor of Granite its distribution would be another one."""
    teacher = small_model("Granite", logits_scaling=1 / 50)
    apply_distillation(llama.train(), teacher, teacher_share=1.0)
    ids, labels = batch["input_ids"], batch["labels"]
    loss = llama(ids, batch["attention_mask"], None, None, None, labels, use_cache=False).loss
    counted = labels[:, 1:] != -100
    inputs = {"input_ids": ids, "attention_mask": batch["attention_mask"]}
    asked = llama.eval()(**inputs).logits[:, :-1][counted].log_softmax(-1)
    taught = teacher(**inputs).logits[:, :-1][counted].log_softmax(-1)
    expected = torch.nn.functional.kl_div(asked, taught, log_target=True, reduction="batchmean")
    torch.testing.assert_close(loss, expected)


def test_refuses_tokenizers_with_other_tokens():
    """Same size, other tokens: no shape shows it."""
    ours = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    theirs = SimpleNamespace(get_vocab=lambda: {"b": 0, "a": 1})
    require_same_tokens(ours, ours)
    with pytest.raises(ValueError, match="2 tokens, such as 'a'"):
        require_same_tokens(ours, theirs)
