"""Write recorded numbers into README.md, CHEATSHEET.md and the notebook sources, between markers.

python -m benchmarks.render            write, and draw the README's chart
python -m benchmarks.render --check    exit 1 if a text differs from the results

    <!-- numbers:headline-01 -->     a block, replaced up to   <!-- end -->
    <!--m 01 + QLoRA-->              inside a line, up to      <!--/m-->

No number enters a text in any other way, so none can disagree with what a run measured.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS
from recipes_lib.report.charts import chart
from recipes_lib.report.style import percent

ROOT = Path(__file__).resolve().parents[1]
LADDERS = {
    "01": "01_large_models_limited_hardware",
    "04": "04_training_long_sequences",
    "05": "05_fine_tuning_pretrained_models",
}
NOTES = {
    "01": "Time is relative to the baseline's step; rows with + keep checkpointing on. Mixed precision has a row where "
    "16-bit products are not emulated.",
    "04": "Found to within 1 %; the prediction against where the bytes reach the limit. Time: forward and backward at "
    "{timed_at:,} tokens, in turns, relative to the baseline's.",
    "05": "Time is per token, relative to full fine-tuning; the last row packs.",
}
UNSURE = (
    "Times are of a few steps each: on a shared CPU they change from run to run, and bytes do not."
)
NONE_YET = "*No such run is recorded yet: `make gpu` makes one, `python -m benchmarks.render` writes it here.*"
MIB = 2**20
FACTS = {  # what a notebook notes beside the rows of its ladder
    "mean of means": lambda facts: f"gradient off by {facts['naive_error']:.0%}",
    "dynamic batch": lambda facts: "{} micro-batches expected, {} found".format(
        *facts["micro_batches"]
    ),
    "answers only": lambda facts: f"{facts['targets']:.0%} of the tokens carry loss",
    "held-out loss": lambda facts: (
        "{difference:+.2f} nats per token, {low:+.2f} to {high:+.2f}".format(**facts["verdict"])
    ),
    "8-bit states": lambda facts: ", ".join(
        f"{k} {v:.2f} bytes" for k, v in facts["state_bytes"].items()
    ),
    "pure bf16": lambda facts: (
        "weights that move: "
        + ", ".join(
            f"{name} {facts['changed'][name]:.0%}" for name in ("nearest", "stochastic", "master")
        )
    ),
    "packing": lambda facts: (
        f"{facts['useful']['packed'] / facts['useful']['padded']:.2f}× useful tokens/s, by sorting "
        f"{facts['useful']['by length'] / facts['useful']['padded']:.2f}×"
    ),
    "merge": lambda facts: f"logits off by {facts['merge_error']:.1e} in a fresh process",
    "resume": lambda facts: f"losses {'identical' if facts['exact'] else 'differ'} after SIGKILL",
    "flash": lambda facts: (
        "the memory grows with the power {:.2f} of the length, eager {:.2f}".format(
            facts["slopes"]["flash attention"], facts["slopes"]["baseline"]
        )
    ),
    "loss": lambda facts: (
        "{:.2f}× the memory and {:.2f}× the time of all logits; of `F.linear_cross_entropy` {}".format(
            facts["loss"]["ours"]["peak_bytes"] / facts["loss"]["plain"]["peak_bytes"],
            facts["loss"]["ours"]["seconds"] / facts["loss"]["plain"]["seconds"],
            ", ".join(
                f"{facts['loss']['ours']['seconds'] / cost['seconds']:.2f}× the time with "
                f"{name.removeprefix('torch, ') if ',' in name else 'its default'}"
                for name, cost in facts["loss"].items()
                if name.startswith("torch")
            ),
        )
    ),
    "sliding window": lambda facts: faster(facts["local"], "sliding window"),
    "block-sparse": lambda facts: faster(facts["local"], "block-sparse"),
    "curriculum": lambda facts: (
        "loss on long rows {:.3f}, fixed length {:.3f}, at equal compute".format(
            *(
                statistics.fmean(facts["curriculum"][schedule])
                for schedule in ("curriculum", "fixed length")
            )
        )
    ),
    "rope": lambda facts: "loss at {:,} tokens {:.2f}, with YaRN {:.2f}".format(
        facts["tokens"], *(facts["curves"][kind][-1] for kind in ("none", "yarn"))
    ),
    "Trainer": lambda facts: beside(facts["production"], "Trainer"),
    "SFTTrainer": lambda facts: beside(facts["production"], "SFTTrainer"),
}


def texts() -> list[Path]:
    return [
        ROOT / "README.md",
        ROOT / "CHEATSHEET.md",
        *sorted((ROOT / "notebooks" / "source").glob("*.py")),
    ]


def newest(
    part: str,
    device: str,
    *,
    bf16: bool | None = None,
    row: str | None = None,
    folder: Path = RESULTS,
) -> dict[str, Any] | None:
    """The latest recorded part, as a notebook's ladder, with the facts of its machine: on "cpu" or "cuda", of any
    kind or of one with or without native bf16, and of those that have a certain `row`."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    files = [f for f in files if f["device"] == device and not f["fast"] and part in f["parts"]]
    files = [f for f in files if bf16 in (None, f["native_bf16"])]
    files = [
        f for f in files if row is None or any(r["name"] == row for r in f["parts"][part]["rows"])
    ]
    latest = max(files, key=lambda f: f["date"], default=None)
    return latest and latest | latest["parts"][part]


