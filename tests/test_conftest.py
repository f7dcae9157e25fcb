"""What one test leaves to the next."""

import sys
import weakref

from tests import conftest


class Model:
    """As the traceback of a failed test holds one: in a reference cycle."""

    def __init__(self):
        self.me = self


def test_a_failure_in_the_file_before_holds_no_model():
    """The mistake: it was frozen with the imports, and every peak after it was too high."""
    model = Model()
    sys.last_exc = RuntimeError(model)
    dead = weakref.ref(model)
    del model
    conftest.begin_file()
    assert dead() is None
