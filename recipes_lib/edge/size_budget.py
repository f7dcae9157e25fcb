"""A size budget: which links of the chain are needed for so many megabytes and milliseconds.

Problem    A device gives so many megabytes and so many milliseconds. Each link of the chain costs
           training time and quality, so none should be taken without need. To try all of them
           takes days.
Idea       File and time follow from numbers that are known before anything is trained:

               file bytes = weights × bits / 8 + 4 × scales + graph
               seconds    = overhead + work / speed

           Work is multiply-adds for an image, and bytes that are read for a token. Overhead and
           speed belong to a runtime and a format: two or three files tell them, and these may have
           random weights. Of all chains, in the order of their price, take the first that fits.
Saves      The trainings and exports of all chains that cannot fit.
Costs      A prediction: activations and caches that are too small are not in it, and the graph has
           to be taken from one file of the same format. Quality is not predicted at all.
Use when   Before the first training, and whenever the device changes.
Not when   A file is there: measure it. Speeds of another device: each has its own.
In production   MLPerf Mobile and Tiny give limits in the same two numbers; ExecuTorch's
           `executor_runner` and `benchmark_app` of OpenVINO measure a file with random weights.
Source     Cai et al., "Once-for-All" (arXiv 1908.09791), who search with predicted latencies;
           Williams et al., "Roofline" (2009).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MEGABYTE = 10**6
MILLISECONDS = 1000.0  # of a second

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_first_that_fits(
    chains: Sequence[tuple[str, float, float]], megabytes: float, milliseconds: float
) -> str:
    """The name of the first of (name, megabytes, milliseconds) that is within both limits."""
    for name, size, time in chains:
        if size <= megabytes and time <= milliseconds:
            return name
    return "none fits"


# --- the technique --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """A fixed part for each image or token in seconds, and the work that is done in a second."""

    overhead: float
    work_per_second: float

    def seconds(self, size: float) -> float:
        return self.overhead + size / self.work_per_second


@dataclass(frozen=True)
class Chain:
    """Some links and what comes out of them, by arithmetic.

    links        what has to be done, such as ("distil", "8 bits")
    weights      how many numbers the file holds
    work         multiply-adds of an image, or bytes that a token reads
    bits         of a weight
    scales       how many scales the file holds
    graph        bytes of the file that are no weights, as one file of this format has them
    format       the name of the speed that it runs at, such as "fp32" or "int8"
    """

    links: tuple[str, ...]
    weights: int
    work: float
    bits: float = 32
    scales: int = 0
    graph: int = 0
    format: str = "fp32"

    @property
    def name(self) -> str:
        return " + ".join(self.links) or "as it is"


@dataclass(frozen=True)
class Choice:
    """The chain that was chosen, and what is predicted of it."""

    chain: Chain
    file_bytes: float
    seconds: float


def choose_chain(
    chains: Sequence[Chain],
    *,
    megabytes: float,
    milliseconds: float,
    speeds: Mapping[str, Any],
) -> Choice:
    """The first of `chains` whose file and time are within the limits."""
    choices = predicted_choices(chains, speeds=speeds)
    for choice in choices:
        if _excess(choice, megabytes, milliseconds) <= 1:
            return choice
    nearest = min(choices, key=lambda each: _excess(each, megabytes, milliseconds))
    raise ValueError(
        f"no chain fits into {megabytes:g} MB and {milliseconds:g} ms. Nearest comes "
        f"{nearest.chain.name}, with {nearest.file_bytes / MEGABYTE:.2g} MB and "
        f"{nearest.seconds * MILLISECONDS:.2g} ms: add a smaller one, or allow more"
    )


def _excess(choice: Choice, megabytes: float, milliseconds: float) -> float:
    """How many times the limit a chain takes, of the limit that it exceeds most."""
    of_size = choice.file_bytes / (megabytes * MEGABYTE)
    of_time = choice.seconds * MILLISECONDS / milliseconds
    return max(of_size, of_time)


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_choices(chains: Sequence[Chain], *, speeds: Mapping[str, Any]) -> list[Choice]:
    """File and time of every chain."""
    choices = []
    for chain in chains:
        seconds = speeds[chain.format].seconds(chain.work)
        choices.append(Choice(chain, predicted_file_bytes(chain), seconds))
    return choices


def predicted_file_bytes(chain: Chain) -> float:
    """Bytes of the file that a chain leaves: weights, their scales, and the graph."""
    return chain.weights * chain.bits / 8 + 4 * chain.scales + chain.graph