def machine_line(run: dict[str, Any]) -> str:
    name = re.sub(r"\((R|TM)\)", "", run["name"])
    versions = f"torch {run['versions']['torch']}, transformers {run['versions']['transformers']}"
    bf16 = "native bf16" if run["native_bf16"] else "no native bf16"
    return f"{name}, {run['cores']} CPU cores, {bf16}, {versions}, {run['date']}"


def block(key: str, *, folder: Path = RESULTS) -> str:
    """The markdown of one block. Raises KeyError for an unknown key."""
    kind, which = key.rsplit("-", 1)
    if kind in ("versus", "finetune"):
        run = newest(kind, {"cpu": "cpu", "gpu": "cuda"}[which], folder=folder)
        return versus(run) if kind == "versus" else finetune(run)
    run = newest(LADDERS[which], "cuda" if kind == "gpu" else "cpu", folder=folder)
    if which == "04" and kind in ("table", "gpu"):
        return lengths(run)
    if kind == "table":
        other = newest(LADDERS[which], "cpu", bf16=run and not run["native_bf16"], folder=folder)
        return table(run, other, note=NOTES[which])
    if kind == "gpu":
        return table(run, note=NOTES[which])
    if run is None:
        return "*No run is recorded yet.*"
    sentence = {"01": less_memory, "04": longer_texts, "05": better_model}[which](run)
    return f"> {sentence} {prediction(run)}\n>\n> Measured on {machine_line(run)}."


def prediction(run: dict[str, Any]) -> str:
    kinds = {"crossing": "predicted_tokens", "peak_bytes": "predicted_bytes"}
    found, predicted = next((key, kinds[key]) for key in kinds if kinds[key] in run["rows"][0])
    errors = [abs(row[predicted] / row[found] - 1) for row in run["rows"]]
    most = f"by {max(errors):.1%} at most" if max(errors) >= 0.0005 else "by less than 0.1%"
    return f"Every row was predicted first; the arithmetic is off {most}."


def less_memory(run: dict[str, Any]) -> str:
    """Notebook 01 in one sentence."""
    first, last = run["rows"][0], run["rows"][-1]
    lora, combined = (curve for curve in run["facts"]["held_out_loss"].values())
    return (
        f"**{first['peak_bytes'] / MIB:,.0f} MiB → {last['peak_bytes'] / MIB:,.0f} MiB:** fine-tuning a real "
        f"pretrained model at the same effective batch with "
        f"**{1 - last['peak_bytes'] / first['peak_bytes']:.0%} less peak memory of tensors**, held-out loss "
        f"{combined[0][1]:.2f} → {combined[-1][1]:.2f} in {combined[-1][0]} steps (plain LoRA: {lora[0][1]:.2f} → "
        f"{lora[-1][1]:.2f})."
    )


def longer_texts(run: dict[str, Any]) -> str:
    """Notebook 04 in one sentence."""
    first, last, facts = run["rows"][0], run["rows"][-1], run["facts"]
    return (
        f"**{first['tokens']:,} → {last['tokens']:,} tokens:** the longest text on which every weight of "
        f"{facts['model']} trains within {facts['limit_bytes'] / 2**30:.0f} GiB, "
        f"**{last['tokens'] / first['tokens']:.0f} times as long**, with the same loss to {facts['loss_error']:.0e}"
        f"{', found by dry steps, which count the bytes of real ones' * (run['device'] == 'cpu')}."
    )


def faster(local: dict[str, Any], way: str) -> str:
    """A pattern of attention against full causal attention."""
    return f"{local['speedup'][way]:.1f}× faster at {local['tokens']:,} tokens, {local['ideal'][way]:.1f}× fewer pairs"


def better_model(run: dict[str, Any]) -> str:
    """Notebook 05 in one sentence."""
    first, last, facts = run["rows"][0], run["rows"][-1], run["facts"]
    verdict = "{difference:+.2f} nats per token, 95 % interval {low:+.2f} to {high:+.2f}".format(
        **facts["verdict"]
    )
    return (
        f"**Held-out loss {facts['before']:.2f} → {last['loss']:.2f}** ({verdict}) by QLoRA on packed rows, with "
        f"**{1 - last['peak_bytes'] / first['peak_bytes']:.0%} less peak memory** than full fine-tuning on padded "
        f"ones, in {time_ratio(last, first):.2f}× the time per token. Full fine-tuning reached {first['loss']:.2f}; "
        f"each took {facts['steps']} steps. The same settings in `transformers.Trainer`: the "
        f"same losses; {beside(facts['production'], 'Trainer')}."
    )


