# ruff: noqa: E501  (templates are quoted as they are)
"""Tokens and labels of pairs and conversations: learnt as they were given, or refused."""

import pytest

from recipes_lib.core.data.chat_template import CHATML
from recipes_lib.core.data.tokens_and_labels import (
    IGNORED,
    decode_with_mask,
    learnt_ends,
    tokenize_chat,
    tokenize_pair,
    tokenize_text,
)
from recipes_lib.core.model import load_tokenizer


@pytest.fixture
def tokenizer():
    return load_tokenizer()


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
def test_template_of_each_family(tokenizer, family, prompt, answer):
    """Masked is what the template itself puts before an answer; learnt is the answer with its end
    mark.
    """
    tokenizer.chat_template = TEMPLATES[family]
    row = tokenize_pair(tokenizer, "2 + 2?", "Four.")
    assert decode_with_mask(row, tokenizer) == f"⟦{prompt}⟧{answer}"
    asked = tokenizer.apply_chat_template(
        turns("2 + 2?"), add_generation_prompt=True, return_dict=False
    )
    assert row["labels"] == [IGNORED] * len(asked) + row["input_ids"][len(asked) :]
    assert row["input_ids"][: len(asked)] == asked


@pytest.mark.parametrize(("family", "end"), [("Qwen2.5", "<|im_end|>"), ("Mistral", "</s>")])
def test_a_conversation_is_one_row(tokenizer, family, end):
    """The mistake: an answer that is not learnt, or learnt with the question behind it."""
    tokenizer.chat_template = TEMPLATES[family]
    chat, space = turns("2 + 2?", "Four.", "And 3 + 3?", "Six."), " " * (family == "Mistral")
    (row,) = tokenize_chat(tokenizer, chat)
    assert learnt(row, tokenizer) == f"{space}Four.{end}{space}Six.{end}"
    whole = tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")
    assert tokenizer.decode(row["input_ids"]) == whole


def test_qwen3_learns_each_answer_after_the_history_that_it_will_see(tokenizer):
    """Thinking is dropped from earlier answers: a row for each."""
    tokenizer.chat_template = TEMPLATES["Qwen3"]
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


def test_a_system_prompt_that_a_template_moves_is_refused(tokenizer):
    """Mistral puts it before the last question, as long as that is not answered."""
    tokenizer.chat_template = TEMPLATES["Mistral"]
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


# --- what templates of strangers do ----------------------------------------------------------------

