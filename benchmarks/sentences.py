"""Recorded numbers as sentences: the headline of a notebook, and the words for ratios."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.record import machine_line
from recipes_lib.report.style import MIB, MILLISECONDS, three_digits

MEGABYTE = 10**6  # as files are given on devices

# --- headlines ----------------------------------------------------------------------------------

# 02 and 06 say themselves how far off their bytes are; 03 compares with a limit.
OWN_PREDICTION = ("02", "03", "06")


def headline(number: str, run: dict[str, Any] | None) -> str:
    """The result of a notebook in one sentence, how well it was predicted, and where it is from.

    Nothing where no run is recorded.
    """
    if run is None:
        return ""
    sentences = [HEADLINES[number](run)]
    if number not in OWN_PREDICTION:
        sentences.append(prediction(run))
    return f"> {' '.join(sentences)}\n>\n> Measured on {machine_line(run)}."


def prediction(run: dict[str, Any]) -> str:
    """How far the arithmetic was off at most, over all rows of a ladder of bytes or of lengths."""
    found = "peak_bytes"
    predicted = "predicted_bytes"
    # A ladder of lengths is judged where the bytes reach the limit, not at the length tried last.
    if "predicted_tokens" in run["rows"][0]:
        found = "crossing"
        predicted = "predicted_tokens"
    error = max(abs(row[predicted] / row[found] - 1) for row in run["rows"])
    most = "by less than 0.1%"
    if error >= 0.0005:  # less would be printed as 0.0%
        most = f"by {error:.1%} at most"
    return f"Every row was predicted first; the arithmetic is off {most}."


def less_memory(run: dict[str, Any]) -> str:
    """Notebook 01: memory against full fine-tuning, and the held-out loss of every curve."""
    first = run["rows"][0]["peak_bytes"]
    last = run["rows"][-1]["peak_bytes"]
    return (
        f"**{first / MIB:,.0f} MiB → {last / MIB:,.0f} MiB:** the peak memory of tensors of one "
        f"training step of a real pretrained model, from full fine-tuning in fp32 to everything "
        f"combined, on the same batch: **{1 - last / first:.0%} less**. "
        f"{held_out_curves(run['facts']['held_out_loss'])}"
    )


def held_out_curves(curves: dict[str, list[tuple[int, float]]]) -> str:
    """Where the held-out loss of each kind of training began and ended.

    Args:
        curves: points of (optimizer step, loss) by the name of the training. All have as many
            steps.
    """
    changes = []
    for name, points in curves.items():
        _, before = points[0]
        steps, after = points[-1]
        changes.append(f"{name.removesuffix(', fp32')} {before:.2f} → {after:.2f}")
    return f"Held-out loss in {steps} steps, one run each: {'; '.join(changes)}."


def source(run: dict[str, Any] | None) -> str:
    """Which weights a run trained, and what that means for its losses; nothing if it does not say.

    The facts of a run hold `source`, and what `core.default_model.source_note` said of it.
    """
    if run is None or "source" not in run["facts"]:
        return ""
    where = run["facts"]["source"]
    if where.endswith("."):  # a whole sentence, which says what it means
        return where
    meaning = "These are the original weights."
    if "4-bit" in where:
        meaning = (
            "These weights were rounded before, so what QLoRA's four bits cost here is not what "
            "they cost a model in 16 bits."
        )
    return f"Weights of the recorded run: {where}. {run['facts'].get('source_note', meaning)}"


def longer_texts(run: dict[str, Any]) -> str:
    """Notebook 04 in one sentence."""
    first = run["rows"][0]["tokens"]
    last = run["rows"][-1]["tokens"]
    facts = run["facts"]
    how = ""
    if run["device"] == "cpu":  # a GPU takes real steps
        how = (
            " No step of such a length was computed here: its bytes were counted on tensors that "
            "have shapes and no data."
        )
    return (
        f"**{first:,} → {last:,} tokens:** the longest text on which every weight of "
        f"{facts['model']} trains within {facts['limit_bytes'] / 2**30:.0f} GiB, "
        f"**{last / first:.0f} times as long**. The loss on {facts['timed_at']:,} tokens is the "
        f"same in every row, to {facts['loss_error']:.0e}.{how}"
    )


def better_model(run: dict[str, Any]) -> str:
    """Notebook 05 in one sentence."""
    first = run["rows"][0]
    last = run["rows"][-1]
    facts = run["facts"]
    change = "{difference:+.2f} nats per token, 95 % interval {low:+.2f} to {high:+.2f}"
    verdict = change.format(**facts["verdict"])
    less = 1 - last["peak_bytes"] / first["peak_bytes"]
    return (
        f"**Held-out loss {facts['before']:.2f} → {last['loss']:.2f}** ({verdict}) in "
        f"{facts['steps']} steps of one seed, by *everything combined*: QLoRA on packed rows, with "
        f"the base in the fastest precision of the machine. Beside full fine-tuning in fp32 on "
        f"padded rows it has **{less:.0%} less peak memory** and takes "
        f"{time_in_words(last, first)} the time per token. After as many steps full fine-tuning "
        f"has a loss of {first['loss']:.2f}. A run of LoRA in fp32 has the same losses in "
        f"`transformers.Trainer`; {beside(facts['production'], 'Trainer')}."
    )


def _as_good(row: dict[str, Any], first: dict[str, Any]) -> bool:
    """Whether the perplexity is at most 3 % above that of the first row; rows without one are."""
    if None in (row["perplexity"], first["perplexity"]):
        return True
    return row["perplexity"] <= 1.03 * first["perplexity"]


def faster_answers(run: dict[str, Any]) -> str:
    """Notebook 03 in one sentence: the fastest row that keeps the quality, against the first."""
    rows = [row for row in run["rows"] if row["group"] == run["rows"][0]["group"]]
    first = rows[0]
    # A speed that costs much quality is no headline.
    fastest = max((row for row in rows if _as_good(row, first)), key=_tokens_per_second)
    quality = ""
    if None not in (first["perplexity"], fastest["perplexity"]):
        quality = f", perplexity {first['perplexity']:.2f} → {fastest['perplexity']:.2f}"
    if fastest["agreement"] is not None:
        quality += f", the same likeliest token at {fastest['agreement']:.0%} of the places"
    return (
        f"**{first['tokens_per_second']:,.0f} → {fastest['tokens_per_second']:,.0f} tokens per "
        f"second:** {first['group'] or 'the model'} writes {speed_in_words(fastest, first)} as "
        f"fast with {fastest['name']} as with {first['name']}{quality}. Reading its weights alone "
        f"allows {fastest['tokens_per_second'] / fastest['share_of_limit']:,.0f} on this machine."
    )


def kept_bytes(row: dict[str, Any]) -> int:
    """What a rank keeps from step to step."""
    return row["parameters"] + row["gradients"] + row["states"]


def fewer_bytes_per_rank(run: dict[str, Any]) -> str:
    """Notebook 02: the row that keeps least, the largest difference of a loss, both predictions."""
    first, *others = run["rows"]
    least = min(others, key=kept_bytes)
    difference = max(row["loss_difference"] for row in others)
    in_bytes = []
    in_traffic = []
    for row in others:
        predicted = (
            row["predicted_parameters"] + row["predicted_gradients"] + row["predicted_states"]
        )
        in_bytes.append(abs(kept_bytes(row) / predicted - 1))
        if row["predicted_sent"]:
            in_traffic.append(abs(row["sent_bytes"] / row["predicted_sent"] - 1))
    return (
        f"**{kept_bytes(first) / MIB:,.0f} → {kept_bytes(least) / MIB:,.0f} MiB per rank:** "
        f"weights, gradients and optimizer states of one training, by one process and by "
        f"{least['ranks']} with {least['name']}. In {len(others)} strategies, every loss is that "
        f"of one process to {difference:.0e}. Predictions are off by {_at_most(max(in_bytes))} "
        f"for the bytes that a rank keeps, and by {_at_most(max(in_traffic))} for those that it "
        f"sends."
    )


def _at_most(error: float) -> str:
    """ "1.2% at most", or "less than 0.1%", which would be printed as 0.0%."""
    if error < 0.0005:
        return "less than 0.1%"
    return f"{error:.1%} at most"


# The two ends of notebook 06's chain, in one runtime, and the row that a reader starts from.
CHAIN = ("teacher, ExecuTorch", "pruned, 8 bits, ExecuTorch")


def smaller_files(run: dict[str, Any]) -> str:
    """Notebook 06: the chain of the classifier, both ends in the same runtime."""
    rows = {row["name"]: row for row in run["rows"]}
    first, last = (rows[name] for name in CHAIN)
    in_pytorch = rows["teacher"]
    off = []
    for row in run["rows"]:
        if row["predicted_bytes"] and row["file_bytes"] > MEGABYTE:
            off.append(abs(row["file_bytes"] / row["predicted_bytes"] - 1))
    return (
        f"**{first['file_bytes'] / MEGABYTE:.2f} → {last['file_bytes'] / MEGABYTE:.2f} MB and "
        f"{_in_ms(first)} → {_in_ms(last)} ms:** a classifier of handwritten digits in ExecuTorch, "
        f"the teacher and the student that is pruned and in 8 bits. The teacher reads "
        f"{first['accuracy']:.1%} of the test images, and the student {last['accuracy']:.1%}. "
        f"PyTorch takes {_in_ms(in_pytorch)} ms for the teacher on the same core. For files above "
        f"1 MB, the arithmetic of their weights is off by {_at_most(max(off))}."
    )


def _in_ms(row: dict[str, Any]) -> str:
    return three_digits(row["seconds"] * MILLISECONDS)


def times_as_fast(row: dict[str, Any], first: dict[str, Any]) -> str:
    """How many times as fast as the first row, with its range after turns: "38.2× (35.0–41.1)"."""
    if row is first or row["ratio"] is None:
        return f"{three_digits(first['seconds'] / row['seconds'])}×"
    return as_fast_in_words(row, "ratio", "ratio_low", "ratio_high")


def as_fast_in_words(row: dict[str, Any], middle: str, low: str, high: str) -> str:
    """Times over another row's, as three keys name them, turned around: "1.5× (1.4–1.6)"."""
    least = three_digits(1 / row[high])
    most = three_digits(1 / row[low])
    return f"{three_digits(1 / row[middle])}× ({least}–{most})"


