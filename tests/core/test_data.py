import json
import re

import pytest
import torch

from recipes_lib.core.data import (
    IGNORED,
    batches,
    collate,
    decode_with_mask,
    evaluate,
    load_instructions,
    load_pairs,
    load_text,
    tokenize_chat,
    tokenize_pair,
)
from recipes_lib.core.model import load_tokenizer
from tests.conftest import make_batch


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def test_loss_is_on_the_answer_only(tokenizer):
    row = tokenize_pair(tokenizer, "Say hello.", "Hello, world.")
    answer = [token for token in row["labels"] if token != IGNORED]
    assert tokenizer.decode(answer) == "Hello, world.<|im_end|>"
    assert row["input_ids"][-len(answer) :] == answer  # not shifted: the model does that
    shown = decode_with_mask(row, tokenizer)
    assert shown.startswith("⟦<|im_start|>") and shown.endswith(
        "assistant\n⟧Hello, world.<|im_end|>"
    )


def test_decode_with_mask_shows_every_border(tokenizer):
    (row,) = tokenize_chat(tokenizer, turns("1 + 1?", "Two.", "2 + 2?", "Four."))
    shown = decode_with_mask(row, tokenizer)
    assert re.sub(r"⟦.*?⟧", "|", shown, flags=re.S) == "|Two.<|im_end|>|Four.<|im_end|>"
    assert "2 + 2?" in shown


def test_instructions(tokenizer):
    data = load_instructions(tokenizer, max_tokens=96, limit=20)
    again = load_instructions(tokenizer, max_tokens=96, limit=20)
    assert len(data) == 20 and data[:] == again[:]
    assert max(map(len, data["input_ids"])) <= 96
    assert "docstring of this Python function" in decode_with_mask(data[0], tokenizer)


def test_own_pairs_and_files(tokenizer, tmp_path):
    pairs = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": " "}]
    assert (
        len(load_instructions(tokenizer, dataset=pairs)) == 1
    )  # the one without an answer is left out
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, pairs)))
    assert len(load_instructions(tokenizer, dataset=str(file))) == 1
    for source in (pairs, str(file)):  # the same rows would be trained on and held out
        with pytest.raises(ValueError, match="have no splits"):
            load_instructions(tokenizer, split="validation", dataset=source)


