from recipes_lib.cli.options import PUBLIC_SHAPES
from recipes_lib.core.model import SHAPES


def test_help_names_the_shapes_that_there_are():
    """They are written down twice: core.model imports torch, and --help does not."""
    assert list(PUBLIC_SHAPES) == [name for name in SHAPES if not name.startswith("tiny-")]
