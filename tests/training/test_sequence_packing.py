import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from recipes_lib.core.data import IGNORED, collate, load_instructions
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import load_tokenizer, model_of_shape
from recipes_lib.training.sequence_packing import (
    best_fit,
    check_document_mask,
    collate_packed,
    estimate_sequence_packing,
    pack_sequences,
    padded_tokens,
)
from tests.conftest import assert_same_gradients, gradients


def make_rows(lengths, vocab=128):
    rows = []
    for n in lengths:
        ids = torch.randint(1, vocab, (n,)).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORED] * (n // 3) + ids[n // 3 :]})
    return rows


def summed_loss(model, batch, **inputs):
    """The reference: every logit, labels shifted by one, summed in fp32."""
    labels = batch["labels"][:, 1:].flatten()
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"} | inputs
    logits = model(**{"use_cache": False} | inputs).logits[:, :-1].float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_loss_and_gradients_are_those_of_the_documents_alone(tiny, dtype):
    """Odd lengths, several documents per row, a row with padding; Gemma's window of attention included."""
    tiny = tiny.to(dtype)
    rows = make_rows([7, 3, 16, 5, 11, 1, 9])
    packs = pack_sequences(rows, length=23, seed=0)
    batch = collate_packed(packs, pad_token_id=0, length=25)
    assert len(packs) < len(rows) and (batch["labels"][:, -1] == IGNORED).any()

    total = 0.0
    for row in rows:
        alone = {name: torch.tensor([values]) for name, values in row.items()}
        if len(row["input_ids"]) > 1:  # one token predicts nothing
            loss = summed_loss(tiny, alone)
            loss.backward()
            total += loss.item()
    expected = gradients(tiny)
    tiny.zero_grad()
    packed = summed_loss(tiny, batch)
    packed.backward()
    if dtype is torch.float32:
        assert packed.item() == pytest.approx(total, rel=1e-5)
        assert_same_gradients(gradients(tiny), expected, atol=1e-5, rtol=1e-4)
    else:
        assert packed.item() == pytest.approx(total, rel=1e-2)


@pytest.mark.parametrize("leak", ["no positions", "one document's mask", "cache"])
def test_leakage_between_documents_changes_the_loss(llama, leak):
    """What the positions are there for: three ways to lose them, each without an error."""
    batch = collate_packed(pack_sequences(make_rows([9, 8, 7]), length=24), pad_token_id=0)
    right = summed_loss(llama, batch).item()
    wrong = {
        "no positions": {"position_ids": None},
        "one document's mask": {"attention_mask": torch.ones_like(batch["input_ids"])},
        "cache": {"use_cache": True},
    }[leak]
    assert abs(summed_loss(llama, batch, **wrong).item() - right) > 1e-3 * right


def test_the_last_token_of_a_neighbour_predicts_nothing(llama):
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    (pack,) = pack_sequences(rows, length=8)
    assert pack["labels"] == [IGNORED, 6, 7, IGNORED, 9]
    assert pack["position_ids"] == [0, 1, 2, 0, 1]
    assert pack["input_ids"] == [5, 6, 7, 8, 9]


def test_best_fit_is_a_partition_that_fills_the_rows():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (500,), generator=generator).tolist()
    bins = best_fit(lengths, length=256)
    assert sorted(i for members in bins for i in members) == list(range(500))
    assert max(sum(lengths[i] for i in members) for members in bins) <= 256
    assert len(bins) <= 1.03 * -(
        -sum(lengths) // 256
    )  # the least that any packing could need, and 3 %
    assert best_fit([5, 4, 3, 2], length=7) == [
        [0, 3],
        [1, 2],
    ]  # 3 goes to the fuller row that still has room


def test_the_same_seed_gives_the_same_order():
    rows = make_rows([5, 9, 13, 2, 20, 20, 20])
    assert pack_sequences(rows, length=22, seed=3) == pack_sequences(rows, length=22, seed=3)
    assert pack_sequences(rows, length=22, seed=3) != pack_sequences(rows, length=22, seed=4)


