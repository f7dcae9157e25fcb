import copy
import gc
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes_lib.core.measure import PeakMemory, dry_run
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.fine_tuning.lora import apply_lora, estimate_lora
from recipes_lib.memory import chunked_cross_entropy as module
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.chunked_cross_entropy import (
    apply_chunked_cross_entropy,
    chunked_cross_entropy,
    estimate_chunked_cross_entropy,
    remove_chunked_cross_entropy,
)
from recipes_lib.workflows.bench.losses import compare_losses
from tests.conftest import assert_same_gradients, gradients, make_batch

OPTIONS = [
    {},
    {"softcap": 5.0},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"softcap": 3.0, "label_smoothing": 0.2, "z_loss": 0.05, "num_items": 77},
    {"reduction": "sum"},
    {"ignore_index": 3},
]


def make_tensors(tokens=(3, 37), width=24, vocab=101, dtype=torch.float32, device="cpu"):
    """hidden [..., D], weight [V, D], bias [V], all trained, and labels [...] of which a third is ignored."""
    tensors = [torch.randn(*tokens, width), torch.randn(vocab, width), torch.randn(vocab)]
    labels = torch.randint(0, vocab, tokens)
    labels[torch.rand(tokens) < 1 / 3] = -100
    return *(t.to(device, dtype).requires_grad_() for t in tensors), labels.to(device)


def reference(hidden, weight, labels, *, bias=None, softcap=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
              reduction="mean", num_items=None):  # fmt: skip
    logits, labels = linear(hidden, weight, bias).flatten(0, -2), labels.flatten()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "sum"}
    targets = labels != ignore_index
    total = (
        cross_entropy(logits, labels, **options)
        + z_loss * logits.logsumexp(-1)[targets].square().sum()
    )
    return total / (num_items or (targets.sum() if reduction == "mean" else 1))


def with_gradients(loss, tensors, factor=0.7):
    """A factor other than 1 shows whether the incoming gradient is used."""
    return [loss.detach(), *torch.autograd.grad(loss * factor, tensors)]


