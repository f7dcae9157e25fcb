import logging
import os
import sys
import warnings

import pytest

from recipes_lib.edge._noise import noise_to


def test_all_ways_of_printing_go_to_the_file(tmp_path, capfd):
    path = tmp_path / "deep" / "noise.log"
    with noise_to(path):
        print("from Python")
        sys.stderr.write("an error of Python\n")
        os.write(1, b"from C\n")
        os.write(2, b"an error of C\n")
        warnings.warn("a warning", stacklevel=1)
    print("afterwards")
    os.write(2, b"an error afterwards\n")
    assert capfd.readouterr() == ("afterwards\n", "an error afterwards\n")
    log = path.read_text()
    for line in ("from Python", "an error of Python", "from C", "an error of C"):
        assert line in log
    assert "afterwards" not in log


def test_what_was_printed_before_stays_outside(tmp_path, capfd):
    print("before", end="")  # waits in the buffer of Python
    with noise_to(tmp_path / "log"):
        pass
    assert capfd.readouterr().out == "before"


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


def test_an_error_passes_and_the_streams_come_back(capfd):
    with pytest.raises(ValueError, match="passes"), noise_to():
        print("inside")
        raise ValueError("passes")
    print("outside")
    assert capfd.readouterr().out == "outside\n"


def test_the_noise_can_be_read(capfd):
    with noise_to() as log:
        os.write(2, b"kept\n")
        log.seek(0)
        assert log.read() == "kept\n"
    assert capfd.readouterr() == ("", "")


def test_a_log_that_is_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"log=.* is a folder"), noise_to(tmp_path):
        pass
