import subprocess
from itertools import pairwise

import pytest
import torch

from recipes_lib.edge.runtime import (
    Lifetime,
    load_pte,
    measured_peak_bytes,
    plain_plan,
    predicted_arena_bytes,
    tensor_lifetimes,
)

SHAPE = (1, 1, 16, 16)


def test_a_plan_by_hand():
    """b and c never live together: c takes the place of b, above a."""
    a = Lifetime(bytes=100, born=0, last=9)
    b = Lifetime(bytes=60, born=0, last=4)
    c = Lifetime(bytes=50, born=5, last=9)
    assert plain_plan([c, a, b]) == ([100, 0, 100], 160)
    assert plain_plan([]) == ([], 0)


def test_a_hole_is_used():
    tall = Lifetime(bytes=100, born=0, last=1)
    long = Lifetime(bytes=80, born=0, last=9)
    late = Lifetime(bytes=70, born=2, last=9)
    assert plain_plan([tall, long, late]) == ([0, 100, 0], 180)


def test_what_lives_together_does_not_overlap():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(1, 50, (60, 3), generator=generator).tolist()
    tensors = [Lifetime(size, born, born + length) for size, born, length in numbers]
    offsets, block = plain_plan(tensors)
    at_once = []
    for step in range(100):
        alive = [i for i, tensor in enumerate(tensors) if tensor.born <= step <= tensor.last]
        spans = sorted((offsets[i], offsets[i] + tensors[i].bytes) for i in alive)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        at_once.append(sum(tensors[i].bytes for i in alive))
    assert max(at_once) <= block < sum(tensor.bytes for tensor in tensors)


def test_lifetimes_of_a_model(net):
    """Of two steps: the input is read by both, a view is its base, weights do not count."""

    class TwoSteps(torch.nn.Module):
        def forward(self, x):
            doubled = x * 2
            return doubled.view(-1) + x.view(-1)

    x = torch.ones(4, 2)
    got = tensor_lifetimes(TwoSteps(), (x,))
    assert [lifetime.bytes for lifetime in got] == [32, 32, 32]
    assert got[0].born == 0
    assert got[0].last == got[1].last == got[2].born
    wide = 32 * 8 * 8 * 4
    assert 2 * wide < predicted_arena_bytes(net, (torch.randn(SHAPE),)) < 3 * wide


def test_loading_is_silent_and_measured(exported, capfd):
    program = load_pte(exported.path)
    program(torch.zeros(SHAPE))
    assert capfd.readouterr() == ("", "")
    assert 0 < program.load_seconds < 5
    assert program.input_shapes == (SHAPE,)


def test_an_earlier_answer_stays(exported):
    program = load_pte(exported.path)
    first = program(torch.ones(SHAPE))
    kept = first.clone()
    program(torch.zeros(SHAPE))
    assert torch.equal(first, kept)


def test_another_order_of_the_same_numbers(net, exported):
    """The runtime alone reads the bytes of a transposed image as they lie, and answers wrongly."""
    program = load_pte(exported.path)
    x = torch.randn(SHAPE)
    turned = x.transpose(2, 3)
    torch.testing.assert_close(program(turned), net(turned), atol=1e-5, rtol=1e-5)


def test_threads(exported):
    """The pool is the process's: after a first file another number would end it."""
    from executorch.extension.pybindings import portable_lib

    program = load_pte(exported.path)
    assert portable_lib._threadpool_get_thread_count() == 1
    with pytest.raises(ValueError, match="threads=2: this process runs files with 1 already"):
        load_pte(exported.path, threads=2)
    assert program(torch.zeros(SHAPE)).shape == (1, 10)
    with pytest.raises(ValueError, match="threads=0"):
        load_pte(exported.path, threads=0)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.zeros(2, 1, 16, 16),), r"takes \[1, 1, 16, 16\], not \[2, 1, 16, 16\]"),
        ((torch.zeros(1, 16, 16),), r"not \[1, 16, 16\]"),
        ((), "not no input"),
        (
            (torch.zeros(SHAPE, dtype=torch.float64),),
            r"in torch\.float64, and small\.pte takes",
        ),
        (("image",), "str is no tensor"),
    ],
)
def test_other_inputs(exported, inputs, message):
    with pytest.raises(ValueError, match=message):
        load_pte(exported.path)(*inputs)


def test_what_is_no_program(tmp_path, capfd):
    for load in (load_pte, measured_peak_bytes):
        with pytest.raises(ValueError, match="does not exist"):
            load(tmp_path / "nothing.pte")
    (tmp_path / "text.pte").write_text("no program" * 100)
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_pte(tmp_path / "text.pte")
    assert capfd.readouterr() == ("", "")


def test_growth_of_a_fresh_process(exported):
    """This net is small: what grows are pages of libraries that are touched for the first time."""
    load_pte(exported.path)
    assert 0 < measured_peak_bytes(exported.path, threads=2) < 40 * 2**20


def test_a_file_that_cannot_be_measured(monkeypatch, tmp_path):
    """The message is one line of the process, without its traceback."""
    bad = tmp_path / "bad.pte"
    bad.write_bytes(b"hello" * 100)
    said = 'Traceback:\n  File "<string>", line 17\nRuntimeError: no program\n'

    def failed(*_, **__):
        return subprocess.CompletedProcess([], 1, stdout="", stderr=said)

    monkeypatch.setattr(subprocess, "run", failed)
    with pytest.raises(ValueError, match=r"bad\.pte could not be measured: give") as raised:
        measured_peak_bytes(bad)
    assert str(raised.value).endswith("(RuntimeError: no program)")
    for function in (load_pte, measured_peak_bytes):
        with pytest.raises(ValueError, match="path=None: give the name of a file"):
            function(None)