def error(got, expected):
    """Relative, in the Euclidean norm."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


class Account(TorchDispatchMode):
    """Inside it: operations of matrix products, and the most elements that a new tensor has."""

    operations = elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max(
            self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)), 0
        )
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.operations += 2 * args[-2].numel() * args[-1].shape[1]
        return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk_size", [1, 7])
def test_equals_the_plain_loss(monkeypatch, dtype, options, chunk_size):
    monkeypatch.setattr(module, "BLOCK", 3 * 101)  # several blocks in a chunk, the last one smaller
    hidden, weight, bias, labels = make_tensors(dtype=dtype)
    if options.get("ignore_index") == 3:
        labels = labels.where(labels != -100, 3)
    expected = with_gradients(
        reference(hidden, weight, labels, bias=bias, **options), [hidden, weight, bias]
    )
    loss = chunked_cross_entropy(
        hidden, weight, labels, bias=bias, chunk_size=chunk_size, **options
    )
    close = (
        {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 1e-5, "rtol": 2e-6}
    )
    assert loss.dtype == dtype
    for got, want in zip(with_gradients(loss, [hidden, weight, bias]), expected):
        torch.testing.assert_close(got, want, **close)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("chunk_size", [4, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_16_bit_value_and_gradients_are_right(monkeypatch, device, dtype, chunk_size, native):
    """As near to fp64 as 16-bit products are, whether the CPU has units for them or not, for few and many chunks."""
    monkeypatch.setattr(module, "machine", lambda: SimpleNamespace(native_bf16=native))
    hidden, weight, _, labels = make_tensors((1024,), 64, 256, dtype, device)
    weight = (weight.detach() / 8).requires_grad_()  # logits of size one
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = with_gradients(reference(*exact, labels), exact)
    plain = with_gradients(cross_entropy(linear(hidden, weight).float(), labels), [hidden, weight])
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_size=chunk_size)
    got = with_gradients(loss, [hidden, weight])
    assert loss.dtype == torch.float32 and [g.dtype for g in got[1:]] == [dtype] * 2
    assert error(got[0], expected[0]) < 1e-4
    assert error(got[1], expected[1]) < 1.5 * error(plain[1], expected[1])
    slope = (got[1].double() * expected[1]).sum() / expected[1].square().sum()
    assert slope.item() == pytest.approx(
        1, abs=5e-4
    )  # a factor that is rounded to 16 bits would show here
    # 1024 / 4 chunks are summed in fp32, 1024 / 128 in bf16, each rounded.
    assert error(got[2], expected[2]) < (2.5 if chunk_size == 128 else 1.5) * error(
        plain[2], expected[2]
    )


def test_fp16_keeps_small_gradients():
    """Over 40,000 tokens the mean's gradients are below what fp16 can show; the scaled loss brings them back."""
    hidden, weight, _, labels = make_tensors((40_000,), 8, 32, torch.float16)
    weight = (weight.detach() / 100).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = with_gradients(reference(*exact, labels), exact, factor=2.0**14)
    got = with_gradients(
        chunked_cross_entropy(hidden, weight, labels), [hidden, weight], factor=2.0**14
    )
    assert max(map(error, got, expected)) < 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    hidden, weight, bias, labels = make_tensors((512,), 64, 256)
    expected = with_gradients(reference(hidden, weight, labels, bias=bias), [hidden, weight, bias])
    with torch.autocast("cpu", dtype):
        loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk_size=100)
    got = with_gradients(loss, [hidden, weight, bias])
    assert {t.dtype for t in got} == {torch.float32}
    assert max(map(error, got, expected)) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_sum_of_micro_batches_is_the_whole_batch():
    hidden, weight, bias, labels = make_tensors((4, 50))
    tensors, items = [hidden, weight, bias], (labels != -100).sum()
    labels[1] = -100  # a micro-batch without a target adds nothing
    labels[0, :40] = -100
    expected = with_gradients(
        chunked_cross_entropy(hidden, weight, labels, bias=bias, num_items=items), tensors
    )
    parts = [
        with_gradients(
            chunked_cross_entropy(hidden[i], weight, labels[i], bias=bias, num_items=items), tensors
        )
        for i in range(4)
    ]
    for got, want in zip(map(sum, zip(*parts)), expected):
        torch.testing.assert_close(got, want)


def test_one_token():
    hidden, weight, _, _ = make_tensors((1,))
    expected = cross_entropy(linear(hidden, weight), torch.tensor([3]))
    torch.testing.assert_close(chunked_cross_entropy(hidden[0], weight, torch.tensor(3)), expected)


def test_backward_runs_once():
    hidden, weight, _, labels = make_tensors()
    loss = chunked_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()


def test_multiplies_targets_only_and_only_for_what_trains():
    hidden, weight, _, labels = make_tensors((512,), 32, 64)
    product = 2 * (labels != -100).sum().item() * weight.numel()
    for trained, products in (([hidden, weight], 3), ([hidden], 2), ([weight], 2), ([], 1)):
        for tensor in (hidden, weight):
            tensor.requires_grad_(any(tensor is t for t in trained))
        with Account() as account:
            chunked_cross_entropy(hidden, weight, labels, chunk_size=50)
        assert account.operations == products * product
    hidden.requires_grad_()
    with torch.no_grad(), Account() as account:
        loss = chunked_cross_entropy(hidden, weight, labels)
    assert account.operations == product and not loss.requires_grad


def test_memory_is_a_chunk_and_the_gradients_of_what_trains():
    hidden, weight, _, labels = make_tensors((2048,), 32, 4096)

    def extra(loss_of, frozen=None):
        for tensor in (hidden, weight):
            tensor.requires_grad_(tensor is not frozen).grad = None
        gc.collect()
        with PeakMemory() as memory:
            before = memory.current
            loss_of().backward()
        return memory.peak - before

    logits, states, matrix = 4 * 2048 * 4096, 4 * hidden.numel(), 4 * weight.numel()
    assert extra(lambda: cross_entropy(linear(hidden, weight), labels)) > 2 * logits
    chunk = 2 * logits * 64 // 2048  # the block that is worked on is as large as the chunk here
    for frozen, gradient in ((weight, states), (hidden, matrix)):
        got = extra(lambda: chunked_cross_entropy(hidden, weight, labels, chunk_size=64), frozen)
        assert got == pytest.approx(gradient + chunk, rel=0.05)
        assert (hidden.grad is None, weight.grad is None) == (hidden is frozen, weight is frozen)


