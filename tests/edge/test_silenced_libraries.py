"""What libraries print goes to a file."""

import logging
import os
import sys
import warnings

from recipes_lib.edge._silenced_libraries import noise_to


def test_all_ways_of_printing_go_to_the_file(tmp_path, capfd):
    """One stream forgotten, or lines in the wrong one because they waited in a buffer."""
    path = tmp_path / "deep" / "noise.log"
    print("before", end="")  # waits in the buffer of Python
    with noise_to(path):
        print("from Python")
        sys.stderr.write("an error of Python\n")
        os.write(1, b"from C\n")
        os.write(2, b"an error of C\n")
        warnings.warn("a warning", stacklevel=1)
    print(" afterwards")
    os.write(2, b"an error afterwards\n")
    assert capfd.readouterr() == ("before afterwards\n", "an error afterwards\n")
    lines = sorted(path.read_text().splitlines())
    assert lines == ["an error of C", "an error of Python", "from C", "from Python"]


def test_a_logger_made_inside_lives_on(tmp_path, capfd):
    """It remembers the stream of its first day, which would be a closed file."""
    path = tmp_path / "log"
    old = logging.getLogger("made before")
    old.addHandler(logging.StreamHandler(sys.stderr))
    new = logging.getLogger("made inside")
    old.propagate = new.propagate = False  # pytest listens as well
    with noise_to(path):
        new.addHandler(logging.StreamHandler())
        old.error("old inside")
        new.error("new inside")
    old.error("old after")
    new.error("new after")
    try:
        assert path.read_text() == "old inside\nnew inside\n"
        assert capfd.readouterr().err == "old after\nnew after\n"
    finally:
        old.handlers.clear()
        new.handlers.clear()
