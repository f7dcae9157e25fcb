"""Programs of their own in the texts: only what ended, and no more than what the seeds allow."""

from __future__ import annotations

import json

import pytest

from benchmarks import architecture, complete, record, render, render_quantization_aware
from benchmarks.cells import NO_BREAK
from tests.benchmarks import own_runs
from tests.benchmarks.test_record import machine_facts


def kept(name, content, folder):
    """Record a run, and give the folder of the results."""
    results = folder / "results"
    record.keep_run(own_runs.written(folder, name, content), folder=results)
    return results


# --- only what ended ----------------------------------------------------------------------------


def test_a_run_that_is_cut_is_not_recorded(tmp_path):
    """The mistake: two of three seeds are read as the whole comparison."""
    cut = own_runs.distillation()
    cut["runs"] = cut["runs"][:-1]
    with pytest.raises(ValueError, match="lacks the run 'teacher' with seed 2"):
        kept("distillation", cut, tmp_path)

    cut = own_runs.quantization_aware()
    cut["runs"] = cut["runs"][1:]
    with pytest.raises(ValueError, match="lacks the run 'full precision' with seed 0"):
        kept("quantization_aware", cut, tmp_path)

    with pytest.raises(ValueError, match="lacks the run without --short"):
        kept("depths", own_runs.depths() | {"short": True}, tmp_path)

    short = own_runs.architecture()
    short["healing"]["short"] = True
    del short["norms"]
    with pytest.raises(ValueError, match="the part norms; the part healing without --short"):
        kept("architecture", short, tmp_path)

    early = own_runs.peers(own_runs.peer("other", ratio=own_runs.time(2.0, 1.9, 2.1)))
    early["rows"][1]["decode_ms"]["rounds"].pop()
    with pytest.raises(ValueError, match="rounds of decode_ms of other"):
        kept("inference_peers", early, tmp_path)
    with pytest.raises(ValueError, match="lacks 4 of 5 rounds"):
        kept("inference_peers", own_runs.peers() | {"rounds": 1}, tmp_path)
    assert not (tmp_path / "results").exists()


def test_the_check_knows_every_part_of_the_program():
    assert set(complete.ARCHITECTURE) == set(architecture.PARTS)


def test_another_file_is_refused(tmp_path):
    """The mistake: any file of JSON becomes a part with a name of its own."""
    with pytest.raises(ValueError, match="neither the ladder of a notebook nor one of"):
        kept("curve", {"rows": []}, tmp_path)
    bare = tmp_path / "distillation.json"
    bare.write_text(json.dumps(own_runs.distillation()))
    with pytest.raises(ValueError, match="on which machine"):
        record.keep_run(bare, folder=tmp_path)
    bare.write_text('{"settings": ')
    with pytest.raises(ValueError, match="no JSON"):
        record.keep_run(bare, folder=tmp_path)


def test_parts_of_another_day_do_not_get_the_date_of_today(tmp_path):
    """The mistake: one part runs again, and the others seem to be measured with it."""
    path = own_runs.written(tmp_path, "architecture", own_runs.architecture())
    facts = machine_facts() | {"threads": 1}
    others = ["healing", "small_models"]
    assert list(record.parts_to_keep(path, facts, others)) == others
    later = facts | {"date": "2026-01-03"}
    assert record.parts_to_keep(path, later, []) == {}
    with pytest.raises(ValueError, match="with date 2026-01-02"):
        record.parts_to_keep(path, later, others)
    with pytest.raises(ValueError, match="with short None, and now it is True"):
        record.parts_to_keep(path, facts | {"short": True}, others)


# --- no more than what the seeds allow ----------------------------------------------------------


@pytest.mark.parametrize(
    ("beyond", "verdict"),
    [
        ((0.1, 0.2, 0.3), "worse"),
        ((-0.1, -0.2, -0.3), "better"),
        ((-0.1, 0.2, 0.3), "undecided"),
        ((0.1, -0.2, -0.3), "undecided"),
        ((0.0, 0.2, 0.3), "undecided"),
    ],
)
def test_a_range_with_zero_decides_nothing(tmp_path, beyond, verdict):
    """The mistake: the mean of three seeds is called better though one seed says the opposite."""
    results = kept("architecture", own_runs.architecture(beyond=beyond), tmp_path)
    assert f"| {verdict} |" in render.block("architecture-cpu", folder=results)
    assert f"per byte: {verdict};" in render.cell("03", "RMSNorm", folder=results)

    results = kept("depths", own_runs.depths(beyond=beyond), tmp_path)
    assert f"| {verdict} | 4.0× |" in render.block("depths-06", folder=results)

    alone = (2.0, 2.0, 2.0)
    taught = [loss + difference for loss, difference in zip(alone, beyond)]
    students = own_runs.distillation(taught=taught, alone=alone)
    results = kept("distillation", students, tmp_path)
    assert f": {verdict}, after 40 steps each" in render.cell("03", "distillation", folder=results)
    block = render.block("distillation-03", folder=results)
    assert f"| {verdict} |" in block
    assert ("the seeds do not agree" in block) == (verdict == "undecided")


