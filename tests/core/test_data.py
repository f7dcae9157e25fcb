import json

import pytest
import torch

from recipes_lib.core.data import (
    IGNORED,
    _docstring_pairs,
    _modules,
    batches,
    collate,
    decode_with_mask,
    evaluate,
    load_instructions,
    load_text,
    tokenize_pair,
)
from recipes_lib.core.model import load_tokenizer
from tests.conftest import make_batch


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def test_split_by_module_is_deterministic_and_disjoint():
    names = {split: {path.parts for path in _modules(split)} for split in ("train", "validation")}
    assert names["train"] and names["validation"] and not names["train"] & names["validation"]
    assert _modules("train") == _modules("train")
    prompts = [{p["prompt"] for p in _docstring_pairs(split)} for split in ("train", "validation")]
    assert len(prompts[0]) > 1000 and len(prompts[1]) > 100 and not prompts[0] & prompts[1]


def test_loss_is_on_the_answer_only(tokenizer):
    row = tokenize_pair(tokenizer, "Say hello.", "Hello, world.")
    answer = [token for token in row["labels"] if token != IGNORED]
    assert tokenizer.decode(answer) == "Hello, world.<|im_end|>"
    assert row["input_ids"][-len(answer) :] == answer  # not shifted: the model does that
    shown = decode_with_mask(row, tokenizer)
    assert shown.startswith("⟦<|im_start|>") and shown.endswith("assistant\n⟧Hello, world.<|im_end|>")


def test_instructions(tokenizer):
    data = load_instructions(tokenizer, max_tokens=96, limit=20)
    again = load_instructions(tokenizer, max_tokens=96, limit=20)
    assert len(data) == 20 and data[:] == again[:]
    assert max(map(len, data["input_ids"])) <= 96
    assert "docstring of this Python function" in decode_with_mask(data[0], tokenizer)


def test_own_pairs_and_files(tokenizer, tmp_path):
    pairs = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": " "}]
    assert len(load_instructions(tokenizer, dataset=pairs)) == 1  # the one without an answer is left out
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, pairs)))
    assert len(load_instructions(tokenizer, dataset=str(file))) == 1
    for source in (pairs, str(file)):  # the same rows would be trained on and held out
        with pytest.raises(ValueError, match="have no splits"):
            load_instructions(tokenizer, split="validation", dataset=source)


def test_tokenizer_without_template(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert decode_with_mask(tokenize_pair(tokenizer, "a", "b"), tokenizer) == "⟦a\n\n⟧b<|im_end|>"


def test_collate_and_batches(tokenizer):
    rows = [{"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3]}, {"input_ids": [4], "labels": [4]}]
    batch = collate(rows, pad_token_id=9, length=4)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9], [4, 9, 9, 9]]
    assert set(batch) == {"input_ids", "labels"}
    assert batch["labels"].tolist() == [[IGNORED, 2, 3, IGNORED], [4, IGNORED, IGNORED, IGNORED]]
    stream = batches(rows * 2, batch_size=3, pad_token_id=9)
    assert next(stream)["input_ids"].shape == next(stream)["input_ids"].shape == (3, 3)


def test_evaluate_is_the_mean_over_tokens(llama):
    """Rows of unequal lengths in batches of unequal size, without a mask: the loss of all targets at once, masked."""
    batch = make_batch(5)
    rows = []
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        rows.append({"input_ids": ids[mask.bool()].tolist(), "labels": labels[mask.bool()].tolist()})
    with torch.no_grad():
        expected = llama(**batch).loss.item()
    assert evaluate(llama, rows, pad_token_id=0, batch_size=2) == pytest.approx(expected, rel=1e-5)
    assert llama.training


def test_text():
    text = load_text(split="validation")
    assert len(text) > 100_000 and "def " in text


def test_bad_input(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="choose one of train, validation"):
        load_instructions(tokenizer, split="test")
    with pytest.raises(ValueError, match="1 or more"):
        load_instructions(tokenizer, max_tokens=0)
    with pytest.raises(ValueError, match="no pair is left"):
        load_instructions(tokenizer, dataset=[{"prompt": "a", "completion": ""}])
    with pytest.raises(ValueError, match="no pair is left"):
        load_instructions(tokenizer, max_tokens=5, limit=3, dataset=[{"prompt": "long " * 9, "completion": "b"}])
    with pytest.raises(ValueError, match="`prompt` and `completion` are needed"):
        load_instructions(tokenizer, dataset=[{"text": "a"}])
    with pytest.raises(ValueError, match="cannot load split"):
        load_instructions(tokenizer, dataset=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="nothing to learn"):
        tokenize_pair(tokenizer, "a", "")
    with pytest.raises(ValueError, match="cannot pad"):
        collate([], pad_token_id=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        next(batches([{"input_ids": [1], "labels": [1]}], batch_size=0, pad_token_id=0))