def test_tokenizer_without_template(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert decode_with_mask(tokenize_pair(tokenizer, "a", "b"), tokenizer) == "⟦a\n\n⟧b<|im_end|>"


# --- chat templates -------------------------------------------------------------------------------

# The real ones, less tools and pictures. Their marks are ordinary text to this tokenizer.
TEMPLATES = {
    "Qwen2.5": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "Qwen3": (
        "{% set ns = namespace(question=0) %}"
        "{% for m in messages if m.role == 'user' %}{% set ns.question = messages.index(m) %}{% endfor %}"
        "{% for m in messages %}{% set parts = m.content.split('</think>') %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.index0 > ns.question %}"
        "<think>\n{{ parts[0].split('<think>')[-1].strip() if parts[1:] else '' }}\n</think>\n\n{% endif %}"
        "{{ parts[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "Llama 3": (
        "{% for m in messages %}{{ '<|begin_of_text|>' if loop.first }}<|start_header_id|>{{ m.role }}"
        "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "Mistral": (
        "<s>{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
        "{{ m.content }}[/INST]{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
    ),
    "Gemma": (
        "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
}
TEMPLATES["Qwen3, not thinking"] = "{% set enable_thinking = false %}" + TEMPLATES["Qwen3"]


def turns(*contents):
    """A conversation: question, answer, question, …"""
    return [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]


def learnt(row, tokenizer):
    return tokenizer.decode([label for label in row["labels"] if label != IGNORED])


@pytest.mark.parametrize(
    ("family", "prompt", "answer"),
    [
        (
            "Qwen2.5",
            "<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n",
            "Four.<|im_end|>",
        ),
        (
            "Qwen3",
            "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n",
            "<think>\n\n</think>\n\nFour.<|im_end|>",
        ),
        (
            "Qwen3, not thinking",
            "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
            "Four.<|im_end|>",
        ),
        (
            "Llama 3",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2 + 2?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "Four.<|eot_id|>",
        ),
        ("Mistral", "<s>[INST] 2 + 2?[/INST]", " Four.</s>"),
        (
            "Gemma",
            "<bos><start_of_turn>user\n2 + 2?<end_of_turn>\n<start_of_turn>model\n",
            "Four.<end_of_turn>",
        ),
    ],
)
def test_template_of_each_family(tokenizer, monkeypatch, family, prompt, answer):
    """Masked is what the template itself puts before an answer; learnt is the answer with its end mark."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[family])
    row = tokenize_pair(tokenizer, "2 + 2?", "Four.")
    assert decode_with_mask(row, tokenizer) == f"⟦{prompt}⟧{answer}"
    asked = tokenizer.apply_chat_template(
        turns("2 + 2?"), add_generation_prompt=True, return_dict=False
    )
    assert row["labels"] == [IGNORED] * len(asked) + row["input_ids"][len(asked) :]
    assert row["input_ids"][: len(asked)] == asked


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("Qwen2.5", "<|im_end|>"),
        ("Llama 3", "<|eot_id|>"),
        ("Mistral", "</s>"),
        ("Gemma", "<end_of_turn>"),
    ],
)
def test_conversation_of_each_family_is_one_row(tokenizer, monkeypatch, family, end):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[family])
    chat, space = turns("2 + 2?", "Four.", "And 3 + 3?", "Six."), " " * (family == "Mistral")
    (row,) = tokenize_chat(tokenizer, chat)
    assert learnt(row, tokenizer) == f"{space}Four.{end}{space}Six.{end}"
    whole = tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")
    assert tokenizer.decode(row["input_ids"]) == whole


@pytest.mark.parametrize(
    ("think", "shown"), [("<think>Two and two.</think>", "Two and two."), ("", "")]
)
def test_qwen3_learns_each_answer_after_the_history_that_it_will_see(
    tokenizer, monkeypatch, think, shown
):
    """Thinking, even the empty one, is dropped from earlier answers: a row for each."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES["Qwen3"])
    chat = turns("2 + 2?", f"{think}Four.", "And 3 + 3?", f"{think}Six.")
    first, second = tokenize_chat(tokenizer, chat)
    assert learnt(first, tokenizer) == f"<think>\n{shown}\n</think>\n\nFour.<|im_end|>"
    history = (
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
        "<|im_start|>user\nAnd 3 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        decode_with_mask(second, tokenizer)
        == f"⟦{history}⟧<think>\n{shown}\n</think>\n\nSix.<|im_end|>"
    )


@pytest.mark.parametrize(
    ("family", "error"),
    [("Gemma", "System role not supported"), ("Mistral", "rewrites the question")],
)
def test_system_prompts_that_a_template_refuses_or_drops(tokenizer, monkeypatch, family, error):
    """Mistral puts it before the last question, as long as that is not answered."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[family])
    with pytest.raises(Exception, match=error):
        tokenize_chat(
            tokenizer, [{"role": "system", "content": "Be brief."}, *turns("2 + 2?", "Four.")]
        )


def test_pairs_that_cannot_be_learnt_are_named(tokenizer, tmp_path):
    chat = [{"role": "human", "content": "2 + 2?"}, {"role": "gpt", "content": "Four."}]
    with pytest.raises(ValueError, match=r"no 'assistant' in \['human', 'gpt'\] \(in .*2 \+ 2"):
        load_instructions(tokenizer, dataset=[PAIR, {"messages": chat}])
    with pytest.warns(UserWarning, match="empty: 2 pairs"):
        rows = load_instructions(
            tokenizer,
            dataset=write(tmp_path, PAIR, PAIR | {"completion": " "}, {**PAIR, "completion": ""}),
        )
    assert len(rows) == 1


def test_a_conversation_begins_with_a_question(tokenizer):
    with pytest.raises(ValueError, match="begins with an answer"):
        tokenize_chat(tokenizer, turns("2 + 2?", "Four.")[1:])


def test_tokens_are_those_of_the_whole_text():
    """SentencePiece puts a space before a text: the answer must not get one that generation will not see."""
    from transformers import LlamaTokenizer

    letters = ["<unk>", "<s>", "</s>", "▁", "\n", *"<|>abcdefghijklmnopqrstuvwxyz", "▁four"]
    tokenizer = LlamaTokenizer(
        vocab={token: i for i, token in enumerate(letters)}, merges=[], legacy=False
    )
    tokenizer.chat_template = (  # Zephyr's and TinyLlama's
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    chat = turns("two", "four", "three", "six")
    (row,) = tokenize_chat(tokenizer, chat)
    whole = tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")
    assert row["input_ids"] == tokenizer(whole, add_special_tokens=False)["input_ids"]


# --- files ----------------------------------------------------------------------------------------

PAIR = {"prompt": "a", "completion": "b"}
CHAT = {"messages": turns("q", "r")}


def write(folder, *lines):
    path = folder / "pairs.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return str(path)


@pytest.mark.parametrize("rows", [[PAIR, PAIR], [CHAT, CHAT], [PAIR, CHAT, PAIR], [CHAT, PAIR]])
def test_a_file_holds_pairs_or_conversations_or_both(tmp_path, rows):
    assert list(load_pairs(dataset=write(tmp_path, *rows, ""))) == rows


@pytest.mark.parametrize(
    "lines", [[], ["", ""], ["{not json"], ["5"], [PAIR, '{"prompt": "x", "comp']]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, lines):
    path = write(tmp_path, *lines)
    with pytest.raises(ValueError, match=re.escape(path)):
        list(load_pairs(dataset=path))


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        {"prompt": "x"},
        {"completion": "x"},
        {"prompt": "x", "completion": None},
        {"prompt": "x", "completion": 3},
        {"text": "x"},
        {"messages": []},
        {"messages": "x"},
        {"messages": [{"content": "q"}, {"role": "assistant", "content": "r"}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant"}]},
    ],
    ids=str,
)
def test_a_malformed_row_is_named(tmp_path, line):
    with pytest.raises(ValueError, match=r"pairs\.jsonl\D*2\b"):
        list(load_pairs(dataset=write(tmp_path, PAIR, line, PAIR)))


def test_texts_stay_texts(tmp_path):
    rows = [{"prompt": "When?", "completion": f"2024-01-0{day}"} for day in (1, 2)]
    assert list(load_pairs(dataset=write(tmp_path, *rows))) == rows


# --- batches --------------------------------------------------------------------------------------


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
    for ids, labels, mask in zip(
        batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
    ):
        rows.append(
            {"input_ids": ids[mask.bool()].tolist(), "labels": labels[mask.bool()].tolist()}
        )
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
        load_instructions(
            tokenizer, max_tokens=5, limit=3, dataset=[{"prompt": "long " * 9, "completion": "b"}]
        )
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