def test_rows_of_a_chunk():
    def rows(vocab, chunk_size=None):
        weight = torch.zeros(1, 1).expand(vocab, 1)
        return module._plan(weight, weight, 1, chunk_size)[0]

    assert rows(49152) == 320 and rows(128_256) == 128 and rows(2**22) == 64
    assert rows(49152, 5) == 5 and rows(2**20, 10**6) * 2**20 < 2**31


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 0}, "sizes above 0"),
        ({"softcap": 0.0}, "sizes above 0"),
        ({"label_smoothing": 1.0}, "smoothing in"),
        ({"label_smoothing": -0.1}, "smoothing in"),
        ({"z_loss": -1.0}, "z_loss >= 0"),
        ({"reduction": "none"}, "'mean' or 'sum'"),
        ({"reduction": "sum", "num_items": 3}, "leave it out"),
        ({"num_items": 0}, "num_items above 0"),
    ],
)
def test_wrong_options_are_refused(llama, options, message):
    hidden, weight, _, labels = make_tensors()
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(hidden, weight, labels, **options)
    if options.keys() <= {"chunk_size", "label_smoothing", "z_loss"}:
        with pytest.raises(ValueError, match=message):
            apply_chunked_cross_entropy(llama, **options)


def test_wrong_tensors_are_refused():
    hidden, weight, bias, labels = make_tensors()
    for wrong in (
        (hidden[..., 1:], weight, labels),
        (hidden, weight, labels[:, 1:]),
        (hidden, weight[0], labels),
    ):
        with pytest.raises(ValueError, match="shapes of hidden"):
            chunked_cross_entropy(*wrong)
    with pytest.raises(ValueError, match="shapes of hidden"):
        chunked_cross_entropy(hidden, weight, labels, bias=bias[1:])
    for label in (101, -1):
        labels[0, 0] = label
        with pytest.raises(ValueError, match="vocabulary of 101"):
            chunked_cross_entropy(hidden, weight, labels)
    nothing = torch.full_like(labels, -100)
    with pytest.raises(ValueError, match="mean over 0 targets"):
        chunked_cross_entropy(hidden, weight, nothing)
    for options in ({"reduction": "sum"}, {"num_items": 7}):
        loss, *grads = with_gradients(
            chunked_cross_entropy(hidden, weight, nothing, **options), [hidden, weight]
        )
        assert loss == 0 and not any(grad.any() for grad in grads)


# --- the model -----------------------------------------------------------------------------------


def run(model, batch, **options):
    """Loss and gradients; the seed makes dropout repeatable."""
    torch.manual_seed(1)
    model.zero_grad()
    output = model(**batch, **{"use_cache": False} | options)
    (output.loss * 0.5).backward()
    return output, {"loss": output.loss.detach()} | gradients(model)


@pytest.mark.parametrize("num_items", [None, torch.tensor(50)])
def test_model_has_the_same_loss_and_gradients_without_logits(tiny, batch, num_items):
    expected = run(tiny, batch, num_items_in_batch=num_items)[1]
    apply_chunked_cross_entropy(tiny, chunk_size=5)
    with Account() as account:
        output, got = run(tiny, batch, num_items_in_batch=num_items)
    assert_same_gradients(got, expected)
    assert output.logits is None and output["loss"] is output[0] and "logits" not in output
    wide = {p.numel() for p in tiny.parameters()} | {
        4 * 23 * 4 * 64
    }  # eager attention makes no more
    assert account.elements <= max(*wide, 4 * 23 * 256)
    remove_chunked_cross_entropy(tiny)
    output, got = run(tiny, batch, num_items_in_batch=num_items)
    assert_same_gradients(got, expected, atol=0, rtol=0)
    assert output.logits.shape == (4, 23, 128)