def quality_of_file(row: dict[str, Any]) -> str:
    """Its accuracy, its perplexity, or its agreement with the first row."""
    if row["accuracy"] is not None:
        return f"{row['accuracy']:.1%} right"
    if row["agreement"] is not None:
        return f"{100 * row['agreement']:.0f} % the same"
    return f"perplexity {row['perplexity']:,.1f}"


def _file_bytes(row: dict[str, Any]) -> int:
    return row["file_bytes"]


def _tokens_per_second(row: dict[str, Any]) -> float:
    return row["tokens_per_second"]


# By the number of the notebook.
HEADLINES: dict[str, Callable[[dict[str, Any]], str]] = {
    "01": less_memory,
    "02": fewer_bytes_per_rank,
    "03": faster_answers,
    "04": longer_texts,
    "05": better_model,
    "06": smaller_files,
}


# --- ratios -------------------------------------------------------------------------------------


def time_ratio(row: dict[str, Any], first: dict[str, Any]) -> float:
    """Time per token against the first row, whose batch may have another number of them."""
    return first["tokens_per_second"] / row["tokens_per_second"]


def time_in_words(row: dict[str, Any], first: dict[str, Any]) -> str:
    """The time against the first row's: the median of all turns, the lowest and the highest.

    "1.16× (1.05–1.30)". Each turn is compared with the first row's turn of the same round. Without
    turns, as in runs before 2026-11-23, there is no spread to tell.
    """
    if row is first or row.get("ratio") is None:
        return f"{time_ratio(row, first):.2f}×"
    return f"{row['ratio']:.2f}× ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})"


def time_of_length(row: dict[str, Any], first: dict[str, Any]) -> str:
    """The same in a ladder of lengths, whose rows are timed on one number of tokens."""
    if row is first or row.get("ratio") is None:
        return f"{row['seconds'] / first['seconds']:.2f}×"
    return time_in_words(row, first)


def speed_in_words(row: dict[str, Any], first: dict[str, Any]) -> str:
    """How many times as fast as the first row of its group: "4.37× (4.20–4.52)"."""
    if row is first or row["ratio"] is None:
        return f"{row['tokens_per_second'] / first['tokens_per_second']:.2f}×"
    return f"{row['ratio']:.2f}× ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})"


def beside(production: dict[str, Any], library: str) -> str:
    """Our loop against a library at the same settings."""
    theirs = production[library]
    peak = production["ours"]["peak_bytes"] / theirs["peak_bytes"]
    return f"ours takes {theirs['time_ratio']:.2f}× its time, {peak:.2f}× its peak"
