from tests.test_architecture import TECHNIQUES, name


def test_every_technique_has_a_line_and_nothing_else_has(command):
    """A part of a technique is none, and neither is a file of core or of a workflow."""
    status, out, _ = command("list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == sorted(map(name, TECHNIQUES))


def test_a_line_says_what_the_technique_is(command):
    _, out, _ = command("list")
    line = next(line for line in out.splitlines() if line.startswith("fine_tuning/lora.py"))
    assert "LoRA: " in line