def test_estimate_is_the_ratio_of_processed_tokens_and_of_saved_activations():
    """Real instruction pairs: what is processed per useful token, and what a step keeps for backward."""
    rows = list(load_instructions(load_tokenizer(), max_tokens=160, limit=64))
    lengths = [len(row["input_ids"]) for row in rows]
    packs = pack_sequences(rows, length=320)
    packed = collate_packed(packs, pad_token_id=0)
    ratio = padded_tokens(lengths, batch_size=8) / packed["input_ids"].numel()
    estimate = estimate_sequence_packing(
        lengths, length=320, batch_size=8, packs_per_batch=len(packs)
    )
    assert estimate == pytest.approx(ratio)
    assert ratio > 1.2

    model = model_of_shape("tiny-gpt2", layers=16, device="cpu")
    vocab = model.config.vocab_size
    few = [row | {"input_ids": [token % vocab for token in row["input_ids"]]} for row in rows]
    few_packs = pack_sequences(few, length=320)

    def saved(batch):
        with PeakMemory() as memory:
            before = memory.current
            # Without positions, and so without the mask, which `estimate_packed_attention` counts.
            logits = model(batch["input_ids"], use_cache=False).logits
            kept = memory.current - before
        del logits
        return kept

    padded = [saved(collate(few[start : start + 8], pad_token_id=0)) for start in range(0, 64, 8)]
    one_by_one = [saved(collate_packed([pack], pad_token_id=0)) for pack in few_packs]
    ratio = estimate_sequence_packing(lengths, length=320, batch_size=8)
    assert sum(padded) / sum(one_by_one) == pytest.approx(ratio, rel=0.1)


def test_check_document_mask(tiny):
    batch = collate_packed(pack_sequences(make_rows([9, 8, 7]), length=24), pad_token_id=0)
    check_document_mask(tiny, batch)
    assert tiny.training
    forward = tiny.forward
    tiny.forward = lambda position_ids, **inputs: forward(
        **inputs
    )  # a model that does not know the borders
    with pytest.raises(RuntimeError, match="sees its neighbour"):
        check_document_mask(tiny, batch)
    tiny.forward = lambda **inputs: CausalLMOutput(logits=forward(**inputs).logits * float("nan"))
    with pytest.raises(RuntimeError, match="sees its neighbour"):
        check_document_mask(tiny, batch)
    with pytest.raises(ValueError, match="no border to check"):
        check_document_mask(
            tiny,
            collate_packed(pack_sequences(make_rows([9]), length=24), pad_token_id=0, length=9),
        )


def test_bad_input():
    with pytest.raises(ValueError, match="data set is empty"):
        pack_sequences([], length=8)
    with pytest.raises(ValueError, match="row 1 has 9 tokens"):
        pack_sequences(make_rows([3, 9, 4]), length=8)
    with pytest.raises(ValueError, match="row 0 has 0 tokens"):
        pack_sequences([{"input_ids": [], "labels": []}], length=8)
    with pytest.raises(ValueError, match="what pack_sequences returned"):
        collate_packed(make_rows([3]), pad_token_id=0)
    with pytest.raises(ValueError, match="length=2"):
        collate_packed(pack_sequences(make_rows([3]), length=8), pad_token_id=0, length=2)


@pytest.mark.gpu
def test_on_a_gpu():
    model = model_of_shape("tiny-llama", dtype=torch.bfloat16, device="cuda")
    rows = make_rows([7, 3, 16, 5])
    batch = collate_packed(pack_sequences(rows, length=23), pad_token_id=0, device="cuda")
    check_document_mask(model, batch)
    alone = [{name: torch.tensor([v], device="cuda") for name, v in row.items()} for row in rows]
    expected = sum(summed_loss(model, row).item() for row in alone)
    assert summed_loss(model, batch).item() == pytest.approx(expected, rel=1e-2)
