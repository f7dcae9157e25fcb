import itertools

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from recipes_lib.core.data import IGNORED
from recipes_lib.core.model import model_of_shape
from recipes_lib.training.sequence_packing import (
    best_fit,
    check_document_mask,
    collate_packed,
    document_mask,
    fill_rows,
    pack_sequences,
)


def make_rows(lengths, vocab=128):
    rows = []
    for n in lengths:
        ids = torch.randint(1, vocab, (n,)).tolist()
        prompt = n // 3
        rows.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return rows


def summed_loss(model, batch, **inputs):
    """The reference: every logit, labels shifted by one, summed in fp32."""
    labels = batch["labels"][:, 1:].flatten()
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"} | inputs
    logits = model(**{"use_cache": False} | inputs).logits[:, :-1].float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("leak", ["no positions", "one document's mask", "cache"])
def test_leakage_between_documents_changes_the_loss(llama, leak):
    """The mistake: one of three ways to lose the borders, each without an error."""
    batch = collate_packed(pack_sequences(make_rows([9, 8, 7]), length=24), pad_token_id=0)
    right = summed_loss(llama, batch).item()
    wrong = {
        "no positions": {"position_ids": None},
        "one document's mask": {"attention_mask": torch.ones_like(batch["input_ids"])},
        "cache": {"use_cache": True},
    }[leak]
    assert abs(summed_loss(llama, batch, **wrong).item() - right) > 1e-3 * right


def test_the_last_token_of_a_neighbour_predicts_nothing():
    """The mistake: the first token of a document is learnt from the end of another one."""
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    (pack,) = pack_sequences(rows, length=8)
    assert pack["labels"] == [IGNORED, 6, 7, IGNORED, 9]
    assert pack["position_ids"] == [0, 1, 2, 0, 1]
    assert pack["input_ids"] == [5, 6, 7, 8, 9]


def test_best_fit_is_a_partition_that_fills_the_rows():
    """The mistake: the quick search finds another row than the plain one, or loses a document."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (500,), generator=generator).tolist()
    bins = best_fit(lengths, length=256)
    assert sorted(itertools.chain.from_iterable(bins)) == list(range(500))
    for members in bins:
        assert sum(lengths[i] for i in members) <= 256
    least = -(-sum(lengths) // 256)  # what any packing needs
    assert len(bins) <= 1.03 * least
    # 3 goes to the fuller row that still has room.
    assert best_fit([5, 4, 3, 2], length=7) == [[0, 3], [1, 2]]
    assert bins == fill_rows(lengths, length=256)


def test_positions_that_restart_mean_the_document_mask(llama):
    """The mistake: transformers makes another mask of the positions than the one by hand."""
    packs = pack_sequences(make_rows([9, 8, 7, 5]), length=24)
    batch = collate_packed(packs, pad_token_id=0)
    mask = document_mask(batch["position_ids"])  # [P, L, L]
    # The second token of the second document sees the first one and itself.
    border = int((batch["position_ids"][0] == 0).nonzero()[1])
    assert mask[0, border + 1].nonzero().flatten().tolist() == [border, border + 1]

    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    packed = llama(**inputs, use_cache=False).logits
    by_hand = llama(**inputs, attention_mask=mask[:, None], use_cache=False).logits
    torch.testing.assert_close(packed, by_hand)


def test_check_document_mask():
    """The mistake: a model that leaks, or whose positions go on, is trained on packed rows."""
    model = model_of_shape("tiny-gpt2", device="cpu")  # with absolute positions
    batch = collate_packed(pack_sequences(make_rows([9, 8, 7]), length=24), pad_token_id=0)
    check_document_mask(model, batch)
    assert model.training
    forward = model.forward

    def without_borders(position_ids, **inputs):
        return forward(**inputs)

    def positions_that_go_on(input_ids, position_ids, use_cache):
        mask = document_mask(position_ids)[:, None]
        return forward(input_ids=input_ids, attention_mask=mask, use_cache=False)

    def not_a_number(**inputs):
        return CausalLMOutput(logits=forward(**inputs).logits * float("nan"))

    for wrong, message in [
        (without_borders, "sees its neighbour"),
        (not_a_number, "sees its neighbour"),  # a comparison with NaN proves nothing
        (positions_that_go_on, "does not begin its positions again"),
    ]:
        model.forward = wrong
        with pytest.raises(RuntimeError, match=message):
            check_document_mask(model, batch)


def test_rows_that_cannot_be_packed():
    """The mistake: a document is cut, or rows are packed again and their documents leak."""
    with pytest.raises(ValueError, match="row 1 has 9 tokens"):
        pack_sequences(make_rows([3, 9, 4]), length=8)
    packs = pack_sequences(make_rows([3, 4]), length=8)
    with pytest.raises(ValueError, match="row 0 is packed"):
        pack_sequences(packs, length=8)