def beside(production: dict[str, Any], library: str) -> str:
    """Our loop against a library at the same settings."""
    ours, theirs = production["ours"], production[library]
    return f"ours takes {theirs['time_ratio']:.2f}× its time, {ours['peak_bytes'] / theirs['peak_bytes']:.2f}× its peak"


def table(run: dict[str, Any] | None, other: dict[str, Any] | None = None, *, note: str) -> str:
    """The ladder as a markdown table, with a column for the time on the `other` kind of machine."""
    if run is None:
        return NONE_YET
    first = run["rows"][0]
    lines = ["| step | predicted | measured | to the baseline | time |", "|---|--:|--:|--:|--:|"]
    notes = [f"{machine_line(run)}. {note}", *[UNSURE] * (run["device"] == "cpu")]
    if other and other is not run and other["native_bf16"] != run["native_bf16"]:
        theirs = {row["name"]: time_ratio(row, other["rows"][0]) for row in other["rows"]}
        lines = [
            f"{lines[0]} time, {'no ' * (not other['native_bf16'])}native bf16 |",
            f"{lines[1]}--:|",
        ]
        notes.append(f"Last column: the time on {machine_line(other)}.")
    else:
        theirs = {}
    own = {row["name"] for row in run["rows"]}
    for row in run["rows"]:
        last = f" {theirs[row['name']]:.2f}× |" if row["name"] in theirs else ""
        lines.append(
            f"| {row['name']} | {row['predicted_bytes'] / MIB:,.0f} MiB | {row['peak_bytes'] / MIB:,.0f} MiB | "
            f"{percent(row['peak_bytes'] / first['peak_bytes'] - 1)} | {time_ratio(row, first):.2f}× |{last}"
        )
    lines += [
        f"| {name} | | | | | {ratio:.2f}× |" for name, ratio in theirs.items() if name not in own
    ]
    return "\n".join([*lines, "", f"*{' '.join(notes)}*"])