# The first template of R1's distillates, less tools.
R1 = (
    "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end｜>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
# The tools of Llama 3.1's.
LLAMA = (
    "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% for t in tools %}{{ t | tojson }}{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if 'tool_calls' in m %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# R1's way with calls: the arguments are a text.
AS_TEXT = LLAMA.replace("f.arguments | tojson", "f.arguments")
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a town"}}]


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text} | more


# --- thinking -------------------------------------------------------------------------------------

THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."


@pytest.mark.parametrize(
    "turn",
    [
        answer(THOUGHT.removeprefix("<think>\n")),  # as it was generated
        answer("Four.", reasoning_content="Two and two."),
    ],
)
def test_thinking_is_learnt_behind_the_mark_that_opens_it(tokenizer, turn):
    """The mistake: the template cuts the thinking, and less is learnt than was given."""
    tokenizer.chat_template = R1
    (row,) = tokenize_chat(tokenizer, [user("2 + 2?"), turn])
    assert decode_with_mask(row, tokenizer) == (
        f"⟦{tokenizer.bos_token}<｜User｜>2 + 2?<｜Assistant｜><think>\n⟧"
        "Two and two.\n</think>\n\nFour.<｜end｜>"
    )


def test_an_answer_without_thinking_is_learnt_as_the_template_writes_it(tokenizer):
    """The mistake: every pair is refused, because the template asks for thinking."""
    tokenizer.chat_template = R1
    row = tokenize_pair(tokenizer, "2 + 2?", "Four.")
    assert decode_with_mask(row, tokenizer).endswith("<｜Assistant｜>⟧Four.<｜end｜>")


# --- turns ----------------------------------------------------------------------------------------


def test_a_masked_answer_is_read_and_not_learnt(tokenizer):
    chat = [user("a?"), answer("wrong", train=False), user("b?"), answer("right"), user("bye")]
    (row,) = tokenize_chat(tokenizer, chat)
    assert learnt(row, tokenizer) == "right<|im_end|>"
    text = tokenizer.decode(row["input_ids"])
    assert [text.count(turn["content"]) for turn in chat] == [1] * 5


def test_a_turn_of_the_user_can_be_learnt(tokenizer):
    (row,) = tokenize_chat(tokenizer, [user("a?") | {"train": True}, answer("b")])
    assert learnt(row, tokenizer) == "a?<|im_end|>b<|im_end|>"


def test_a_template_that_drops_a_turn_is_not_believed(tokenizer):
    without_system = "{% for m in messages if m.role != 'system' %}"
    tokenizer.chat_template = without_system + "[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
    chat = [{"role": "system", "content": "Be brief."}, user("2 + 2?"), answer("Four.")]
    with pytest.raises(ValueError, match="leaves out a part of turn 0"):
        tokenize_chat(tokenizer, chat)


def test_a_template_that_writes_an_answer_twice_is_not_believed(tokenizer):
    """The mistake: half of what is learnt is a repetition that nobody wrote."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }} {{ m.content }}</s>{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"turn 1 .* more than once"):
        tokenize_chat(tokenizer, [user("Where is Oslo?"), answer("It is in Norway.")])


# --- tools ----------------------------------------------------------------------------------------


def call(town="Oslo"):
    return answer(None, tool_calls=[{"function": {"name": "weather", "arguments": {"town": town}}}])


@pytest.mark.parametrize("template", [AS_TEXT, CHATML])
def test_tools_and_their_calls_are_written_by_a_template_that_knows_them(tokenizer, template):
    """The mistake: arguments as Python prints them, or quoted twice."""
    tokenizer.chat_template = template
    chat = [user("Oslo?"), call(), {"role": "tool", "content": "sun"}, answer("Sunny.")]
    (row,) = tokenize_chat(tokenizer, chat, TOOLS)
    assert '"description": "of a town"' in tokenizer.decode(row["input_ids"])
    said = learnt(row, tokenizer)
    assert '"weather"' in said and '{"town": "Oslo"}' in said
    assert "Sunny." in said and "sun<" not in said


@pytest.mark.parametrize(
    ("turn", "tools", "error"),
    [
        (call(), None, 'part of `tool_calls` of turn 1 .*"weather"'),
        (answer("x"), TOOLS, "tool 'we"),
    ],
)
def test_a_template_that_knows_no_tools_is_named(tokenizer, turn, tools, error):
    with pytest.raises(ValueError, match=f"leaves out .*{error}"):
        tokenize_chat(tokenizer, [user("Oslo?"), turn], tools)


# --- where a text begins and ends -----------------------------------------------------------------


@pytest.fixture
def base(tokenizer):
    """A tokenizer of a base: no template, and <bos> before each text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.chat_template = None
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return tokenizer


def test_rows_of_a_base_begin_as_its_texts_do(base):
    """The mistake: the base has never seen a text without <bos>."""
    row = tokenize_pair(base, "2 + 2?", "Four.")
    assert decode_with_mask(row, base) == "⟦<|im_start|>2 + 2?\n\n⟧Four.<|endoftext|>"
    assert row["input_ids"][:7] == base("2 + 2?\n\n")["input_ids"]  # as generation reads it
    for text in ("A text.", "<|im_start|>A text.<|endoftext|>"):  # as some files have it
        (row,) = tokenize_text(base, text)
        assert decode_with_mask(row, base) == "⟦<|im_start|>⟧A text.<|endoftext|>"


def test_a_system_prompt_stands_before_the_question_of_a_base(base):
    chat = [{"role": "system", "content": "Be brief."}, user("2 + 2?"), answer("Four.")]
    (row,) = tokenize_chat(base, chat)
    assert "Be brief.\n\n2 + 2?\n\n⟧Four.<|endoftext|>" in decode_with_mask(row, base)
    with pytest.raises(ValueError, match="no chat template"):
        tokenize_chat(base, chat[1:] * 2)


def test_a_template_without_an_end_mark_gets_that_of_the_tokenizer(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}\n\n{{ m.role }}: {{ m.content }}{% endfor %}"
    (row,) = tokenize_chat(tokenizer, [user("a?"), answer("b")])
    assert row["labels"][-1] == tokenizer.eos_token_id
    assert learnt_ends(tokenizer, [row]) == [tokenizer.eos_token_id]
