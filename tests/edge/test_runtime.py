"""A .pte in the runtime of a device."""

import pytest
import torch

from recipes_lib.edge._executorch import executorch_runtime
from recipes_lib.edge.runtime import Lifetime, load_pte, measured_peak_bytes, plain_plan
from tests.edge.conftest import SHAPE


def test_a_plan_by_hand():
    """c takes the place of b, which it never meets, above a; and a hole is used."""
    a = Lifetime(bytes=100, born=0, last=9)
    b = Lifetime(bytes=60, born=0, last=4)
    c = Lifetime(bytes=50, born=5, last=9)
    assert plain_plan([c, a, b]) == ([100, 0, 100], 160)
    tall = Lifetime(bytes=100, born=0, last=1)
    long = Lifetime(bytes=80, born=0, last=9)
    late = Lifetime(bytes=70, born=2, last=9)
    assert plain_plan([tall, long, late]) == ([0, 100, 0], 180)


def test_an_earlier_answer_stays(exported):
    """The runtime has one place for its output: the next call must not write over the last."""
    program = load_pte(exported.path)
    first = program(torch.ones(SHAPE))
    kept = first.clone()
    program(torch.zeros(SHAPE))
    assert torch.equal(first, kept)


def test_another_order_of_the_same_numbers(net, exported):
    """The runtime alone reads the bytes of a transposed image as they lie, and answers wrongly."""
    program = load_pte(exported.path)
    turned = torch.randn(SHAPE).transpose(2, 3)
    torch.testing.assert_close(program(turned), net(turned), atol=1e-5, rtol=1e-5)


def test_threads(exported):
    """The pool is the process's: after a first file another number would end it."""
    from executorch.extension.pybindings import portable_lib

    program = load_pte(exported.path)
    assert portable_lib._threadpool_get_thread_count() == 1
    with pytest.raises(ValueError, match="threads=2: this process runs files with 1 already"):
        executorch_runtime(threads=2)
    assert program(torch.zeros(SHAPE)).shape == (1, 10)


def test_growth_of_a_fresh_process(exported):
    """Memory of this process, or of the imports, would be hundreds of MiB."""
    load_pte(exported.path)
    assert 0 < measured_peak_bytes(exported.path) < 40 * 2**20
