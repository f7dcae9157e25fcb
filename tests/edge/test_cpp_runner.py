import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes_lib.edge import cpp_runner
from recipes_lib.edge.cpp_runner import (
    build_runner,
    find_cmake,
    plain_read,
    plain_write,
    predicted_shipped_bytes,
    run_in_cpp,
)
from recipes_lib.edge.runtime import load_pte

SHAPE = (1, 1, 16, 16)


def can_build():
    try:
        find_cmake()
    except ValueError:
        return False
    return True


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    if not can_build():
        pytest.skip("needs cmake 3.28 or newer: pip install cmake")
    return build_runner(tmp_path_factory.mktemp("cpp"))


def test_a_tensor_is_its_bytes(tmp_path):
    """In its own order, also where the memory has another."""
    x = torch.randn(3, 4)
    plain_write(x.T, tmp_path / "x.bin")
    assert torch.equal(plain_read(tmp_path / "x.bin"), x.T.flatten())


def test_equal_to_python(runner, exported):
    program = load_pte(exported.path)
    for _ in range(2):
        x = torch.randn(SHAPE)
        run = run_in_cpp(runner, exported.path, x, calls=3)
        torch.testing.assert_close(run.output, program(x).flatten(), atol=1e-6, rtol=1e-6)
    assert 0 < run.seconds_per_call < 1
    assert 0 < run.load_seconds < 5


def test_a_process_without_python_is_small(runner, exported):
    """A Python with PyTorch takes hundreds of MiB before it has loaded anything."""
    run = run_in_cpp(runner, exported.path, torch.zeros(SHAPE))
    assert 2**20 < run.peak_bytes < 64 * 2**20


def test_what_goes_to_the_device(runner):
    linked = subprocess.run(["ldd", str(runner)], capture_output=True, text=True).stdout
    of_executorch = {line.split()[0] for line in linked.splitlines() if "libexecutorch" in line}
    assert of_executorch == {f"libexecutorch{name}.so" for name in cpp_runner.LIBRARIES}
    assert 2**20 < predicted_shipped_bytes(runner) < 64 * 2**20


def test_bad_input(runner, exported, tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        run_in_cpp(runner, tmp_path / "nothing.pte", torch.zeros(SHAPE))
    with pytest.raises(ValueError, match=r"give x\.float\(\)"):
        run_in_cpp(runner, exported.path, torch.zeros(SHAPE).double())
    with pytest.raises(ValueError, match="calls=0"):
        run_in_cpp(runner, exported.path, torch.zeros(SHAPE), calls=0)
    text = tmp_path / "text.pte"
    text.write_text("no program" * 100)
    with pytest.raises(ValueError, match=r"does not run in C\+\+ \(exit status 3\)"):
        run_in_cpp(runner, text, torch.zeros(SHAPE))


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


def test_the_program_is_short():
    lines = Path(cpp_runner.SOURCES / "main.cpp").read_text().splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith("#")]) <= 45


def test_what_is_no_folder(tmp_path):
    """Before anything is configured."""
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ValueError, match="folder=None: give the name of a folder"):
        build_runner(None)
    with pytest.raises(ValueError, match="below the file"):
        build_runner(file)
