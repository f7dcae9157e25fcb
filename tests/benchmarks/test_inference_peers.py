"""Other programs beside ours: what is missing says why, and what is timed is compared fairly."""

from __future__ import annotations

import sys

from benchmarks import inference_peers, peer_llama_cpp
from benchmarks.inference_peers import Row, compare, contents
from benchmarks.peer_programs import Loaded, Peer

TEXTS = {"question": [1, 2, 3], "new_tokens": 4, "long_text": [1] * 8}
RIGHT = [7, 7, 7, 7]


def program(tokens=RIGHT):
    """A program that writes `tokens`."""

    def write(prompt, new_tokens):
        return list(tokens)[:new_tokens]

    return Loaded(write, lambda prompt: None, version="1.0")


def peer(name, load, *, beside=None):
    return Peer(name, 32, load, beside)


def test_a_program_that_is_not_installed_is_left_out_and_the_others_go_on(monkeypatch, capsys):
    """The mistake: one missing package ends the comparison of all."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # importing it fails
    peers = [peer("llama", lambda: peer_llama_cpp.load_llama_cpp("Q8_0")), peer("other", program)]
    *_, rows = compare(peers, **TEXTS, reference=program, rounds=2)
    (row,) = contents(rows)
    assert (row["name"], len(row["decode_ms"]["rounds"])) == ("other", 2)
    assert "left out: llama: this recipe needs llama_cpp" in capsys.readouterr().out


# --- what is compared -----------------------------------------------------------------------------


def test_ratios_are_of_the_same_round():
    """The mistake: the best round of one over the best of the other, whatever the machine did."""
    ours = Row(peer("ours", program), program(), None, 4, [1.0, 10.0, 1.0], [1.0, 1.0, 1.0])
    beside = peer("b", program, beside="ours")
    other = Row(beside, program(), None, 4, [2.0, 20.0, 3.0], [4.0, 4.0, 4.0])
    content = contents([ours, other])[1]
    assert content["ratio"]["rounds"] == [2.0, 2.0, 3.0]
    assert content["ratio"]["median"] == 2.0
    assert (content["ratio"]["low"], content["ratio"]["high"]) == (2.0, 3.0)
    assert content["prefill_ratio"]["median"] == 4.0


# --- the programs ---------------------------------------------------------------------------------


def test_each_program_is_beside_a_row_of_ours_with_as_many_bits():
    """The mistake: four bits of another program are compared with eight of ours."""
    peers = {one.name: one for one in inference_peers.all_programs()}
    for one in peers.values():
        if one.name.startswith("ours"):
            assert one.beside is None
        else:
            assert peers[one.beside].bits == one.bits, one.name
