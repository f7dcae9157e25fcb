from recipes_lib.cli.options import PUBLIC_SHAPES, TECHNIQUES
from recipes_lib.core.model import SHAPES
from recipes_lib.workflows.bench.run import techniques


def test_help_names_what_there_is():
    """The mistake: the names are written down twice, and one of the two is longer."""
    assert list(PUBLIC_SHAPES) == [name for name in SHAPES if not name.startswith("tiny-")]
    assert list(TECHNIQUES) == techniques()
