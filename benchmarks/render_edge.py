"""The run of `benchmarks.edge` in the texts: a table, a block of a notebook, and a cell.

Speeds are ratios to `generate` in fp32 of the model with as many blocks, in the same turn.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.edge import ratios, tokens_per_second
from benchmarks.record import machine_line
from benchmarks.table_text import line, table

Run = dict[str, Any]

WORDS = {
    "eager fp32": "`generate`, fp32",
    "eager bf16": "`generate`, bf16",
    "fp32": "`.pte`, fp32",
    "4bit-plain-attention": "`.pte`, 4 bits, attention of plain operators",
    "4bit": "`.pte`, 4 bits, attention made for a cache",
    "4bit-everywhere": "the same, 4 bits in the output layer as well",
}
WHOLE_FILE = "whole-4bit"

# --- tables -------------------------------------------------------------------------------------


def files(run: Run | None) -> str:
    """Bytes, speed, load and perplexity of each file. Nothing where no run is recorded."""
    if run is None:
        return ""
    lines = [_line(run, name) for name in run["times"]]
    settings = run["settings"]
    notes = [
        f"{machine_line(run)}. SmolLM2-135M, {_blocks(run, 'short')} or all "
        f"{_blocks(run, 'whole')} blocks, one thread. In the blocks 4 bits in groups of 64, output "
        f"layer and embedding in 8 bits. Of its bf16: of the bytes of these blocks in bf16.",
        f"Tokens per second: the median of {settings['rounds']} turns behind a prompt of "
        f"{settings['prompt']} tokens. Faster: than `generate` in fp32 with as many blocks, in the "
        f"same turn; in brackets are the smallest and the largest.",
        f"Perplexity: of the file, token by token, over {run['quality']['tokens']:,} tokens. "
        f"Memory: what a process grows by until the first token, with the libraries loaded before.",
    ]
    columns = ["way", "blocks", "MB", "of its bf16", "tokens/s", "faster", "memory", "perplexity"]
    return table(columns, lines, notes)


def _line(run: Run, name: str) -> str:
    size = name[: len("short")]
    way = name[len("short") + 1 :]
    rows = run["times"]
    found = run["export"].get(name)
    cells = [WORDS[way], str(_blocks(run, size)), "", ""]
    if found is not None:
        cells[2] = f"{found['bytes'] / 1e6:.1f}"
        cells[3] = f"{100 * found['bytes'] / found['bf16_bytes']:.0f} %"
    cells.append(f"{tokens_per_second(rows[name]):.0f}")
    cells.append(_times(ratios(rows, name, f"{size} eager fp32")))
    cells += [_memory(run, name, way), _perplexity(run, name, size, way)]
    return line(cells)


def _times(found: list[float]) -> str:
    """The median with its range; nothing for what is compared with itself."""
    if found[0] == found[-1] == 1:
        return ""
    return f"{statistics.median(found):.1f}× ({found[0]:.1f} to {found[-1]:.1f})"


def _memory(run: Run, name: str, way: str) -> str:
    for key in (f"{name}.pte", way):
        if name.startswith("whole") and key in run["load"]:
            return f"{run['load'][key]['rss'] / 1e6:.0f} MB"
    return ""


def _perplexity(run: Run, name: str, size: str, way: str) -> str:
    found = run["quality"]["perplexity"]
    if size == "whole" and way in found:
        return f"{found[way]:.2f}"
    if name in found:
        return f"{found[name]:.2f}"
    return ""


def _blocks(run: Run, size: str) -> int:
    of_size = [row for name, row in run["export"].items() if name.startswith(size)]
    return of_size[0]["settings"]["layers"]


# --- a notebook ---------------------------------------------------------------------------------


def block(run: Run | None) -> str:
    """The table below the steps of the chain in words."""
    if run is None:
        return ""
    rows = run["times"]
    plain = statistics.median(ratios(rows, "short-fp32", "short eager fp32"))
    attention = statistics.median(ratios(rows, "short-4bit", "short-4bit-plain-attention"))
    equal, tokens = run["quality"]["equal_tokens"]
    perplexities = run["quality"]["perplexity"]
    rounded = perplexities[f"{WHOLE_FILE}, rounded in eager"]
    return (
        f"With {_blocks(run, 'short')} blocks, the fp32 file writes {plain:.1f}× as fast as "
        f"`generate`, and {equal} of {tokens} tokens are the same. So {plain:.1f}× is the price of "
        f"Python and of `generate`. In 4 bits, the attention that is made for a cache writes "
        f"{attention:.1f}× as fast as one of plain operators. The whole model is {in_words(run)}. "
        f"Its perplexity goes from {perplexities['eager fp32']:.2f} to "
        f"{perplexities[WHOLE_FILE]:.2f}; rounded in eager mode, the model has "
        f"{rounded:.2f}.\n\n{files(run)}"
    )


def in_words(run: Run) -> str:
    """The whole model as a file, for a sentence or a cell."""
    row = run["export"][WHOLE_FILE]
    found = ratios(run["times"], WHOLE_FILE, "whole eager fp32")
    return (
        f"{row['bytes'] / 1e6:.0f} MB, {100 * row['bytes'] / row['bf16_bytes']:.0f} % of bf16, and "
        f"writes {_times(found)} as fast as `generate` in fp32, on one thread"
    )
