"""Blocks equal a dense mask, documents stay apart, and what has no kernel is said."""

import copy

import pytest
import torch

from recipes_lib.attention import _compiled_flex as compiled_flex
from recipes_lib.attention import block_sparse
from recipes_lib.attention.block_sparse import (
    Pattern,
    apply_block_sparse,
    block_sparse_attention,
    block_sparse_mask,
    plain_block_sparse_attention,
    predicted_share_of_pairs,
)
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import model_of_shape
from tests.attention.qkv import attention_under, random_qkv, with_gradients
from tests.conftest import assert_same_gradients, gradients, make_batch
from tests.small_models import small_model

PATTERNS = [
    {"block_size": 4},
    {"block_size": 5, "local": 2, "global_blocks": 0, "stride": 3},
    {"block_size": 7, "stride": 1},  # everything
    {"block_size": 64},  # one block
]
PATTERN = {"block_size": 4, "local": 2, "global_blocks": 1, "stride": 3}


def make_documents(kind, seq_len, batch=2):
    if kind is None:
        return None
    if kind == "sorted":
        return (torch.rand(batch, seq_len) < 0.15).cumsum(1)
    return torch.randint(0, 3, (batch, seq_len))  # ids that come and go


def dense(q, k, v, *, documents=None, scale=None, **pattern):
    """The reference, under the whole mask."""
    mask = block_sparse_mask(seq_len=q.shape[2], **pattern).to(q.device)
    if documents is not None:
        mask = (mask & (documents[:, :, None] == documents[:, None]))[:, None]
    return attention_under(mask, q, k, v, scale=scale)


def assert_close(got, expected, tolerance):
    for value, reference in zip(got, expected):
        assert value.dtype is reference.dtype
        torch.testing.assert_close(value, reference, atol=tolerance, rtol=tolerance)


# --- the numbers -----------------------------------------------------------------------------


def test_the_idea_is_the_technique():
    """A key that one of the two reads too much, or the mean of another group of heads."""
    qkv = random_qkv(2, 6, 2, 37, 8, torch.float64)
    expected = with_gradients(plain_block_sparse_attention, qkv, **PATTERN)
    assert_close(with_gradients(block_sparse_attention, qkv, **PATTERN), expected, 1e-13)


