import subprocess
import sys

import pytest

from recipes_lib.edge._executorch_threads import use_threads

# In a process of its own: the number of threads stays for all of it.
PROGRAM = """
from recipes_lib.edge._executorch_threads import use_threads
from executorch.extension.pybindings import portable_lib

use_threads(1)
assert portable_lib._threadpool_get_thread_count() == 1
use_threads(1)
try:
    use_threads(2)
except ValueError as error:
    assert "would crash them" in str(error)
    assert portable_lib._threadpool_get_thread_count() == 1
    print("refused")
"""


def test_the_number_stays_once_it_is_chosen():
    pytest.importorskip("executorch")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "refused\n", done.stderr


def test_a_number_is_needed():
    with pytest.raises(ValueError, match="threads=0"):
        use_threads(0)
