# ruff: noqa: E501  (templates are quoted as they are)
"""Tokens and labels of pairs and conversations, as the template of each family writes them."""

import pytest

from recipes_lib.core.data.chat import IGNORED, decode_with_mask, tokenize_chat, tokenize_pair
from recipes_lib.core.model import load_tokenizer


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
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "Mistral": (
        "<s>{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
        "{{ m.content }}[/INST]{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
    ),
}


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
        ("Mistral", "<s>[INST] 2 + 2?[/INST]", " Four.</s>"),
    ],
)
def test_template_of_each_family(tokenizer, monkeypatch, family, prompt, answer):
    """Masked is what the template itself puts before an answer; learnt is the answer with its end
    mark.
    """
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[family])
    row = tokenize_pair(tokenizer, "2 + 2?", "Four.")
    assert decode_with_mask(row, tokenizer) == f"⟦{prompt}⟧{answer}"
    asked = tokenizer.apply_chat_template(
        turns("2 + 2?"), add_generation_prompt=True, return_dict=False
    )
    assert row["labels"] == [IGNORED] * len(asked) + row["input_ids"][len(asked) :]
    assert row["input_ids"][: len(asked)] == asked


@pytest.mark.parametrize(("family", "end"), [("Qwen2.5", "<|im_end|>"), ("Mistral", "</s>")])
def test_a_conversation_is_one_row(tokenizer, monkeypatch, family, end):
    """The mistake: an answer that is not learnt, or learnt with the question behind it."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[family])
    chat, space = turns("2 + 2?", "Four.", "And 3 + 3?", "Six."), " " * (family == "Mistral")
    (row,) = tokenize_chat(tokenizer, chat)
    assert learnt(row, tokenizer) == f"{space}Four.{end}{space}Six.{end}"
    whole = tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")
    assert tokenizer.decode(row["input_ids"]) == whole


def test_qwen3_learns_each_answer_after_the_history_that_it_will_see(tokenizer, monkeypatch):
    """Thinking is dropped from earlier answers: a row for each."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES["Qwen3"])
    think = "<think>Two and two.</think>"
    chat = turns("2 + 2?", f"{think}Four.", "And 3 + 3?", f"{think}Six.")
    first, second = tokenize_chat(tokenizer, chat)
    thought = "<think>\nTwo and two.\n</think>\n\n"
    assert learnt(first, tokenizer) == f"{thought}Four.<|im_end|>"
    history = (
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
        "<|im_start|>user\nAnd 3 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decode_with_mask(second, tokenizer) == f"⟦{history}⟧{thought}Six.<|im_end|>"


def test_a_system_prompt_that_a_template_moves_is_refused(tokenizer, monkeypatch):
    """Mistral puts it before the last question, as long as that is not answered."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES["Mistral"])
    chat = [{"role": "system", "content": "Be brief."}, *turns("2 + 2?", "Four.")]
    with pytest.raises(ValueError, match="rewrites the question"):
        tokenize_chat(tokenizer, chat)


def test_a_conversation_begins_with_a_question(tokenizer):
    with pytest.raises(ValueError, match="begins with an answer"):
        tokenize_chat(tokenizer, turns("2 + 2?", "Four.")[1:])


def test_tokens_are_those_of_the_whole_text():
    """SentencePiece puts a space before a text: the answer must not get one that generation will
    not see.
    """
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
