import copy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from recipes_lib.attention import block_sparse
from recipes_lib.attention.block_sparse import (
    apply_block_sparse,
    block_pattern,
    block_sparse_attention,
    block_sparse_mask,
    estimate_block_sparse,
)
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from tests.conftest import assert_same_gradients, gradients, make_batch

PATTERNS = [
    {"block_size": 4},
    {"block_size": 5, "local": 2, "global_blocks": 0, "stride": 3},
    {"block_size": 3, "local": 1, "global_blocks": 2},
    {"block_size": 7, "stride": 1},  # everything
    {"block_size": 64},  # one block
]
PATTERN = {"block_size": 4, "local": 2, "global_blocks": 1, "stride": 3}


@pytest.fixture(params=["tiny-llama", "tiny-qwen3", "tiny-mistral", "tiny-gpt2"])
def model(request):
    """The families but Gemma2, whose scores are capped."""
    return model_of_shape(request.param, device="cpu")


def make_qkv(seq_len, *, batch=2, heads=6, kv_heads=2, width=8, dtype=torch.float32, device="cpu"):
    """In the layout of transformers: [B, S, H, E] seen as [B, H, S, E]."""
    shapes = [(batch, seq_len, h, width) for h in (heads, kv_heads, kv_heads)]
    return [
        torch.randn(s, dtype=dtype, device=device).transpose(1, 2).requires_grad_() for s in shapes
    ]


def make_documents(kind, seq_len, batch=2):
    if kind is None:
        return None
    if kind == "sorted":
        return (torch.rand(batch, seq_len) < 0.15).cumsum(1)
    return torch.randint(0, 3, (batch, seq_len))  # ids that come and go


def dense(q, k, v, *, documents=None, scale=None, **pattern):
    """The reference: the whole mask, keys repeated for every head."""
    mask = block_sparse_mask(seq_len=q.shape[2], **pattern).to(q.device)
    if documents is not None:
        mask = (mask & (documents[:, :, None] == documents[:, None]))[:, None]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def run(attention, qkv, **options):
    """The output and the gradients of q, k and v."""
    out = attention(*qkv, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), qkv)]


