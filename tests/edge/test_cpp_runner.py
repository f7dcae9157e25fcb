"""The same file in a program of C++."""

import sys

import pytest
import torch

from recipes_lib.edge.cpp_runner import (
    build_runner,
    find_cmake,
    plain_read,
    plain_write,
    run_in_cpp,
)
from recipes_lib.edge.runtime import load_pte
from tests.edge.conftest import SHAPE


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    try:
        find_cmake()
    except ValueError:
        pytest.skip("needs cmake 3.28 or newer: pip install cmake")
    return build_runner(tmp_path_factory.mktemp("cpp"))


def test_a_tensor_is_its_bytes(tmp_path):
    """In its own order, also where the memory has another."""
    x = torch.randn(3, 4)
    plain_write(x.T, tmp_path / "x.bin")
    assert torch.equal(plain_read(tmp_path / "x.bin"), x.T.flatten())


def test_equal_to_python(runner, exported):
    """Another output, times in another unit, or the memory of a Python with PyTorch."""
    program = load_pte(exported.path)
    for _ in range(2):
        x = torch.randn(SHAPE)
        run = run_in_cpp(runner, exported.path, x, calls=3)
        torch.testing.assert_close(run.output, program(x).flatten(), atol=1e-6, rtol=1e-6)
    assert 0 < run.seconds_per_call < 1
    assert 0 < run.load_seconds < 5
    assert 2**20 < run.peak_bytes < 64 * 2**20


def test_an_old_cmake_is_refused(monkeypatch, tmp_path):
    """Debian's 3.25 configures, and every target is missing."""
    old = tmp_path / "cmake"
    old.write_text("#!/bin/sh\necho cmake version 3.25.1\n")
    old.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ValueError, match=r"cmake version 3\.25\.1.*3\.28 or newer"):
        find_cmake()
    old.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="there is no cmake"):
        find_cmake()