def lengths(run: dict[str, Any] | None) -> str:
    """A ladder of lengths as a markdown table."""
    if run is None:
        return NONE_YET
    first = run["rows"][0]
    lines = ["| step | predicted tokens | off by | longest found | to the baseline | time |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for row in run["rows"]:
        lines.append(
            f"| {row['name']} | {row['predicted_tokens']:,} | {row['predicted_tokens'] / row['crossing'] - 1:+.1%} | "
            f"{row['tokens']:,} | "
            f"{row['tokens'] / first['tokens']:.1f}× | {row['seconds'] / first['seconds']:.2f}× |"
        )
    facts = run["facts"]
    what = f"{facts['model']} in {facts['limit_bytes'] / 2**30:.0f} GiB of tensors."
    notes = [
        f"{machine_line(run)}. {what} {NOTES['04'].format(**facts)}",
        *[UNSURE] * (run["device"] == "cpu"),
    ]
    return "\n".join([*lines, "", f"*{' '.join(notes)}*"])


def versus(run: dict[str, Any] | None) -> str:
    """Our recipes beside the libraries that do the same, as a markdown table."""
    if run is None:
        return NONE_YET
    lines = ["| recipe | library | time | peak |", "|---|---|--:|--:|"]
    for technique, pair in run["pairs"].items():
        ratios = [
            f"{pair[key]:.2f}×" if key in pair else "failed" for key in ("time_ratio", "peak_ratio")
        ]
        lines.append(
            f"| {technique.replace('_', ' ')} | {pair['library']} | {' | '.join(ratios)} |"
        )
    note = "The recipe's over the library's: below 1 the recipe wins."
    return "\n".join([*lines, "", f"*{machine_line(run)}. {note} {limits(run)}*"])


def finetune(run: dict[str, Any] | None) -> str:
    """QLoRA by our loop beside the Trainer, as a markdown table."""
    if run is None:
        return NONE_YET.replace(
            "make gpu", 'make gpu ARGS="--parts finetune"'
        )  # no default part: it takes minutes
    base = run["ways"]["Trainer"].get("tokens_per_second")
    lines = ["| way | useful tokens/s | to the Trainer | peak GiB |", "|---|--:|--:|--:|"]
    for name, row in run["ways"].items():
        if "failed" in row:
            why = "not installed" if row["failed"].startswith("ImportError") else "failed"
            lines.append(f"| {name} | {why} | | |")
        else:
            ratio = f"{row['tokens_per_second'] / base:.2f}×" if base else ""
            lines.append(
                f"| {name} | {row['tokens_per_second']:,.0f} | {ratio} | {row['peak_bytes'] / 2**30:.2f} |"
            )
    notes = [
        f"{machine_line(run)}. {run['shape']}, {run['layers'] or 'all'} layers, gradient checkpointing "
        f"{'on' if run['gradient_checkpointing'] else 'off'}. A padded step has {run['documents']} pairs of at "
        f"most {run['max_tokens']} tokens ({run['useful_share']['padded']:.0%} is text); packed, a step has "
        f"{run['packs']} rows of {run['max_tokens']} tokens."
    ]
    if any("flex" in name for name in run["ways"]):
        notes.append("With flex attention it is one row as long as those.")
    updates = [
        f"{kind} {row['seconds'] * 1000:,.1f} ms and {row['bytes_per_parameter']:.1f} bytes per parameter"
        for kind, row in run.get("updates", {}).items()
        if "failed" not in row
    ]
    if updates:
        notes.append(f"AdamW's update of {run['parameters']:,} parameters: {'; '.join(updates)}.")
    return "\n".join([*lines, "", f"*{' '.join(notes)}*"])


def limits(run: dict[str, Any]) -> str:
    """What the machine can do at best, beside which a ratio is read."""
    if "limits" not in run["parts"]:
        return ""
    most = run["parts"]["limits"]
    return f"This machine: {most['bf16_tflops']:,.1f} TFLOP/s in bf16, {most['copy_gb_per_s']:,.0f} GB/s in copies."


def time_ratio(row: dict[str, Any], first: dict[str, Any]) -> float:
    """Time per token against the first row, whose batch may have another number of them."""
    return first["tokens_per_second"] / row["tokens_per_second"]


def cell(number: str, name: str, *, folder: Path = RESULTS) -> str:
    """A row of a ladder, or a fact beside it, as the cell of a table: memory and time against the baseline."""
    shown = []
    for device in ("cpu", "cuda"):
        part = (
            "rope" if name == "rope" else LADDERS[number]
        )  # a part of its own: it takes too long for a notebook
        run = newest(part, device, row=None if name in FACTS else name, folder=folder)
        rows = {row["name"]: row for row in run.get("rows", [])} if run else {}
        where = "CPU" if device == "cpu" else run and run["name"]
        latest = newest(LADDERS[number], device, folder=folder)
        if (
            run
            and device == "cpu"
            and any(run[key] != latest[key] for key in ("name", "native_bf16", "date"))
        ):
            where = f"CPU {'with' if run['native_bf16'] else 'without'} native bf16"  # the newest has no such row
        if run and name in FACTS:
            shown.append(f"{where}: {FACTS[name](run.get('facts', run))}")
        elif name in rows and number == "04":
            first, row = run["rows"][0], rows[name]
            longer = f"{row['tokens'] / first['tokens']:.1f}× the baseline's length"
            shown.append(
                f"{where}: {longer}, {row['seconds'] / first['seconds']:.2f}× its time per token"
            )
        elif name in rows:
            first, row = run["rows"][0], rows[name]
            memory = row["peak_bytes"] / first["peak_bytes"] - 1
            shown.append(f"{where}: {percent(memory)} peak, {time_ratio(row, first):.2f}× time")
    return "; ".join(shown) or "not measured on this kind of machine yet"


def render(text: str, *, comment: str = "", folder: Path = RESULTS) -> str:
    """`text` with every marked place filled; `comment` is the prefix of the lines (`# ` in notebook sources)."""

    def fill(match: re.Match) -> str:
        lines = block(match[2], folder=folder).splitlines()
        return match[1] + "".join(f"{comment}{line}".rstrip() + "\n" for line in lines) + match[3]

    prefix = re.escape(comment)
    text = re.sub(
        rf"({prefix}<!-- numbers:([\w-]+) -->\n)[\s\S]*?({prefix}<!-- end -->)", fill, text
    )
    inline = r"(<!--m (\w+) ([^>]+?)-->).*?(<!--/m-->)"
    return re.sub(inline, lambda m: m[1] + cell(m[2], m[3], folder=folder) + m[4], text)


def draw() -> None:
    """The chart of the README, from the same recorded run."""
    run = newest(LADDERS["01"], "cpu")
    if run:
        (ROOT / "docs").mkdir(exist_ok=True)
        chart(run["rows"], title=machine_line(run)).savefig(
            ROOT / "docs" / "ladder-01.png", dpi=110
        )


def main() -> None:
    stale = []
    for path in texts():
        old = path.read_text(encoding="utf-8")
        new = render(old, comment="# " if path.suffix == ".py" else "")
        if new != old:
            stale.append(path.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if "--check" not in sys.argv:
        draw()
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale) or 'nothing'}")
    if stale and "--check" in sys.argv:
        sys.exit(1)


if __name__ == "__main__":
    main()