def test_options_of_the_ordinary_forward_are_kept(llama, batch):
    rows = {
        "input_ids": batch["input_ids"],
        "labels": batch["input_ids"],
        "ignore_index": int(batch["input_ids"][0, 5]),
    }
    expected = llama(**rows).loss
    apply_chunked_cross_entropy(llama, chunk_size=5)
    torch.testing.assert_close(llama(**rows).loss, expected)
    assert isinstance(llama(**rows, return_dict=False), tuple)
    torch.testing.assert_close(llama(**rows, return_dict=False)[0], expected)
    with torch.no_grad():
        llama.model.layers[0].self_attn.q_proj.weight[0, 0] = torch.nan
    assert llama(**rows).loss.isnan(), "not an error that blames the model"


def test_other_forwards_are_ordinary(tiny, batch):
    plain = copy.deepcopy(tiny).eval()
    apply_chunked_cross_entropy(tiny)
    prompt = {"input_ids": batch["input_ids"]}
    assert torch.equal(tiny(**prompt).logits, plain(**prompt).logits)  # training without labels
    tiny.eval()
    expected, got = plain(**batch), tiny(**batch)
    assert torch.equal(got.logits, expected.logits) and torch.equal(got.loss, expected.loss)
    with torch.no_grad():
        short = tiny(**batch, skip_logits=True)
    assert short.logits is None
    torch.testing.assert_close(short.loss, expected.loss.detach())
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        tiny.generate(prompt["input_ids"], **options),
        plain.generate(prompt["input_ids"], **options),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_model_in_16_bits(tiny, batch, dtype, autocast):
    exact = run(tiny, batch)[1]["loss"]
    tiny.to(torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        expected = run(tiny, batch)[1]
        apply_chunked_cross_entropy(tiny, chunk_size=5)
        got = run(tiny, batch)[1]
    assert error(got["loss"], exact) < (1e-2 if dtype == torch.bfloat16 else 2e-3)
    assert {n: g.dtype for n, g in got.items()} == {n: g.dtype for n, g in expected.items()}
    assert max(error(got[name], expected[name]) for name in expected) < (
        5e-2 if dtype == torch.bfloat16 else 2e-2
    )


def test_adapters(tiny, batch):
    """Frozen weights, adapters put on before or after, checkpointed blocks."""
    twin = copy.deepcopy(tiny)
    model = apply_activation_checkpointing(apply_lora(tiny))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    expected = run(model, batch)[1]
    apply_chunked_cross_entropy(model, chunk_size=5)
    output, got = run(model, batch)
    assert (
        output.logits is None
        and len(got) > 1
        and all("lora" in name for name in got.keys() - {"loss"})
    )
    assert_same_gradients(got, expected)
    other = apply_lora(apply_chunked_cross_entropy(twin, chunk_size=5))
    other.load_state_dict(model.state_dict())
    assert_same_gradients(run(other, batch)[1], expected)
    assert run(remove_chunked_cross_entropy(other), batch)[0].logits is not None


def test_deep_copy_is_a_model_of_its_own(llama, batch):
    apply_chunked_cross_entropy(llama, chunk_size=5)
    twin = copy.deepcopy(llama)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    output, got = run(twin, batch)
    assert output.logits is None and gradients(llama) == {}
    assert_same_gradients(got, run(remove_chunked_cross_entropy(twin), batch)[1])
    assert run(llama, batch)[0].logits is None  # still chunked


def test_saved_and_inspected_like_the_ordinary_model(tmp_path, llama, batch):
    ordinary, signature = type(llama), inspect.signature(llama.forward)
    apply_chunked_cross_entropy(llama)
    assert isinstance(llama, ordinary) and inspect.signature(llama.forward) == signature
    llama.save_pretrained(tmp_path)
    loaded = ordinary.from_pretrained(tmp_path).train()
    assert loaded.config.architectures == ["LlamaForCausalLM"] and type(loaded) is ordinary
    assert_same_gradients(run(loaded, batch)[1], run(llama, batch)[1])


def test_in_the_trainer(tmp_path, llama):
    """It accumulates over micro-batches of unequal lengths by `num_items_in_batch`, and reads the signature."""
    from transformers import Trainer, TrainingArguments

    rows = [{name: t[0] for name, t in make_batch(1, n).items()} for n in (9, 23, 14, 30)]
    settings = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "max_steps": 2,
        "logging_steps": 1,
    }
    settings |= {
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_grad_norm": 0,
    }

    def trained(model):
        arguments = TrainingArguments(tmp_path, **settings, optim="sgd", learning_rate=1.0)
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], dict(
            model.named_parameters()
        )

    losses, expected = trained(copy.deepcopy(llama))
    got_losses, got = trained(apply_chunked_cross_entropy(llama))
    assert got_losses == pytest.approx(losses, rel=1e-4) and len(losses) == 2
    assert_same_gradients(got, expected)


