import pytest
import torch

from recipes_lib.core.data import IGNORED, load_instructions, tokenize_chat, tokenize_pair
from recipes_lib.core.measure import measure
from recipes_lib.core.model import load_tokenizer, model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.fine_tuning.completion_only_loss import (
    check_labels,
    completion_only_loss,
    estimate_completion_only_loss,
)
from tests.conftest import assert_same_gradients, gradients, make_batch


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def reference(model, batch):
    logits = model(
        **{name: t for name, t in batch.items() if name != "labels"}, use_cache=False
    ).logits
    labels = batch["labels"][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum"
    )


@pytest.mark.parametrize("shape", [(1, 23), (4, 23), (3, 2), (2, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_loss_over_all_logits(tiny, shape, dtype):
    """Five families: with soft-capped logits (Gemma), tied heads, and rows whose targets differ."""
    tiny, batch = tiny.to(dtype), make_batch(*shape)
    batch["labels"][0, -1] = batch["input_ids"][0, -1]  # at least one target
    expected = reference(tiny, batch)
    expected.backward()
    expected_gradients = gradients(tiny)
    tiny.zero_grad()
    loss = completion_only_loss(tiny, batch)
    loss.backward()
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    if dtype is torch.float32:
        assert_same_gradients(gradients(tiny), expected_gradients, atol=2e-5, rtol=1e-4)


def test_with_adapters(llama, batch):
    from recipes_lib.core.machine import require

    expected = completion_only_loss(llama, batch).item()
    model = require("peft").get_peft_model(
        llama, require("peft").LoraConfig(target_modules=["q_proj"])
    )
    assert completion_only_loss(model, batch).item() == pytest.approx(expected, rel=1e-6)


def test_estimate_meets_the_measurement():
    """A wide vocabulary, one row, a quarter of the tokens are targets: the logits were the peak."""
    model = model_of_shape("smollm2-135m", layers=2, device="cpu").requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    ids = torch.randint(1, 128, (1, 128))
    batch = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(128) < 96, IGNORED)}
    plan = budget_of(model, batch_size=1, seq_len=128)
    only = estimate_completion_only_loss(plan, model, targets=32)
    measured = {}
    for name, loss_of in (("all", reference), ("targets", completion_only_loss)):

        def step(loss_of=loss_of):
            loss_of(model, batch).backward()
            model.zero_grad()

        measured[name] = measure(step, repeats=0).peak_bytes
    weights = plan.weights
    assert only.peak - only.states == pytest.approx(measured["targets"], rel=0.05)
    assert measured["targets"] - weights < 0.5 * (measured["all"] - weights)


def test_every_answer_of_a_conversation_is_learnt_and_nothing_else(tokenizer):
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


def test_check_labels_accepts_the_real_data(tokenizer):
    rows = load_instructions(tokenizer, max_tokens=128, limit=50)
    targets = sum(label != IGNORED for row in rows for label in row["labels"])
    assert check_labels(rows, tokenizer) == pytest.approx(
        targets / sum(map(len, rows["input_ids"]))
    )


@pytest.mark.parametrize(
    ("problem", "match"),
    [
        ("shifted", "has shifted labels"),
        ("unmasked", "learns tokens of the template"),
        ("no end", "does not learn its end mark"),
        ("masked", "has no target"),
        ("only the first", "has no target"),
        ("foreign", "learns other tokens"),
        ("short", "has 40 tokens and 39 labels"),
    ],
)
def test_check_labels_refuses_what_trains_silently(tokenizer, problem, match):
    good, row = (tokenize_chat(tokenizer, chat_of(n))[0] for n in (3, 4))
    ids, labels = row["input_ids"], row["labels"]
    end = tokenizer.eos_token_id
    row["labels"] = {
        "shifted": [*labels[1:], IGNORED],
        "unmasked": list(ids),
        "no end": [
            IGNORED if label == end else label for label in labels
        ],  # as a mask of padding = end mark does
        "masked": [IGNORED] * len(ids),
        "only the first": [ids[0]] + [IGNORED] * (len(ids) - 1),
        "foreign": [label if label == IGNORED else label + 1 for label in labels],
        "short": labels[:-1],
    }[problem]
    with pytest.raises(ValueError, match=f"row 1 {match}"):
        check_labels([good, row], tokenizer)


def test_check_labels_looks_at_the_end_mark_of_every_answer(tokenizer):
    (row,) = tokenize_chat(tokenizer, chat_of(3) + chat_of(4))
    first = row["labels"].index(tokenizer.eos_token_id)
    row["labels"] = [IGNORED if i == first else label for i, label in enumerate(row["labels"])]
    with pytest.raises(ValueError, match="row 0 does not learn its end mark"):
        check_labels([row], tokenizer)


def test_check_labels_where_the_end_mark_is_the_unknown_token(monkeypatch):
    """As in GPT-2."""
    tokenizer = load_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", None)
    tokenizer.unk_token = tokenizer.eos_token
    assert check_labels([tokenize_pair(tokenizer, "2 + 2?", "Four.")], tokenizer) > 0


def test_check_labels_accepts_base_models_whose_text_ends_otherwise_than_an_answer():
    """Base models of Qwen: answers end with <|im_end|>, a special token, and a text ends with another one."""
    tokenizer = load_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    assert check_labels(tokenize_chat(tokenizer, chat_of(3)), tokenizer) > 0


def chat_of(n):
    return [
        {"role": "user", "content": f"Count to {n}."},
        {"role": "assistant", "content": "one two three four"},
    ]


def test_labels_shifted_twice_learn_another_task(llama, batch):
    """The bug that check_labels refuses: it trains without an error, on the token after the next."""
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=3e-3)
    for _ in range(30):
        loss = completion_only_loss(llama, batch | {"labels": shifted})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        right, wrong = (
            completion_only_loss(llama, b).item() for b in (batch, batch | {"labels": shifted})
        )
    assert wrong < 0.5 * right


def test_bad_input(llama, batch, tokenizer):
    with pytest.raises(ValueError, match="no token to train on"):
        completion_only_loss(llama, batch | {"labels": torch.full_like(batch["labels"], IGNORED)})
    with pytest.raises(ValueError, match="data set is empty"):
        check_labels([], tokenizer)
    with pytest.raises(ValueError, match="targets=0"):
        estimate_completion_only_loss(budget_of(llama, batch_size=1, seq_len=8), llama, targets=0)
    with pytest.raises(ValueError, match="nothing to learn"):
        tokenize_chat(tokenizer, [{"role": "user", "content": "a"}])
    llama.forward = lambda input_ids, use_cache: None
    with pytest.raises(ValueError, match="no logits_to_keep"):
        completion_only_loss(llama, batch)


@pytest.mark.gpu
def test_on_a_gpu():
    model = model_of_shape("tiny-llama", dtype=torch.bfloat16, device="cuda")
    batch = {name: tensor.to("cuda") for name, tensor in make_batch().items()}
    assert completion_only_loss(model, batch).item() == pytest.approx(
        reference(model, batch).item(), rel=1e-2
    )