@pytest.mark.parametrize("documents", [None, "sorted", "any"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_to_dense_attention(dtype, pattern, documents):
    # bf16: the sums are taken in other portions, each rounded to 8 bits.
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 4e-2}[dtype]
    for seq_len in (1, 37):
        options = pattern | {"documents": make_documents(documents, seq_len), "scale": 0.4}
        qkv = make_qkv(seq_len, dtype=dtype)
        for got, expected in zip(
            run(block_sparse_attention, qkv, **options), run(dense, qkv, **options)
        ):
            assert got.dtype is dtype
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kv_heads", [1, 6])
def test_one_group_and_no_groups(kv_heads):
    qkv = make_qkv(29, kv_heads=kv_heads)
    for got, expected in zip(
        run(block_sparse_attention, qkv, **PATTERN), run(dense, qkv, **PATTERN)
    ):
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


def test_gradients_of_keys_that_many_read_are_summed_in_fp32():
    """In bf16 the sum over 64 blocks would lose what the later ones add."""
    qkv = make_qkv(512, batch=1, dtype=torch.bfloat16)
    pattern = {"block_size": 8, "local": 1}
    exact = run(dense, [x.detach().double().requires_grad_() for x in qkv], **pattern)
    for which in (2, 3):
        errors = [
            (run(f, qkv, **pattern)[which] - exact[which]).norm()
            for f in (block_sparse_attention, dense)
        ]
        assert errors[0] < 1.1 * errors[1]


def test_the_pattern_is_the_one_in_the_picture():
    def picture(**pattern):
        rows = [
            [j in keys for j in range(6)]
            for keys in block_pattern(seq_len=6, block_size=1, **pattern)
        ]
        assert torch.equal(
            torch.tensor(rows), block_sparse_mask(seq_len=6, block_size=1, **pattern)
        )
        return ["".join(".■"[read] for read in row) for row in rows]

    assert picture(local=2, global_blocks=1) == [
        "■.....",
        "■■....",
        "■■■...",
        "■.■■..",
        "■..■■.",
        "■...■■",
    ]
    assert picture(local=1, global_blocks=0, stride=3) == [
        "■.....",
        ".■....",
        "..■...",
        "■..■..",
        ".■..■.",
        "..■..■",
    ]
    inside = block_sparse_mask(seq_len=5, block_size=2, local=1, global_blocks=0)
    assert inside.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_estimate_counts_the_mask(pattern):
    for seq_len in (1, 8, 50, 129):
        share = (
            block_sparse_mask(seq_len=seq_len, **pattern).sum()
            / torch.ones(seq_len, seq_len).tril().sum()
        )
        assert estimate_block_sparse(seq_len=seq_len, **pattern) == pytest.approx(
            share.item(), rel=1e-6
        )


def pairs(attention, *qkv, **options):
    """Pairs of query and key that the kernel multiplies in forward and backward; all kernels count the same way."""
    count = 0

    def forward(q, k, *args, **kwargs):
        nonlocal count
        count += q[0] * q[1] * q[2] * k[2]
        return 0

    kernels = torch.ops.aten
    custom = {
        kernels._scaled_dot_product_flash_attention_for_cpu: forward,
        kernels._scaled_dot_product_flash_attention_for_cpu_backward: lambda gradient, *a, **b: (
            forward(*a, **b)
        ),
    }
    with FlopCounterMode(custom_mapping=custom, display=False):
        attention(*qkv, **options).sum().backward()
    return count


@pytest.mark.parametrize(
    "pattern", [{"block_size": 32}, {"block_size": 64, "local": 2, "stride": 8}]
)
def test_arithmetic_is_the_estimate(pattern):
    """The kernel multiplies the whole of each own block, of which the estimate counts the causal half."""
    S, b = 1000, pattern["block_size"]
    read = pairs(block_sparse_attention, *make_qkv(S, batch=1), **pattern) / (2 * 6)
    share = read / (S * (S + 1) / 2)
    estimate = estimate_block_sparse(seq_len=S, **pattern)
    assert estimate < share <= estimate + (b - 1) / (S + 1) + 1e-9
    assert estimate < 0.4
    # Linear in S without a stride, not with one.
    ratio = [estimate_block_sparse(seq_len=n, block_size=32) * (n + 1) for n in (4096, 8192)]
    assert ratio[1] == pytest.approx(ratio[0], rel=0.02)


def test_one_call_serves_many_blocks():
    """Each call costs some 0.1 ms, and the kernel's backward has one thread per block and key head."""
    q, k, _ = make_qkv(2048, batch=1)
    calls = list(block_sparse._calls(q, k, None, block_size=16))
    assert len(calls) < 2048 / 16 / 6
    assert sorted(torch.cat([query.flatten() for _, query, _, _ in calls]).tolist()) == list(
        range(2048)
    )
    assert max(key.numel() for _, _, key, _ in calls) <= 2048  # what is gathered at a time


def test_other_documents_are_not_multiplied():
    S, documents = 256, torch.arange(256)[None] // 64
    everything = {"block_size": 16, "stride": 1}
    qkv = make_qkv(S, batch=1)
    alone, together = (
        pairs(block_sparse_attention, *qkv, documents=d, **everything) for d in (documents, None)
    )
    assert alone == 4 * pairs(block_sparse_attention, *make_qkv(64, batch=1), **everything)
    assert alone < together / 3
    out = block_sparse_attention(*qkv, documents=documents, **everything)
    for gradient in torch.autograd.grad(out[:, :, 128:192].sum(), qkv[1:]):
        assert (
            gradient[:, :, 128:192].any()
            and not gradient[:, :, :128].any()
            and not gradient[:, :, 192:].any()
        )


def test_memory_grows_with_the_sequence_and_not_with_its_square():
    def saved_and_peak(attention, S, **options):
        qkv = make_qkv(S, batch=1, heads=6, kv_heads=2, width=16)
        with PeakMemory() as memory:
            before = memory.current
            out = attention(*qkv, **options)
            saved = memory.current - before
            out.sum().backward()
        return saved, memory.peak - before

    pattern = {"block_size": 64, "local": 2}
    short, long = (saved_and_peak(block_sparse_attention, S, **pattern) for S in (512, 2048))
    # The output and, in fp32 too, one number per query and head.
    assert short[0] == 4 * 512 * 6 * (16 + 1)
    assert long[0] == 4 * short[0] and long[1] < 4.2 * short[1]
    assert long[1] < 4 * 2048 * 2048 / 3  # a third of one [S, S] in fp32
    assert saved_and_peak(dense, 2048, **pattern)[1] > 4 * 2048 * 2048  # the control


class LargestTensor(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.bytes = max(
            [
                self.bytes,
                *(x.untyped_storage().nbytes() for x in tree_leaves(out) if torch.is_tensor(x)),
            ]
        )
        return out


def loss_and_gradients(model, batch, **options):
    model.zero_grad()
    loss = model(**{"use_cache": False} | batch | options).loss
    loss.backward()
    return loss.item(), gradients(model)


def full_mask(batch, documents=None, **pattern):
    """The reference's mask [B, 1, S, S], which transformers takes as it is."""
    B, S = batch["input_ids"].shape
    mask = block_sparse_mask(seq_len=S, **pattern).expand(B, 1, S, S)
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None])
    return batch | {"attention_mask": mask}


