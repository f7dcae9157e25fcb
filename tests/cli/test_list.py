from tests.test_architecture import TECHNIQUES, name


def test_every_technique_has_a_line_and_nothing_else_has(command):
    """A part of a technique is none, and neither is a file of core or of a workflow."""
    status, out, _ = command("list")
    assert status == 0
    files = [line for line in out.splitlines() if not line.startswith(" ")]
    assert files == [name(path).removesuffix("/__init__.py") for path in TECHNIQUES]
    assert max(map(len, out.splitlines())) <= 80


def test_a_line_says_what_the_technique_is(command):
    _, out, _ = command("list")
    lines = out.splitlines()
    below = lines[lines.index("fine_tuning/lora.py") + 1]
    assert below.startswith("    LoRA: ")
