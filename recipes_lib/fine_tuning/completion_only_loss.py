"""Completion-only loss: train on the answers, and compute logits for nothing else.

Problem    A prompt that carries loss teaches the model to ask. And the logits of tokens without
           loss are computed, kept in fp32 and multiplied by zero: with a vocabulary of 100,000
           they are the largest tensors of a step.
Idea       Labels say which tokens are learnt. The head reads only the hidden states that predict
           one:

               token    <user> Add 1 and 2 </user> <assistant>  3   </assistant>
               label      -     -  -  -  -    -         -       3   </assistant>
               logits                                   ^       ^      the last one needs none

           The label of a token stands at the token itself. The model predicts token t + 1 from
           token t and shifts the labels inside: shifting them in the data as well trains on the
           token after the next, with a falling loss and no error.
Saves      1 - (targets / tokens) of the logits, of their gradients and of the head's arithmetic.
Costs      Nothing in accuracy: the tokens left out have no loss. The shape of the logits changes
           from batch to batch.
Use when   Instruction and chat tuning. With several padded rows a position is computed if any row
           needs it, so it saves most on packed rows, one per micro-batch.
Not when   Every token is a target (pre-training): chunk the loss instead.
In production   TRL `SFTConfig(completion_only_loss=True)` or `assistant_only_loss=True`, Axolotl
           `train_on_inputs: false`: all of these mask. TRL's usual loss also leaves out the other
           logits, on a GPU; on a CPU it computes every one, in tiles. The argument
           `logits_to_keep` of transformers leaves the others out.
Source     TRL and transformers documentation; Shi et al., "Instruction Tuning With Loss Over
           Instructions" (arXiv 2405.14394), says when masking the prompt does *not* help: long
           prompts, short answers, few examples.

Shapes: B rows, S sequence, K kept positions, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from recipes_lib.core.data import Batch
from recipes_lib.core.data.tokens_and_labels import IGNORED, Row
from recipes_lib.core.model.causal_lm import without_adapters
from recipes_lib.core.model.loss import refuse_auxiliary_loss, require_shifted_loss

# End marks of an answer. A base model's text may end with another mark than its answers.
ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|end|>")

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_answer_loss(model: Any, batch: Batch) -> torch.Tensor:
    """The sum of the cross-entropy over the answers, from all logits: mask, and add up."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits  # [B, S, V]
    predictions = logits[:, :-1].float().log_softmax(-1)  # position t predicts token t + 1
    targets = batch["labels"][:, 1:]  # [B, S - 1]
    learnt = targets != IGNORED
    tokens = targets.masked_fill(~learnt, 0)  # some token, where none is asked for
    chosen = predictions.gather(-1, tokens[..., None])[..., 0]  # log-probability of each target
    return -chosen[learnt].sum()


# --- the technique --------------------------------------------------------------------------------


def completion_only_loss(model: Any, batch: Batch) -> torch.Tensor:
    """The *sum* of the cross-entropy over the targets of `batch`, in nats.

    Divide it by their number for the mean.

    Args:
        batch: `input_ids` and `labels` [B, S], not shifted, IGNORED where there is no loss;
            `position_ids` if the rows are packed.
    """
    labels = batch["labels"][:, 1:]  # [B, S - 1]: the target of position t is token t + 1
    keep = (labels != IGNORED).any(0).nonzero()[:, 0]  # [K]: positions that some row learns from
    if len(keep) == 0:
        raise ValueError(f"every label is {IGNORED}: the batch has no token to train on")
    _require_logits_to_keep(model)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    output = model(**inputs, use_cache=False, logits_to_keep=keep)
    refuse_auxiliary_loss(output)
    logits = output.logits.float().flatten(0, 1)  # [B*K, V]
    targets = labels[:, keep].flatten()  # [B*K]
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def check_labels(rows: Iterable[Row], tokenizer: Any, *, place: str = "") -> float:
    """Refuse labels that teach more or less than completions; returns the share that carries loss.

    Looks for what trains without an error: rows with no target, labels shifted in the data,
    tokens of the template that are learnt (the prompt is not masked), and an end mark that is not
    (masked as padding, because the padding token is the end mark: such a model never stops).

    Args:
        place: where all of these rows come from, such as "pairs.jsonl, line 7".
    """
    ends = _end_marks(tokenizer)
    markers = set(tokenizer.all_special_ids) - ends
    tokens = 0
    targets = 0
    for number, row in enumerate(rows):
        learnt = [label for label in row["labels"] if label != IGNORED]
        problem = _problem_of(row, ends, markers)
        if problem:
            shown = tokenizer.decode(learnt[:30])
            name = f"row {number}"
            if place:
                name = f"{place}: the row"
            raise ValueError(f"{name} {problem}. Its targets begin with {shown!r}")
        tokens += len(row["input_ids"])
        targets += len(learnt)
    if not tokens:
        raise ValueError("there is no row to check: the data set is empty")
    return targets / tokens


def _problem_of(row: Row, ends: set[int], markers: set[int]) -> str | None:
    """What the labels of `row` teach beside the completion, or do not; None if all is well."""
    ids = row["input_ids"]
    labels = row["labels"]
    learnt = [i for i, label in enumerate(labels) if label != IGNORED]
    if not [i for i in learnt if i > 0]:  # nothing predicts the first token
        return f"has no target: every label is {IGNORED}"

    # A label that is not its own token belongs to the next one, or to none.
    foreign = [i for i in learnt if labels[i] != ids[i]]
    if foreign:
        shifted = all(labels[i] == ids[i + 1] for i in foreign if i + 1 < len(ids))
        if shifted:
            return (
                "has shifted labels: the model shifts them itself, "
                "so leave each label at its own token"
            )
        return (
            f"learns other tokens than it has, at {foreign[:5]}: "
            f"a label equals its token or {IGNORED}"
        )

    if markers & {labels[i] for i in learnt}:
        return "learns tokens of the template: mask everything but the answers"

    # The token behind a learnt one is not learnt, and it is an end mark.
    borders = [i + 1 for i in learnt if i + 1 < len(ids) and labels[i + 1] == IGNORED]
    if ends & {ids[i] for i in borders}:
        return (
            "does not learn its end mark: the answer would never stop; "
            "mask padding by position, not by token"
        )
    return None


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _require_logits_to_keep(model: Any) -> None:
    """Raise ValueError for a model that cannot leave the logits of prompts out."""
    forward = without_adapters(model).forward
    if "logits_to_keep" not in inspect.signature(forward).parameters:
        raise ValueError(
            f"{type(model).__name__} has no logits_to_keep: compute the loss from all of its logits"
        )
    require_shifted_loss(model)


def _end_marks(tokenizer: Any) -> set[int]:
    """The tokens with which a completion may end."""
    known = {tokenizer.convert_tokens_to_ids(end) for end in ENDS}
    known.discard(tokenizer.unk_token_id)  # stands for the marks that this tokenizer does not have
    known.add(tokenizer.eos_token_id)  # in GPT-2 this is the unknown token as well
    known.discard(None)
    return known
