"""Rows of public data sets become pairs; what would be lost in silence is refused."""

import pytest

from recipes_lib.core.data.pair_columns import pair_of

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
PAIR = {"prompt": "q", "completion": "a"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        (PAIR | {"id": 3}, PAIR),
        ({"messages": CHAT, "tools": None}, {"messages": CHAT}),
        # A table has every column in every row.
        (PAIR | {"messages": None}, PAIR),
        ({"messages": CHAT, "prompt": None, "completion": None}, {"messages": CHAT}),
        ({"messages": [turn | {"tool_calls": None} for turn in CHAT]}, {"messages": CHAT}),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {"messages": CHAT}),  # as TRL has it
        ({"question": "q", "answer": "a"}, PAIR),
        ({"instruction": "q", "output": "a", "text": "all"}, PAIR),
        ({"instruction": "q", "input": "", "output": "a"}, PAIR),
        ({"instruction": "q", "input": None, "output": "a"}, PAIR),
        ({"instruction": "q", "input": "r", "output": "a"}, PAIR | {"prompt": "q\n\nr"}),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            {"messages": CHAT},
        ),
    ],
    ids=str,
)
def test_columns_of_public_data_sets(row, pair):
    found, columns = pair_of(row)
    assert found == pair
    usual = "messages" in row or "prompt" in row
    assert (columns == "") == usual


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"text": "x"}, r"columns \['text'\]; the texts `prompt` and `completion` are needed"),
        (PAIR | {"completion": 4}, "`completion` is 4: give a text"),
        ({"messages": []}, "give a list of one turn or more"),
        ({"messages": [{"content": "q"}]}, "turn 0 .* give the texts `role` and `content`"),
        ({"messages": [CHAT[0], CALL]}, "turn 1 .* has `tool_calls`.*write the call as the text"),
        ({"messages": CHAT, "tools": [{"name": "f"}]}, "a row has `tools`"),
        ({"messages": [CHAT[0], CHAT[1] | {"weight": 0}]}, "turn 1 .* has the weight 0"),
        ({"conversations": [{"from": "bing", "value": "q"}]}, 'is from "bing".*human, gpt'),
    ],
    ids=str,
)
def test_a_message_says_what_is_wrong_with_the_row(row, error):
    with pytest.raises(ValueError, match=error):
        pair_of(row)
