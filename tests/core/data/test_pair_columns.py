"""Rows of public data sets become pairs; what would be lost in silence is refused by name."""

import json

import pytest

from recipes_lib.core.data.pair_columns import pair_of
from recipes_lib.core.data.turns import is_learnt

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHARED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
SYSTEM = {"role": "system", "content": "s"}
PAIR = {"prompt": "q", "completion": "a"}
TOOL = {"name": "f", "description": "d", "parameters": {}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        (PAIR | {"id": 3}, PAIR),
        # A table has every column in every row.
        (PAIR | {"messages": None}, PAIR),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {"messages": CHAT}),  # as TRL has it
        ({"question": "q", "answer": "a"}, PAIR),
        ({"problem": "q", "solution": "a", "messages": CHAT}, {"messages": CHAT}),  # said twice
        ({"instruction": "q", "output": "a", "text": "### q\n### a"}, PAIR),
        ({"instruction": "q", "input": "", "output": "a"}, PAIR),
        ({"instruction": "q", "input": "r", "output": "a"}, PAIR | {"prompt": "q\n\nr"}),
        ({"conversations": SHARED}, {"messages": CHAT}),
        ({"conversation": [{"human": "q", "assistant": "a"}]}, {"messages": CHAT}),
        ({"text": "x", "url": "y"}, {"text": "x"}),
        # What stands around the turns.
        ({"instruction": "q", "output": "a", "system": "s"}, {"messages": [SYSTEM, *CHAT]}),
        ({"conversations": SHARED, "system": "s"}, {"messages": [SYSTEM, *CHAT]}),
        ({"query": "q", "response": "a", "history": [["q", "a"]]}, {"messages": CHAT * 2}),
        # As a text in a cell of CSV or Parquet.
        ({"messages": json.dumps(CHAT)}, {"messages": CHAT}),
        # As parts.
        (
            {"messages": [CHAT[0] | {"content": [{"type": "text", "text": "q"}]}, CHAT[1]]},
            {"messages": CHAT},
        ),
    ],
    ids=str,
)
def test_columns_of_public_data_sets(row, pair):
    found, columns = pair_of(row)
    assert found == pair
    usual = "text" in pair or bool({"messages", "prompt"} & set(row))
    assert (columns == "") == usual


@pytest.mark.parametrize("said", [{"weight": 0}, {"train": False}, {"loss": 0.0}])
def test_a_turn_that_is_not_to_be_learnt(said):
    """The mistake: ShareGPT's, Axolotl's or ms-swift's word for it is not read."""
    turns = [*SHARED, SHARED[0], {"from": "gpt", "value": "b", "weight": 1}]
    turns[1] = turns[1] | said
    found = pair_of({"conversations": turns})[0]["messages"]
    assert [turn["content"] for turn in found if is_learnt(turn)] == ["b"]


def test_axolotl_may_learn_what_a_user_says():
    chat = [CHAT[0] | {"train": True}, CHAT[1] | {"train": False}]
    assert list(map(is_learnt, pair_of({"messages": chat})[0]["messages"])) == [True, False]


def test_trl_does_not_learn_the_answers_of_a_prompt():
    turns = pair_of({"prompt": [*CHAT, CHAT[0]], "completion": [CHAT[1]]})[0]["messages"]
    assert list(map(is_learnt, turns)) == [False, False, False, True]


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    ],
    ids=str,
)
def test_calls_of_tools_have_one_form(turn):
    """The mistake: LLaMA-Factory's and ms-swift's roles, or arguments as text, are another turn."""
    result = {"role": "observation", "content": {"y": 2}}
    row = {"messages": [CHAT[0], turn, result, CHAT[1]], "tools": json.dumps([TOOL])}
    pair, _ = pair_of(row)
    assert pair["tools"] == [{"type": "function", "function": TOOL}]
    assert pair["messages"][1]["role"] == "assistant"
    assert pair["messages"][1]["tool_calls"] == [CALL]
    assert pair["messages"][2] == {"role": "tool", "content": '{"y": 2}'}


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"story": "x"}, r"columns \['story'\]; the texts `prompt` and `completion` are needed"),
        (PAIR | {"hint": "think"}, "a row has `hint` beside `prompt`, `completion`"),
        (PAIR | {"images": ["a.png"]}, "a row has `images`, and this trains on texts alone"),
        (PAIR | {"rejected": "b"}, "a row has `rejected`, and preferences .* trl.DPOTrainer"),
        ({"messages": [{"content": "q"}]}, "turn 0 .* give the texts `role` and `content`"),
        ({"messages": [CHAT[0], CHAT[1] | {"weight": 0.5}]}, "turn 1 .* the `weight` 0.5"),
        ({"messages": [CHAT[0], CHAT[1] | {"train_detail": [1]}]}, "turn 1 .* `train_detail`"),
        (
            {"messages": [CHAT[0] | {"content": [{"type": "image_url", "image_url": "x"}]}]},
            "turn 0 .* the part .*image_url",
        ),
        ({"messages": [SYSTEM, *CHAT], "system": "t"}, "two system prompts"),
        (PAIR | {"history": [["q"]]}, "`history` is .* pairs of a question and an answer"),
    ],
    ids=str,
)
def test_a_message_says_what_is_wrong_with_the_row(row, error):
    with pytest.raises(ValueError, match=error):
        pair_of(row)