def test_models_that_do_more_are_refused(llama, batch):
    import transformers
    from peft import LoraConfig, get_peft_model

    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    routed = {"num_local_experts": 2, "output_router_logits": True}
    capped = {"lru_width": 64}  # by 30, which its configuration calls logits_soft_cap
    families = {
        "Cohere": {},
        "Granite": {"logits_scaling": 8.0},
        "RecurrentGemma": capped,
        "Mixtral": routed,
    }
    for family, options in families.items():
        config = getattr(transformers, f"{family}Config")(**sizes, **options)
        model = apply_chunked_cross_entropy(
            transformers.AutoModelForCausalLM.from_config(config).train()
        )
        with pytest.raises(ValueError, match=f"{family}ForCausalLM scales its logits"):
            model(**batch)
        assert model.eval()(**batch).logits is not None  # no trace is left
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    for order in (lambda m: apply_chunked_cross_entropy(get_peft_model(m, config)),
                  lambda m: get_peft_model(apply_chunked_cross_entropy(m), config)):  # fmt: skip
        with pytest.raises(ValueError, match="adapters"):
            order(copy.deepcopy(llama))(**batch)
    for other in (llama.model, torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="no Hugging Face causal LM"):
            apply_chunked_cross_entropy(other)
    llama.loss_function = lambda *args, **kwargs: 0
    with pytest.raises(ValueError, match="no Hugging Face causal LM"):
        apply_chunked_cross_entropy(llama)


def test_applied_once_and_removed_once(llama):
    with pytest.raises(ValueError, match="no loss that"):
        remove_chunked_cross_entropy(llama)
    apply_chunked_cross_entropy(llama)
    with pytest.raises(ValueError, match="chunked already"):
        apply_chunked_cross_entropy(llama)


def test_a_head_that_trains_alone_beside_adapters(llama, batch):
    from peft import LoraConfig, get_peft_model

    mistral = model_of_shape("tiny-mistral", device="cpu")  # untied
    model = get_peft_model(
        mistral, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    expected = run(model, batch)[1]
    output, got = run(apply_chunked_cross_entropy(model, chunk_size=5), batch)
    assert output.logits is None and any("lm_head" in name for name in got)
    assert_same_gradients(got, expected)


# --- the estimate --------------------------------------------------------------------------------


def measured_and_planned(shape, batch_size, seq_len, *, prompt=0, adapters=False, frozen=False, chunk_size=None,
                         **model_options):  # fmt: skip
    """Peak of the second AdamW step (the first one creates the states), and the estimate of it."""
    gc.collect()  # the models before this one are not part of the step
    model, sizes = (
        model_of_shape(shape, device="cpu", **model_options),
        {"batch_size": batch_size, "seq_len": seq_len},
    )
    model.get_output_embeddings().requires_grad_(not frozen)
    plan = budget_of(model, **sizes)
    if adapters:
        plan, model = estimate_lora(plan, model, **sizes), apply_lora(model)
    targets = batch_size * (seq_len - prompt) if prompt else None
    plan = estimate_chunked_cross_entropy(
        plan, model, chunk_size=chunk_size, targets=targets, **sizes
    )
    apply_chunked_cross_entropy(model, chunk_size=chunk_size)
    ids = torch.ones(batch_size, seq_len, dtype=torch.long)
    labels = ids.clone()
    labels[:, :prompt] = -100
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)

    def step(length):
        model(
            input_ids=ids[:, -length:], labels=labels[:, -length:], use_cache=False
        ).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(8)
    with PeakMemory() as memory:
        step(seq_len)
    return memory.peak, plan.peak


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-gemma2", "tiny-gpt2"])
def test_peak_as_estimated(shape):
    measured, planned = measured_and_planned(shape, 16, 64, layers=6, chunk_size=64, prompt=48)
    assert planned == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("options", [{"prompt": 384}, {"prompt": 384, "adapters": True}])
