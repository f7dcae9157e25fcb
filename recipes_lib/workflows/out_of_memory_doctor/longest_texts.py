"""The longest text of one row that a card can train on, with the doctor's recipes.

    model = model_without_weights("Qwen/Qwen3-4B", dtype=torch.bfloat16)
    longest_text(model, card="RTX 4090", stack=(*FIVE_LINES, "QLoRA"))     # tokens

Part of out_of_memory_doctor. The length is by arithmetic, at once; `share_of_memory` asks
the step itself, on tensors without data.
"""

from __future__ import annotations

from typing import Any

from recipes_lib.core.predict.card import card_named
from recipes_lib.workflows.longest_sequence import predicted_longest
from recipes_lib.workflows.out_of_memory_doctor.remedies import Question, Remedies, Stack, limit_of

CHECKPOINTS = ("checkpointing",)
CHECKPOINTS_AND_CHUNKS = ("loss in chunks", *CHECKPOINTS)
ALL_SWITCHES = (*CHECKPOINTS_AND_CHUNKS, "activation offload")  # of transformers and TRL
FIVE_LINES = (*ALL_SWITCHES, "tiled MLP")
# Nothing goes to the host.
WITHOUT_OFFLOAD = (*CHECKPOINTS_AND_CHUNKS, "tiled MLP")
NESTED = ("loss in chunks", "nested checkpointing", "tiled MLP")
SHORTEST = 2  # tokens: the first one is nobody's target


def longest_text(model: Any, *, card: str, stack: Stack) -> int:
    """Tokens of the longest text that fits, or 0 where weights and states alone are too much.

    Args:
        model: a causal LM, on "meta" for instance.
        card: one of core.predict.CARDS.
        stack: names of recipes, of `remedies.RECIPES`.
    """
    question = _question(model, card, SHORTEST)
    arithmetic = Remedies(question)
    if arithmetic.peak(stack, SHORTEST) > question.limit:
        return 0
    return predicted_longest(
        lambda tokens: arithmetic.peak(stack, tokens), limit_bytes=int(question.limit)
    )


def what_fills(model: Any, tokens: int, *, card: str, stack: Stack) -> dict[str, float]:
    """The parts of the peak by arithmetic, as shares of it, the largest first."""
    terms = Remedies(_question(model, card, SHORTEST)).terms(stack, tokens)
    moments = terms.moments()
    parts = terms.parts()[max(moments, key=moments.get)]
    return {name: parts[name] / terms.peak for name in sorted(parts, key=parts.get, reverse=True)}


def share_of_memory(model: Any, tokens: int, *, card: str, stack: Stack) -> float:
    """The peak of the step itself on tensors without data, over what the card has for tensors."""
    # It imports every recipe.
    from recipes_lib.workflows.out_of_memory_doctor.predicted_steps import dry_peak

    question = _question(model, card, tokens)
    return dry_peak(question, stack) / question.limit


def _question(model: Any, card: str, tokens: int) -> Question:
    device = card_named(card)
    return Question(model, rows=1, length=tokens, card=device, limit=limit_of(device))
