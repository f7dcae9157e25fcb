"""Completion-only loss: train on the answers, and compute logits for nothing else.

Problem    A prompt that carries loss teaches the model to ask. And the logits of tokens without loss are computed,
           kept in fp32 and multiplied by zero: with a vocabulary of 100,000 they are the largest tensors of a step.
Idea       Labels say which tokens are learnt. The head reads only the hidden states that predict one of them:

               token    <user> Add 1 and 2 </user> <assistant>  3   </assistant>
               label      -     -  -  -  -    -         -       3   </assistant>
               logits                                   ^       ^                  the last one needs none

           The label of a token stands at the token itself. The model predicts token t + 1 from token t and shifts
           the labels inside: shifting them in the data as well trains on the token after the next, with a falling
           loss and no error.
Saves      1 - (targets / tokens) of the logits, of their gradients and of the head's arithmetic.
Costs      Nothing in accuracy: the tokens left out have no loss. A shape that changes from batch to batch.
Use when   Instruction and chat tuning. With several padded rows a position is computed if any row needs it, so it
           saves most on packed rows, one per micro-batch.
Not when   Every token is a target (pre-training): chunk the loss instead.
In production   TRL `SFTConfig(completion_only_loss=True)` or `assistant_only_loss=True`, Axolotl
           `train_on_inputs: false`; all of these mask, and compute every logit. `logits_to_keep` is transformers'.
Source     TRL and transformers documentation; Shi et al., "Instruction Tuning With Loss Over Instructions" (arXiv
           2405.14394), says when masking the prompt does *not* help: long prompts, short answers, few examples.

Shapes: B rows, S sequence, K kept positions, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.data import IGNORED
from recipes_lib.core.plain_step import loss_bytes

ENDS = (
    "<end_of_turn>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
)  # of an answer; a base model's text may end otherwise


def completion_only_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The *sum* of the cross-entropy over the targets of `batch`, in nats; divide by their number for the mean.

    Args:
        batch: `input_ids` and `labels` [B, S], not shifted, IGNORED where there is no loss; `position_ids` if packed.
    Raises ValueError if every label is IGNORED, if the model cannot keep some logits only, or adds a loss of its own.
    """
    labels = batch["labels"][:, 1:]  # the target of position t is token t + 1
    keep = (labels != IGNORED).any(0).nonzero()[:, 0]  # [K]
    if len(keep) == 0:
        raise ValueError(f"every label is {IGNORED}: the batch has no token to train on")
    forward = getattr(model, "get_base_model", lambda: model)().forward
    if "logits_to_keep" not in inspect.signature(forward).parameters:
        raise ValueError(
            f"{type(model).__name__} has no logits_to_keep: compute the loss from all of its logits"
        )
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    output = model(**inputs, use_cache=False, logits_to_keep=keep)
    if getattr(output, "aux_loss", None) is not None:
        raise ValueError(
            "the router's auxiliary loss would be left out: set config.output_router_logits = False"
        )
    logits = output.logits.float().flatten(0, 1)  # [B*K, V]
    targets = labels[:, keep].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def check_labels(rows: Iterable[dict[str, list[int]]], tokenizer: Any) -> float:
    """Refuse rows whose labels teach the wrong thing; returns the share of tokens that carry loss.

    Looks for what trains without an error: rows with no target, labels shifted in the data, tokens of the template
    that are learnt (the prompt is not masked), and an end mark that is not (masked as padding, because the padding
    token is the end mark: such a model never stops).
    Raises ValueError with the number of the row, its problem and an excerpt of what would be learnt.
    """
    ends = {tokenizer.convert_tokens_to_ids(end) for end in ENDS} - {tokenizer.unk_token_id}
    ends = (ends | {tokenizer.eos_token_id}) - {None}  # GPT-2's is its unknown token as well
    markers = set(tokenizer.all_special_ids) - ends
    tokens = targets = number = 0
    for number, row in enumerate(rows, 1):
        ids, labels = row["input_ids"], row["labels"]
        learnt = [i for i, label in enumerate(labels) if label != IGNORED]
        shifted = [i for i in learnt if labels[i] != ids[i]]
        problem = None
        if len(ids) != len(labels):
            problem = f"has {len(ids)} tokens and {len(labels)} labels: give one label per token"
        elif not [i for i in learnt if i > 0]:  # nothing predicts the first token
            problem = f"has no target: every label is {IGNORED}"
        elif shifted and all(labels[i] == ids[i + 1] for i in shifted if i + 1 < len(ids)):
            problem = "has shifted labels: the model shifts them itself, so leave each label at its own token"
        elif shifted:
            problem = f"learns other tokens than it has, at {shifted[:5]}: a label equals its token or {IGNORED}"
        elif markers & {labels[i] for i in learnt}:
            problem = "learns tokens of the template: mask everything but the answers"
        elif ends & {ids[i + 1] for i in learnt if i + 1 < len(ids) and labels[i + 1] == IGNORED}:
            problem = "does not learn its end mark: the answer would never stop; mask padding by position, not by token"
        if problem:
            shown = tokenizer.decode([labels[i] for i in learnt][:30])
            raise ValueError(f"row {number - 1} {problem}. Its targets begin with {shown!r}")
        tokens, targets = tokens + len(ids), targets + len(learnt)
    if not number:
        raise ValueError("there is no row to check: the data set is empty")
    return targets / tokens


def estimate_completion_only_loss(budget: Budget, model: Any, *, targets: int) -> Budget:
    """The budget when only `targets` logits (B*K) of a micro-batch are computed; estimate it after the batch split.

    Raises ValueError for targets < 1.
    """
    if targets < 1:
        raise ValueError(f"targets={targets}: a batch needs at least one token to train on")
    return budget.change(loss=min(budget.loss, loss_bytes(model, batch_size=1, seq_len=targets)))