def test_peak_of_a_large_vocabulary_as_estimated(options):
    measured, planned = measured_and_planned("smollm2-135m", 1, 512, layers=2, **options)
    assert planned == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("frozen", [False, True])
def test_peak_without_a_prompt_as_estimated(frozen):
    """As a dry run: it has no labels, as if each of them were a target."""
    with dry_run():
        measured, planned = measured_and_planned("smollm2-135m", 1, 512, layers=2, frozen=frozen)
    assert planned == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("chunk_size", [200, 512])
def test_peak_in_bf16_as_estimated(monkeypatch, chunk_size):
    """Few chunks are summed in bf16; the sum of many is in fp32 and cast at the end. On a machine with bf16 units."""
    monkeypatch.setattr(module, "machine", lambda: SimpleNamespace(native_bf16=True, device="cpu"))
    with dry_run():
        options = {"layers": 1, "dtype": torch.bfloat16, "chunk_size": chunk_size}
        measured, planned = measured_and_planned("smollm2-135m", 1, 4096, **options)
    assert planned == pytest.approx(measured, rel=0.02)


def test_a_dry_run_counts_what_a_real_one_takes():
    """The memory of very long sequences is found without data, in which every token counts as a target."""
    peaks = [measured_and_planned("tiny-llama", 4, 64, chunk_size=50)[0]]
    with dry_run():
        peaks.append(measured_and_planned("tiny-llama", 4, 64, chunk_size=50)[0])
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


def test_estimate_refuses_bad_input(llama):
    plan = budget_of(llama, batch_size=1, seq_len=8)
    for sizes in ({"batch_size": 0, "seq_len": 8}, {"batch_size": 1, "seq_len": 1}):
        with pytest.raises(ValueError, match="each must be 1 or more"):
            estimate_chunked_cross_entropy(plan, llama, **sizes)
    with pytest.raises(ValueError, match="targets=0"):
        estimate_chunked_cross_entropy(plan, llama, batch_size=1, seq_len=8, targets=0)


# --- against other implementations ---------------------------------------------------------------


def test_against_other_implementations():
    """Same value, less memory than all logits, in less time than torch's loss, whose chunks are small, takes."""
    found = compare_losses(tokens=256, vocab=4096, hidden=128, chunk_size=32, rounds=2)
    assert all(cost.error < 1e-5 for cost in found.values())
    ours, plain = found["ours"], found["plain"]
    assert ours.peak_bytes < 0.4 * plain.peak_bytes and ours.seconds < 2 * plain.seconds
    assert "torch" not in found or ours.seconds < found["torch"].seconds


@pytest.mark.gpu
def test_a_large_vocabulary_on_gpu():
    """The output layer of an 8B model: the gradient of W is 1.05 GB of this, and the products run at full speed."""
    found = compare_losses(tokens=8192, vocab=128_256, hidden=4096, dtype=torch.bfloat16, rounds=5)
    ours, plain = found["ours"], found["plain"]
    assert (
        ours.error < 1e-4
        and ours.peak_bytes < 1.4e9 < plain.peak_bytes
        and ours.seconds < 1.3 * plain.seconds
    )
    assert "Liger" not in found or ours.seconds < found["Liger"].seconds


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_loss_and_gradients_on_gpu(dtype):
    model = model_of_shape("tiny-gemma2", dtype=dtype, device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch().items()}
    expected = run(model, batch)[1]
    got = run(apply_chunked_cross_entropy(model, chunk_size=5), batch)[1]
    for name, value in expected.items():
        assert error(got[name], value) < (1e-4 if dtype == torch.float32 else 5e-2), name