@pytest.mark.parametrize("documents", [None, "any"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equal_to_dense_attention(pattern, documents):
    """With documents, a scale of its own, and a row of one token."""
    for seq_len in (1, 37):
        options = pattern | {"documents": make_documents(documents, seq_len), "scale": 0.4}
        qkv = random_qkv(2, 6, 2, seq_len, 8, torch.float64)
        expected = with_gradients(dense, qkv, **options)
        assert_close(with_gradients(block_sparse_attention, qkv, **options), expected, 1e-13)


def test_gradients_of_keys_that_many_read_are_summed_in_fp32():
    """In bf16 the sum over 64 blocks would lose what the later ones add."""
    qkv = random_qkv(1, 6, 2, 512, 8, torch.bfloat16)
    pattern = {"block_size": 8, "local": 1}
    exact = with_gradients(dense, [x.detach().double().requires_grad_() for x in qkv], **pattern)
    ours = with_gradients(block_sparse_attention, qkv, **pattern)
    reference = with_gradients(dense, qkv, **pattern)
    for which in (2, 3):
        error = (ours[which] - exact[which]).norm()
        assert error < 1.1 * (reference[which] - exact[which]).norm()


# --- the pattern -----------------------------------------------------------------------------


def test_the_predicted_share_is_that_of_the_mask():
    """The mistake: the kernel's future half of each own block is counted, or a last short block."""
    for pattern in PATTERNS:
        mask = block_sparse_mask(seq_len=100, **pattern)
        share = mask.sum().item() / (100 * 101 / 2)
        assert predicted_share_of_pairs(seq_len=100, **pattern) == pytest.approx(share)


# --- the work --------------------------------------------------------------------------------


def saved_and_peak(attention, S, **options):
    qkv = random_qkv(1, 6, 2, S, 16)
    with PeakMemory() as memory:
        before = memory.current
        out = attention(*qkv, **options)
        saved = memory.current - before
        out.sum().backward()
    return saved, memory.peak - before


def test_memory_grows_with_the_sequence_and_not_with_its_square():
    """A mask [S, S], or scores that are kept."""
    pattern = {"block_size": 64, "local": 2}
    short, short_peak = saved_and_peak(block_sparse_attention, 512, **pattern)
    long, long_peak = saved_and_peak(block_sparse_attention, 2048, **pattern)
    # The output and, in fp32 too, one number per query and head.
    assert short == 4 * 512 * 6 * (16 + 1)
    assert long == 4 * short
    assert long_peak < 4.2 * short_peak
    assert long_peak < 4 * 2048 * 2048 / 3  # a third of one [S, S] in fp32
    _, dense_peak = saved_and_peak(dense, 1024, **pattern)
    assert dense_peak > 4 * 1024 * 1024  # the control


# --- in a model ------------------------------------------------------------------------------


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


def test_model_equals_its_dense_self():
    """Odd lengths, right padding: what the padded queries read does not reach the loss."""
    model = model_of_shape("tiny-llama", device="cpu")
    batch = make_batch()
    for module in model.modules():
        if hasattr(module, "scaling"):  # of the scores: each family may set another
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


def test_packed_rows_are_documents(llama):
    """Beside a cache or a mask transformers sees one document, and they would leak."""
    model = llama
    ids = torch.randint(1, 128, (2, 30))
    rows = [torch.cat([torch.arange(11), torch.arange(4), torch.arange(15)]), torch.arange(30)]
    positions = torch.stack(rows)
    documents = (positions == 0).cumsum(1)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    expected, expected_gradients = loss_and_gradients(model, full_mask(batch, documents, **PATTERN))
    apply_block_sparse(model, **PATTERN)
    got, got_gradients = loss_and_gradients(model, batch)
    assert got == pytest.approx(expected, rel=1e-6)
    assert_same_gradients(got_gradients, expected_gradients, atol=1e-6, rtol=1e-4)
    for leak in ({"use_cache": True}, {"attention_mask": torch.ones_like(ids)}):
        with pytest.raises(ValueError, match=r"positions restart|window"):
            model(**batch | leak)


def test_autocast():
    """The norms of Qwen3 leave q and k in fp32, beside a v in bf16."""
    qwen3 = model_of_shape("tiny-qwen3", device="cpu")
    batch = make_batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = loss_and_gradients(qwen3, full_mask(batch, **PATTERN))
        got, _ = loss_and_gradients(apply_block_sparse(qwen3, **PATTERN), batch)
    assert got == pytest.approx(expected, rel=5e-3)


def test_copies_have_patterns_of_their_own(llama):
    """One pattern for all models of a process."""
    batch = make_batch()
    expected, _ = loss_and_gradients(llama, full_mask(batch, **PATTERN))
    unlike, _ = loss_and_gradients(llama, full_mask(batch, block_size=3, local=1))
    apply_block_sparse(llama, **PATTERN)
    twin = copy.deepcopy(llama)
    assert loss_and_gradients(twin, batch)[0] == pytest.approx(expected, rel=1e-6)
    apply_block_sparse(twin, block_size=3, local=1)
    assert loss_and_gradients(twin, batch)[0] == pytest.approx(unlike, rel=1e-6)
    assert loss_and_gradients(llama, batch)[0] == pytest.approx(expected, rel=1e-6)


# --- what is refused -------------------------------------------------------------------------


def test_scores_that_few_tokens_do_not_show_are_refused():
    """A cap of 50 changes nothing in a new model; an indexer reads all of 16 keys."""
    with pytest.raises(ValueError, match="caps its scores"):
        apply_block_sparse(model_of_shape("tiny-gemma2", device="cpu"), block_size=4)
    with torch.device("meta"):
        model = small_model("DeepseekV32", q_lora_rank=16)
    with pytest.raises(ValueError, match="indexer selects"):
        apply_block_sparse(model, block_size=4)


def test_documents_are_refused_where_something_carries_them_on():
    """Attention knows the borders, a convolution does not, and the loss is another one."""
    small = small_model("Lfm2", layer_types=["conv", "full_attention"], num_key_value_heads=2)
    model = apply_block_sparse(small, block_size=4, stride=1)
    ids = torch.arange(1, 13)[None]
    positions = torch.tensor([[*range(7), *range(5)]])
    with pytest.raises(ValueError, match="give one document per row"):
        model(ids, position_ids=positions, use_cache=False)
    padded = torch.tensor([[1] * 9 + [0] * 3])
    model(ids, attention_mask=padded, use_cache=False)  # padding is no second document
    model(ids, use_cache=False)


def test_batches_that_it_cannot_take_are_refused(llama):
    """Padding on the left moves the blocks, and a cache holds none."""
    ids = torch.randint(1, 128, (2, 9))
    apply_block_sparse(llama, block_size=4)
    left = torch.ones_like(ids)
    left[1, :2] = 0
    with pytest.raises(ValueError, match="on the left"):
        llama(ids, attention_mask=left)
    with pytest.raises(ValueError, match=r"of \[B, S\]"):
        llama(ids, attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool))
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(ValueError, match="filled KV cache"):
        llama.eval().generate(ids, **options)
    assert llama.generate(ids, use_cache=False, **options).shape == (2, 11)


def test_what_a_model_does_beside_the_pattern_is_refused():
    """Its own window, which the pattern would leave out; and dropout, which has no kernel."""
    ids = torch.randint(1, 128, (2, 20))
    mistral = model_of_shape("tiny-mistral", device="cpu")
    mistral.config.sliding_window = 18
    apply_block_sparse(mistral, block_size=4)
    mistral(ids[:, :18])  # the window is as long as the row: no contradiction
    with pytest.raises(ValueError, match="window of 18"):
        mistral(ids)

    gpt2 = model_of_shape("tiny-gpt2", device="cpu")
    for block in gpt2.transformer.h:
        block.attn.attn_dropout.p = 0.1
    apply_block_sparse(gpt2, block_size=4)
    with pytest.raises(ValueError, match="dropout"):
        gpt2(ids)
    assert gpt2.eval()(ids).logits.shape == (2, 20, 128)


# --- the kernel for CUDA ---------------------------------------------------------------------


def test_pattern_of_the_cuda_arm(monkeypatch):
    """FlexAttention runs on a CPU, forward and not compiled: its values, and the tiles it skips."""
    create = compiled_flex.create_block_mask
    masks = []

    def create_and_keep(*args, **options):
        masks.append(create(*args, **options))
        return masks[-1]

    monkeypatch.setattr(compiled_flex, "_compiled_by", lambda function, backend: function)
    monkeypatch.setattr(compiled_flex, "create_block_mask", create_and_keep)
    q, k, v = (x.detach() for x in random_qkv(2, 6, 2, 300, 8))
    pattern = {"block_size": 96, "local": 1, "stride": 2}
    ids = make_documents("sorted", 300)
    got = block_sparse._block_sparse_by_flex(q, k, v, ids, 0.4, Pattern(**pattern))
    expected = dense(q, k, v, documents=ids, scale=0.4, **pattern)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)
    allowed = block_sparse_mask(seq_len=300, **pattern)[None] & (ids[:, :, None] == ids[:, None])
    tiles = torch.nn.functional.max_pool2d(allowed[:, None].float(), 128, ceil_mode=True)
    assert torch.equal(masks[0].to_dense().float(), tiles)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pattern", [{"block_size": 128}, {"block_size": 96, "local": 2, "stride": 3}]
)
def test_on_a_gpu(pattern):
    """Only a GPU runs the compiled kernel and its backward; in fp16 on a T4."""
    qkv = random_qkv(2, 6, 2, 1100, 64, machine().compute_dtype, "cuda")
    options = pattern | {"documents": make_documents("sorted", 1100).cuda()}
    expected = with_gradients(dense, qkv, **options)
    assert_close(with_gradients(block_sparse_attention, qkv, **options), expected, 5e-2)