def test_model_equals_its_dense_self(model):
    """Odd lengths, right padding: what the padded queries read does not reach the loss."""
    batch = make_batch()
    for module in model.modules():
        if hasattr(
            module, "scaling"
        ):  # of the scores: each family sets it, and may set it otherwise
            module.scaling *= 1.5
    expected, expected_gradients = loss_and_gradients(model, full_mask(batch, **PATTERN))
    unlike, _ = loss_and_gradients(model, batch)
    assert abs(unlike - expected) > 1e-5  # the pattern matters
    assert apply_block_sparse(model, **PATTERN) is model
    for options in ({}, {"use_cache": True}):  # an empty cache, the default of transformers
        got, got_gradients = loss_and_gradients(model, batch, **options)
        assert got == pytest.approx(expected, rel=1e-6)
        assert_same_gradients(got_gradients, expected_gradients, atol=1e-6, rtol=1e-4)
    model.set_attn_implementation("sdpa")
    assert loss_and_gradients(model, batch)[0] == unlike


def test_packed_rows_are_documents(model):
    ids = torch.randint(1, 128, (2, 30))
    lengths = [[11, 4, 15], [30]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    documents = (positions == 0).cumsum(1)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    expected, expected_gradients = loss_and_gradients(model, full_mask(batch, documents, **PATTERN))
    apply_block_sparse(model, **PATTERN)
    got, got_gradients = loss_and_gradients(model, batch)
    assert got == pytest.approx(expected, rel=1e-6)
    assert_same_gradients(got_gradients, expected_gradients, atol=1e-6, rtol=1e-4)
    for leak in (
        {"use_cache": True},
        {"attention_mask": torch.ones_like(ids)},
    ):  # transformers sees one document
        with pytest.raises(ValueError, match=r"positions restart|window"):
            model(**batch | leak)


def test_no_square_tensor_is_made_for_the_mask(model):
    """Not by transformers either."""
    ids = torch.randint(1, 128, (1, 512))
    positions = torch.arange(512)[None] % 300

    def largest():
        with LargestTensor() as seen:
            model(
                input_ids=ids, labels=ids, position_ids=positions, use_cache=False
            ).loss.backward()
        return seen.bytes

    assert largest() >= 4 * 512 * 512  # the control: a mask in fp32
    apply_block_sparse(model, block_size=32)
    assert largest() <= 4 * 512 * 256  # the activations of the MLP


def test_adapters_checkpointing_autocast_and_deep_copies(model):
    from peft import LoraConfig, get_peft_model

    batch = make_batch()
    plain = copy.deepcopy(model)
    apply_block_sparse(model, **PATTERN)
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_and_gradients(plain, full_mask(batch, **PATTERN))[0]
        assert loss_and_gradients(model, batch)[0] == pytest.approx(expected, rel=5e-3)

    twin = copy.deepcopy(model)
    apply_block_sparse(
        twin, block_size=3, local=1
    )  # another pattern, and the first model keeps its own
    other = loss_and_gradients(twin, batch)[0]
    assert other == pytest.approx(
        loss_and_gradients(plain, full_mask(batch, block_size=3, local=1))[0], rel=1e-6
    )
    expected, expected_gradients = loss_and_gradients(model, batch)
    assert expected == pytest.approx(
        loss_and_gradients(plain, full_mask(batch, **PATTERN))[0], rel=1e-6
    )
    assert loss_and_gradients(copy.deepcopy(model), batch)[0] == expected

    model.gradient_checkpointing_enable()
    again, again_gradients = loss_and_gradients(model, batch)
    assert again == expected
    assert_same_gradients(again_gradients, expected_gradients)

    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = apply_block_sparse(get_peft_model(plain, config), **PATTERN)
    got, adapters = loss_and_gradients(adapted, batch)
    adapted.set_attn_implementation("sdpa")
    expected, expected_gradients = loss_and_gradients(adapted, full_mask(batch, **PATTERN))
    assert got == pytest.approx(expected, rel=1e-6)
    assert adapters and all("lora" in name for name in adapters)
    assert_same_gradients(adapters, expected_gradients, atol=1e-6, rtol=1e-4)


def test_a_saved_model_forgets_the_pattern(llama, tmp_path):
    """The trap of the docstring: if transformers learns to save it, the line can go."""
    from transformers import AutoModelForCausalLM

    apply_block_sparse(llama, **PATTERN).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    batch = make_batch()
    assert apply_block_sparse(loaded, **PATTERN)(**batch).loss == llama(**batch).loss


def test_what_a_model_cannot_do_is_refused(llama):
    with pytest.raises(ValueError, match="capped scores"):
        apply_block_sparse(model_of_shape("tiny-gemma2", device="cpu"), block_size=4)
    with pytest.raises(ValueError, match="'local': 0"):
        apply_block_sparse(llama, block_size=4, local=0)
    ids = torch.randint(1, 128, (2, 9))
    apply_block_sparse(llama, block_size=4)
    left = torch.ones_like(ids)
    left[1, :2] = 0
    with pytest.raises(ValueError, match="on the left"):
        llama(ids, attention_mask=left)
    with pytest.raises(ValueError, match=r"of \[B, S\]"):
        llama(ids, attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="filled KV cache"):
        llama.eval().generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    without = llama.generate(
        ids, max_new_tokens=2, do_sample=False, pad_token_id=0, use_cache=False
    )
    assert without.shape == (2, 11)

    llama.model.layers[0].self_attn.is_causal = False
    with pytest.raises(ValueError, match="only causal"):
        llama(ids)
    llama.config.is_causal = False
    with pytest.raises(ValueError, match="mask of its own"):
        llama(ids)

    mistral = model_of_shape("tiny-mistral", device="cpu")
    mistral.config.sliding_window = 8
    apply_block_sparse(mistral, block_size=4)(
        ids[:, :8]
    )  # the window is as long as the row: no contradiction
    with pytest.raises(ValueError, match="window of 8"):
        mistral(ids)
    gpt2 = model_of_shape("tiny-gpt2", device="cpu")
    for block in gpt2.transformer.h:
        block.attn.attn_dropout.p = 0.1
    apply_block_sparse(gpt2, block_size=4)
    with pytest.raises(ValueError, match="dropout"):
        gpt2(ids)
    assert gpt2.eval()(ids).logits.shape == (2, 9, 128)


def test_bad_input():
    q, k, v = make_qkv(8)
    for wrong in (
        {"block_size": 0},
        {"block_size": 4, "stride": 0},
        {"block_size": 4, "global_blocks": -1},
    ):
        for function in (
            block_sparse_attention,
            lambda *qkv, **options: estimate_block_sparse(seq_len=8, **options),
        ):
            with pytest.raises(ValueError, match=r"'block_size': .*give 1 or more"):
                function(q, k, v, **wrong)
    with pytest.raises(ValueError, match=r"twice \[B, K, S, E\]"):
        block_sparse_attention(q, k[:, :, :7], v[:, :, :7], block_size=4)
    with pytest.raises(ValueError, match=r"twice \[B, K, S, E\]"):
        block_sparse_attention(q[:, :5], k, v, block_size=4)
    with pytest.raises(ValueError, match="one id of a document per token"):
        block_sparse_attention(q, k, v, block_size=4, documents=torch.zeros(2, 7))
    with pytest.raises(ValueError, match="device meta"):
        block_sparse_attention(q.to("meta"), k.to("meta"), v.to("meta"), block_size=4)


@pytest.mark.parametrize("documents", [None, "sorted"])
@pytest.mark.parametrize(
    "pattern", [{"block_size": 4}, {"block_size": 96, "local": 1, "stride": 2}]
)
def test_pattern_of_the_cuda_arm(monkeypatch, pattern, documents):
    """FlexAttention runs on a CPU, forward and not compiled: its values, and the tiles that its mask leaves out."""
    compiled = torch.compile  # which FlexAttention calls itself, with options
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **options: compiled(function, **options) if options else function,
    )
    create, masks = block_sparse.create_block_mask, []
    monkeypatch.setattr(
        block_sparse,
        "create_block_mask",
        lambda *a, **b: masks.append(create(*a, **b)) or masks[-1],
    )
    q, k, v = (x.detach() for x in make_qkv(300))
    ids = make_documents(documents, 300)
    got = block_sparse._flex(q, k, v, ids, 0.4, pattern)
    torch.testing.assert_close(
        got, dense(q, k, v, documents=ids, scale=0.4, **pattern), atol=2e-6, rtol=2e-6
    )
    allowed = block_sparse_mask(seq_len=300, **pattern)[None]
    allowed = allowed if ids is None else allowed & (ids[:, :, None] == ids[:, None])
    tiles = torch.nn.functional.max_pool2d(allowed[:, None].float(), 128, ceil_mode=True)
    assert torch.equal(masks[0].to_dense().float(), tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [None, "sorted"])
@pytest.mark.parametrize(
    "pattern", [{"block_size": 128}, {"block_size": 96, "local": 2, "stride": 3}]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 5e-2)])
def test_on_a_gpu(dtype, tolerance, pattern, documents):
    qkv = make_qkv(1100, width=64, dtype=dtype, device="cuda")
    ids = make_documents(documents, 1100)
    options = pattern | {"documents": None if ids is None else ids.cuda()}
    for got, expected in zip(
        run(block_sparse_attention, qkv, **options), run(dense, qkv, **options)
    ):
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
