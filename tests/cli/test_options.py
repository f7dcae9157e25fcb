from recipes_lib.cli.options import PUBLIC_SHAPES, TECHNIQUES
from recipes_lib.core.model import SHAPES
from recipes_lib.workflows.bench.techniques import ENTRIES


def test_help_names_what_there_is():
    """The mistake: the tables are read as text, and one of them is written in another way."""
    assert [name for name in SHAPES if not name.startswith("tiny-")] == PUBLIC_SHAPES
    assert list(ENTRIES) == TECHNIQUES