def test_the_tables_in_numbers(tmp_path):
    results = kept("architecture", own_runs.architecture(), tmp_path)
    kept("distillation", own_runs.distillation(), tmp_path)
    rows = {
        "architecture-cpu": "| RMSNorm | 2.200 | +0.200 (+0.100 to +0.300) | worse | 1,000 | 256 |",
        "healing-cpu": "| 4 → 1 | 2.000 | 4.000 | 2.500 | 1.750 | +0.750 (+0.750 to +0.750) |",
        "norms-cpu": "| 8,192 × 2,048 numbers in float32 | 4.0 (1.0 ms) | 0.5 (8.0 ms) | 2.0 (2.0",
        "distillation-cpu": "| the text and its teacher | 2.000 | 2.100 | 2.200 | 2.100 | "
        "-0.400 (-0.500 to -0.300) | better |",
    }
    for key, row in rows.items():
        assert row in render.block(key, folder=results)
    table = render.block("distillation-cpu", folder=results)
    assert "20 of 30 blocks and 300 of 400 MB, and `generate` writes with it 1.50×" in table
    for key in ("architecture-03", "distillation-03"):
        block = render.block(key, folder=results)
        assert "###" not in block, "the notebook has headings of its own"
        assert "Test CPU" in block, "the machine is named"


def test_what_is_won_back_is_that_of_the_control(tmp_path):
    """The mistake: what the text has taught counts as won back from rounding."""
    run = own_runs.quantization_aware()
    results = kept("quantization_aware", run, tmp_path)
    block = render.block("grids-06", folder=results)
    assert "| with the rounding | 10.00 | 12.20 | 45 % (40 to 50) |" in block
    assert "from 11.00 to 16.00, 1.45×. Copies of it then train for 40 steps." in block
    assert "becomes 14.00. Another copy trains with the rounding: 12.20." in block
    assert "Test CPU" in block and "###" not in block
    cell = render_quantization_aware.won_back(run)
    assert "after 40 steps: 14.00 rounded at the end, 12.20 trained with the rounding" in cell


# --- other programs -----------------------------------------------------------------------------


def test_a_missing_program_has_no_number(tmp_path):
    """The mistake: a program that is not installed counts as one that takes no time."""
    slow = own_runs.peer("slow", ratio=own_runs.time(2.0, 1.5, 2.5))
    unsure = own_runs.peer("unsure", ratio=own_runs.time(0.9, 0.8, 1.1))
    absent = own_runs.peer("absent", reason="pip install absent")
    results = kept("inference_peers", own_runs.peers(slow, unsure, absent), tmp_path)
    lines = render.block("peers-cpu", folder=results).splitlines()
    assert "| absent | 8 | missing |  |  |  |  |  |" in lines
    timed = "| slow | 8 | 20.0 (19.0–21.0) | 2.00× (1.50–2.50) | slower | 900 (890–910) |"
    assert any(line.startswith(timed) for line in lines)
    assert any("| 0.90× (0.80–1.10) | undecided |" in line for line in lines)
    assert "absent is missing: pip install absent." in lines[-1]
    cell = render.cell("03", "servers", folder=results).replace(NO_BREAK, " ")
    assert cell == "CPU: time of a token to ours with as many bits: unsure 0.90× (0.80–1.10)"


def test_a_place_is_empty_if_no_other_program_ran(tmp_path):
    absent = own_runs.peer("absent", reason="pip install absent")
    results = kept("inference_peers", own_runs.peers(absent), tmp_path)
    assert render.cell("03", "servers", folder=results) == ""


def test_a_fact_that_an_older_run_lacks_leaves_the_cell_empty(tmp_path):
    """The mistake: the name of a machine, and nothing behind it."""
    part = record.LADDERS["03"]
    turns = {"uncompiled": [4e-3, 6e-3, 6e-3], "compiled": [4e-3, 4e-3, 2e-3]}
    timed = {"blocks": 2, "first_run": {"compiled": 13.7}, "seconds_per_token": turns}
    record.keep(part, {"rows": [], "facts": {}}, facts=machine_facts(), folder=tmp_path)
    assert render.cell("03", "compiled decoding", folder=tmp_path) == ""
    content = {"rows": [], "facts": {"compiled": timed}}
    record.keep(part, content, facts=machine_facts(), folder=tmp_path)
    cell = render.cell("03", "compiled decoding", folder=tmp_path).replace(NO_BREAK, " ")
    assert cell == (
        "CPU: 1.50× (1.00–3.00) as fast as uncompiled, 2 blocks; 14 s or more for the first text"
    )
