"""Logits of the answers only give the loss and gradients of all logits; labels are checked."""

import pytest
import torch

from recipes_lib.core.data.tokens_and_labels import IGNORED, tokenize_chat
from recipes_lib.core.model import load_tokenizer, model_of_shape
from recipes_lib.fine_tuning.completion_only_loss import (
    check_labels,
    completion_only_loss,
    plain_answer_loss,
)
from recipes_lib.fine_tuning.lora import apply_lora
from tests.conftest import assert_same_gradients, gradients, make_batch


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


# --- the loss -----------------------------------------------------------------------------------


CASES = [
    ("tiny-gemma2", (4, 23), torch.float32),  # which caps its logits
    ("tiny-llama", (3, 2), torch.float32),
    ("tiny-llama", (4, 23), torch.bfloat16),
]


@pytest.mark.parametrize(("family", "shape", "dtype"), CASES)
def test_equals_the_loss_over_all_logits(family, shape, dtype):
    """The mistake: a position that another row learns from is left out, or counted."""
    tiny = model_of_shape(family, dtype=dtype, device="cpu")
    batch = make_batch(*shape)
    batch["labels"][0, -1] = batch["input_ids"][0, -1]  # at least one target
    # Padding stands on the right, where no target looks: without the mask both see the same.
    expected = plain_answer_loss(tiny, batch)
    expected.backward()
    expected_gradients = gradients(tiny)
    tiny.zero_grad()
    loss = completion_only_loss(tiny, batch)
    loss.backward()
    if dtype is torch.float32:
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert_same_gradients(gradients(tiny), expected_gradients, atol=2e-5, rtol=1e-4)
    else:
        assert loss.item() == pytest.approx(expected.item(), rel=1e-2)


def test_with_adapters(llama, batch):
    """The mistake: peft's wrapper, which has another signature, is asked for `logits_to_keep`."""
    expected = completion_only_loss(llama, batch).item()
    model = apply_lora(llama, rank=2)
    assert completion_only_loss(model, batch).item() == pytest.approx(expected, rel=1e-6)


# --- the labels ---------------------------------------------------------------------------------


def test_every_answer_of_a_conversation_is_learnt_and_nothing_else(tokenizer):
    """The mistake: only the last answer is learnt, or the template with it."""
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "And 2 + 2?"},
        {"role": "assistant", "content": "4, of course."},
    ]
    (row,) = tokenize_chat(tokenizer, chat)
    learnt = [
        token
        for token, label in zip(row["input_ids"], row["labels"], strict=True)
        if label != IGNORED
    ]
    assert tokenizer.decode(learnt) == "3<|im_end|>4, of course.<|im_end|>"
    whole = tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")
    assert row["input_ids"] == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert 0 < check_labels([row], tokenizer) < 0.5


@pytest.mark.parametrize(
    ("problem", "match"),
    [
        ("shifted", "has shifted labels"),
        ("unmasked", "learns tokens of the template"),
        ("no end", "does not learn its end mark"),
        ("masked", "has no target"),
        ("only the first", "has no target"),
        ("foreign", "learns other tokens"),
    ],
)
def test_check_labels_refuses_what_trains_silently(tokenizer, problem, match):
    """The mistake: labels that teach the prompt, the token after the next, or never to stop."""
    (good,) = tokenize_chat(tokenizer, chat_of(3))
    (row,) = tokenize_chat(tokenizer, chat_of(4))
    ids = row["input_ids"]
    labels = row["labels"]
    end = tokenizer.eos_token_id
    row["labels"] = {
        "shifted": [*labels[1:], IGNORED],
        "unmasked": list(ids),
        # As a mask of padding does, where the padding token is the end mark.
        "no end": [IGNORED if label == end else label for label in labels],
        "masked": [IGNORED] * len(ids),
        "only the first": [ids[0]] + [IGNORED] * (len(ids) - 1),
        "foreign": [label if label == IGNORED else label + 1 for label in labels],
    }[problem]
    with pytest.raises(ValueError, match=f"row 1 {match}"):
        check_labels([good, row], tokenizer)


def test_check_labels_looks_at_the_end_mark_of_every_answer(tokenizer):
    """The mistake: only the last answer of a row learns to stop."""
    (row,) = tokenize_chat(tokenizer, chat_of(3) + chat_of(4))
    first = row["labels"].index(tokenizer.eos_token_id)
    row["labels"] = [IGNORED if i == first else label for i, label in enumerate(row["labels"])]
    with pytest.raises(ValueError, match="row 0 does not learn its end mark"):
        check_labels([row], tokenizer)


def test_check_labels_accepts_base_models_whose_text_ends_otherwise_than_an_answer():
    """The mistake: <|im_end|> is taken for a token of the template (base models of Qwen)."""
    tokenizer = load_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    assert check_labels(tokenize_chat(tokenizer, chat_of(3)), tokenizer) > 0


def chat_of(n):
    return [
        {"role": "user", "content": f"Count to {n}."},
        {"role": "assistant", "content": "one two three four"},
    ]


def test_a_model_with_a_loss_of_its_own_is_refused(llama, batch):
    """The mistake: a router's auxiliary loss is left out without a word."""
    forward = llama.forward

    def with_auxiliary_loss(logits_to_keep=0, **inputs):
        output = forward(logits_to_keep=logits_to_keep, **inputs)
        output.aux_loss = torch.tensor(1.0)
        return output

    llama.forward = with_auxiliary_loss
    with pytest.raises(ValueError, match="output_router_logits = False"):
        completion_only_loss(llama, batch)


def test_batches_and_models_without_what_is_needed(llama, batch):
    """The mistake: a mean over no targets is NaN; a model ignores what it should keep."""
    with pytest.raises(ValueError, match="no token to train on"):
        completion_only_loss(llama, batch | {"labels": torch.full_like(batch["labels"], IGNORED)})
    llama.forward = lambda input_ids, use_cache: None
    with pytest.raises(ValueError, match="no logits_to_keep"):
        completion_only_loss(llama, batch)
