"""Graphs that are counted by themselves, in the PyTorch that is installed and in an older one."""

import pytest
import torch

from recipes_lib.core.model.compiling import compile_apart

COMPILE = torch.compile


def older_compile(function, *, fullgraph=False, dynamic=None, backend="inductor", mode=None):
    """As in PyTorch 2.11: without a limit of its own."""
    return COMPILE(function, fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode)


def add_of(number):
    def add(x):
        return x + number

    return add


@pytest.mark.parametrize("compile_of", [COMPILE, older_compile])
def test_each_function_has_a_count_of_its_own(monkeypatch, compile_of):
    """The mistake: functions from one piece of code share a limit, or one has PyTorch's of 8."""
    monkeypatch.setattr(torch, "compile", compile_of)
    options = {"fullgraph": True, "dynamic": False, "backend": "eager"}
    for number in range(3):
        compiled = compile_apart(add_of(number), most_graphs=12, **options)
        for size in range(2, 14):
            assert compiled(torch.zeros(size)).sum() == size * number
    few = compile_apart(add_of(1), most_graphs=2, **options)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for size in range(2, 8):
            few(torch.zeros(size))
