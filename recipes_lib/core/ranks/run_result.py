"""What a training run on several ranks leaves behind, as plain numbers that rank 0 sends back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankRun:
    """A few steps of one strategy.

    Bytes are those of the rank that holds most of them in all, after the last step and before its
    gradients are freed. `sent_bytes` are what that rank sends in one step, `calls` how often it
    calls each collective. `losses` are means over all tokens of a step, so they are the same number
    for every strategy. `seconds` are those of the steps after the first, which warms up.
    """

    ranks: int
    losses: list[float]
    seconds: list[float]
    parameters: int
    gradients: int
    states: int
    sent_bytes: int
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def kept_bytes(self) -> int:
        """Parameters, gradients and states together."""
        return self.parameters + self.gradients + self.states
