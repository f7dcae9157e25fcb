"""Pipeline parallelism: each rank has some of the blocks, and micro-batches flow through them.

Problem    A model does not fit one GPU, and the link to the next one is slow, as between two hosts.
Idea       Cut the model between blocks into stages, and the batch into micro-batches, so that all
           ranks have work. A schedule is an order of forwards (F) and backwards (B) for each rank:

               GPipe   rank 0   F0 F1 F2 F3  .  . B0 B1 B2 B3     all forwards first
                       rank 1    . F0 F1 F2 F3 B0 B1 B2 B3  .
               1F1B    rank 0   F0 F1  . B0 F2 B1 F3 B2  . B3     one of each in turns
                       rank 1    . F0 B0 F1 B1 F2 B2 F3 B3  .

           Interleaved: each rank has several thinner stages, and waits a thinner stage's time.
Saves      Weights, gradients and states of the other stages. What is sent is small: one [B/M, S, D]
           for each border and micro-batch, forward and back.
Costs      The bubble, the idle part of the time: (P-1) / (V M + P-1) for P ranks, M micro-batches
           and V stages on each rank. GPipe keeps the activations of M micro-batches, 1F1B those of
           P at most.
Use when   The model needs several hosts, or GPUs without a fast link, and M is several times P.
Not when   Sharding (FSDP) fits and its traffic hides behind compute; few micro-batches; P does not
           divide the blocks. Padding on the left, and several documents in a row: stages see no
           mask, and rows are padded on the right with labels of -100.
In production   `Schedule1F1B(PipelineStage(…), n_microbatches=8, loss_fn=…).step(ids)` of
           `torch.distributed.pipelining`, which runs here; torchtitan
           `parallelism.pipeline_parallel_degree`; Megatron-LM `--pipeline-model-parallel-size`.
Source     Huang et al., "GPipe" (arXiv 1811.06965); Narayanan et al., PipeDream-Flush (2006.09503)
           and "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
           (2104.04473), which has the interleaved schedule.

Shapes: B batch, M micro-batches, S sequence, D hidden, V vocabulary; P ranks.

timed_actions  which rank computed what from when to when, and what of it is idle
stage  some blocks of a model as a module of their own
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.nn import functional as F

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.data import IGNORED
from recipes_lib.core.model.bytes_of_tensors import tensor_bytes, trainable_bytes, weight_bytes
from recipes_lib.core.model.causal_lm import decoder_blocks, require_causal_lm, without_adapters
from recipes_lib.core.model.loss import at_least_fp32, next_tokens
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.collectives import exchange
from recipes_lib.core.ranks.gradient_norm import clip_gradients
from recipes_lib.core.ranks.meshes import one_axis
from recipes_lib.parallel._predicted_bytes import STATES, Kept
from recipes_lib.parallel.pipeline_parallel.stage import Stage, drop_all_but, require_family
from recipes_lib.parallel.pipeline_parallel.timed_actions import (
    BACKWARD,
    FORWARD,
    Action,
    Clock,
    TimedStage,
)

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}

# --- the idea: what a learner can copy ------------------------------------------------------------


def order_of_rank(
    rank: int, *, ranks: int, micro_batches: int, stages_per_rank: int = 1, warm_up: int
) -> list[Action]:
    """What one rank of a pipeline computes: some forwards, one of each in turns, then the rest.

    `warm_up` is the number of forwards before the first backward comes, and it alone tells GPipe
    from 1F1B. A rank with several stages takes as many micro-batches as there are ranks through its
    first stage, then the same ones through its next stage, then the next micro-batches.
    """
    forwards = []
    backwards = []
    for start in range(0, micro_batches, ranks):
        group = range(start, min(start + ranks, micro_batches))
        stages = [rank + number * ranks for number in range(stages_per_rank)]
        for stage in stages:
            forwards += [Action(rank, stage, FORWARD, micro_batch) for micro_batch in group]
        for stage in reversed(stages):
            backwards += [Action(rank, stage, BACKWARD, micro_batch) for micro_batch in group]
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]


def warm_up_of_rank(
    schedule: str, rank: int, *, ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> int:
    """How many forwards a rank computes before its turns of one forward and one backward begin."""
    forwards = micro_batches * stages_per_rank
    ranks_behind = ranks - 1 - rank
    if schedule == "gpipe":
        return forwards
    if schedule == "1f1b":
        return min(forwards, ranks_behind)
    # The first micro-batches go through all stages of the rank but the last one. Then their way to
    # the last rank and back takes two actions for each rank behind.
    return min(forwards, (stages_per_rank - 1) * ranks + 2 * ranks_behind)


# --- the technique --------------------------------------------------------------------------------


def apply_pipeline_parallel(
    model: Any,
    *,
    mesh: Any = None,
    schedule: str = "1f1b",
    micro_batches: int,
    stages_per_rank: int | None = None,
) -> Pipeline:
    """Take the model apart: this rank keeps its stages, and drops the weights of all others.

    Every rank of `mesh` calls it with the same model. Stage s is on rank s modulo P. Train what it
    returns, and make the optimizer from its parameters:

        pipeline = apply_pipeline_parallel(model, micro_batches=8)
        optimizer = torch.optim.AdamW(pipeline.parameters())
        loss = pipeline.step(input_ids, labels)      # the whole batch [B, S] on every rank

    Args:
        mesh: one dimension, the ranks of the pipeline; by default all ranks.
        schedule: one of SCHEDULES.
        micro_batches: into how many the batch of a step is cut.
        stages_per_rank: by default 2 for "interleaved"; the other schedules have 1.
    """
    # A rank that raises alone would leave the others waiting.
    numbers = {"micro_batches": micro_batches, "stages_per_rank": stages_per_rank}
    agree(model=model, schedule=schedule, **numbers)
    require_causal_lm(model)
    require_family(model)
    mesh = one_axis(mesh, such_as="pipeline")
    stages_per_rank = checked_stages(model, schedule, mesh.size(), micro_batches, stages_per_rank)
    return Pipeline(model, mesh, schedule, micro_batches, stages_per_rank)


def checked_stages(
    model: Any, schedule: str, ranks: int, micro_batches: int, stages_per_rank: int | None
) -> int:
    """The stages of a rank, those of the schedule if none are given. Raises ValueError."""
    check_choice(SCHEDULES, schedule=schedule)
    check_whole(micro_batches=micro_batches)
    if schedule == "interleaved":
        stages_per_rank = 2 if stages_per_rank is None else stages_per_rank
        check_whole(least=2, stages_per_rank=stages_per_rank)
    elif stages_per_rank not in (None, 1):
        raise ValueError(f"{schedule} has one stage on each rank; take schedule='interleaved'")
    stages_per_rank = stages_per_rank or 1
    blocks, stages = len(decoder_blocks(model)), ranks * stages_per_rank
    if blocks % stages:
        raise ValueError(f"{blocks} blocks do not divide into {stages} stages")
    return stages_per_rank


class Pipeline:
    """The stages of this rank, and the schedule that runs them with those of the other ranks.

    `stages` are modules, of which each has its `number`. `rank` counts inside of the pipeline.
    """

    def __init__(
        self, model: Any, mesh: Any, schedule: str, micro_batches: int, stages_per_rank: int
    ) -> None:
        """Note what a pipeline asks of the model; the stages come afterwards."""
        causal = without_adapters(model)
        self.mesh = mesh
        self.schedule = schedule
        self.micro_batches = micro_batches
        self.ranks = mesh.size()
        self.rank = mesh.get_local_rank()
        self._group = mesh.get_group()
        self._device = causal.device
        self._dtype = causal.dtype
        self._hidden_size = causal.config.hidden_size
        self._vocabulary = causal.get_output_embeddings().weight.shape[0]
        self._all_stages = self.ranks * stages_per_rank
        numbers = range(self.rank, self._all_stages, self.ranks)
        self.stages = nn.ModuleList([Stage(model, number, self._all_stages) for number in numbers])
        tied = causal.get_input_embeddings().weight is causal.get_output_embeddings().weight
        # Two ranks have copies of a tied weight, and this may be one of them.
        self._tied_over_ranks = tied and self.ranks > 1
        self._tied = self._tied_over_ranks and self.rank in (0, self.ranks - 1)
        drop_all_but(model, self.stages)
        self.clock: Clock | None = None
        self._schedule: Any = None  # PyTorch's, for batches of this shape:
        self._shape_of_batch: torch.Size | None = None
        self._tokens = 1

    def _schedule_for(self, rows: int, seq: int) -> Any:
        """PyTorch's schedule for batches [rows, seq] over this rank's stages."""
        rows = rows // self.micro_batches
        ids = torch.empty(rows, seq, dtype=torch.long, device="meta")
        hidden = torch.empty(rows, seq, self._hidden_size, dtype=self._dtype, device="meta")
        logits = torch.empty(rows, seq, self._vocabulary, dtype=self._dtype, device="meta")
        stages = []
        for stage in self.stages:
            is_last = stage.number == self._all_stages - 1
            enters = ids if stage.number == 0 else hidden.detach().requires_grad_()
            leaves = (logits if is_last else hidden).detach().requires_grad_()
            # The shapes are known, so PyTorch need not find them out by running the model.
            shapes = {"input_args": enters, "output_args": leaves}
            place = {"device": self._device, "group": self._group, "num_stages": self._all_stages}
            stages.append(TimedStage(self, stage, **place, **shapes))
        return SCHEDULES[self.schedule](
            stages if self.schedule == "interleaved" else stages[0],
            n_microbatches=self.micro_batches,
            loss_fn=self._loss_of_micro_batch,
            scale_grads=False,  # True divides by the micro-batches, for a loss that is a mean
        )

    def step(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        record: bool = False,
    ) -> float:
        """Forward and backward of a whole batch through all stages. Returns the loss.

        The loss is the sum over all tokens that count, divided by their number: the same on every
        rank, and the same as without a pipeline.

        Args:
            input_ids: [B, S], the same on every rank.
            labels: [B, S] as transformers takes them: not shifted, IGNORED where nothing counts.
            record: keep begin and end of each action for `recorded`.
        """
        # A rank that differs would wait for messages that nobody sends.
        agree(input_ids=[*input_ids.shape], labels=[*labels.shape], record=record)
        if len(input_ids) % self.micro_batches:
            raise ValueError(
                f"{len(input_ids)} rows: give a multiple of micro_batches={self.micro_batches}"
            )
        if self._tied_over_ranks and any(
            parameter.grad is not None for parameter in self.parameters()
        ):
            raise ValueError(
                "there are gradients of an earlier batch, and those of the tied weight would be "
                "added twice: to accumulate, give more rows in one call, and more micro_batches"
            )
        # [B, S]: each label in the place of the token that has to predict it.
        targets = next_tokens(labels)
        self._tokens = int((targets != IGNORED).sum())
        check_whole(tokens=self._tokens)
        if self._shape_of_batch != input_ids.shape:
            self._schedule = self._schedule_for(*input_ids.shape)
            self._shape_of_batch = input_ids.shape
        self.clock = Clock(self._device, self._group, self.rank) if record else None

        ids = [input_ids] if self.rank == 0 else []
        rest: dict[str, Any] = {}
        losses: list[Tensor] = []
        if self.rank == self.ranks - 1:
            rest = {"target": targets, "losses": losses}
        # `return_outputs` would keep and join the logits of all micro-batches.
        self._schedule.step(*ids, return_outputs=False, **rest)
        self._add_tied_gradients()
        total = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        total = total.to(self._device)
        distributed.broadcast(total, group=self._group, group_src=self.ranks - 1)
        return total.item()

    def _loss_of_micro_batch(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The part of one micro-batch in the loss of the pipeline; logits [B/M, S, V]."""
        # PyTorch's schedules expect a mean over each micro-batch. With unequal numbers of labels
        # that is another loss: here it is a sum over the number of all.
        logits = at_least_fp32(logits.flatten(0, 1))
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = total / self._tokens
        if self.clock is not None:
            self.clock.prolong()  # the last forward includes the loss
        return loss

    def recorded(self) -> list[Action]:
        """What all ranks did in the last step with `record=True`, in seconds since it began.

        All ranks of the pipeline have to call it.
        """
        parts: list[Any] = [None] * self.ranks
        distributed.all_gather_object(parts, self.clock.actions(), group=self._group)
        return [action for part in parts for action in part]

    # --- parameters -------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages by the names that they have in the whole model.

        A tied weight is that of the embedding on rank 0, and that of the output layer on the last.
        """
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                yield stage.whole_name(name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, for the optimizer."""
        for _, parameter in self.named_parameters():
            yield parameter

    def clip_gradients(self, max_norm: float) -> float:
        """Clip the gradients of all of a pipeline's stages to one norm. Returns that norm.

        `clip_grad_norm_` on one rank would see one stage. All ranks of the pipeline have to call
        it.
        """
        counted = list(self.parameters())
        if self._tied and self.rank > 0:
            # Rank 0 has the same gradient and counts it.
            tied = self._tied_weight()
            counted = [parameter for parameter in counted if parameter is not tied]
        norm = clip_gradients(counted, math.inf, stages=self.mesh)  # measures
        total = torch.tensor(norm, device=self._device)
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, total)
        return norm

    # --- a tied weight: on the first and on the last rank -----------------------------------------

    def _tied_weight(self) -> nn.Parameter:
        """The copy that this rank has: the embedding on rank 0, the output layer on the last."""
        return self.stages[0].embedding.weight if self.rank == 0 else self.stages[-1].head.weight

    def _add_tied_gradients(self) -> None:
        """In a pipeline both copies of a tied weight get the sum of their gradients."""
        if not self._tied or not self._tied_weight().requires_grad:
            return
        weight = self._tied_weight()
        theirs = torch.empty_like(weight.grad)
        other = self.ranks - 1 - self.rank
        for work in exchange(weight.grad, theirs, target=other, source=other, group=self._group):
            work.wait()
        weight.grad.add_(theirs)


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_bubble(*, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """The idle part of the time of all ranks, (P-1) / (V M + P-1), if all stages take equally long.

    GPipe and 1F1B have the same bubble. Sending takes no time here.
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


def predicted_sent_bytes(model: Any, *, rows: int, tokens: int, ranks: int, rank: int) -> int:
    """Bytes that a rank with one stage sends: [B, S, D] over each of its borders, forward and back.

    Together with the gradient of a tied embedding, which the first and the last rank exchange.
    """
    if ranks == 1:
        return 0
    causal = without_adapters(model)
    hidden = rows * tokens * causal.config.hidden_size * causal.dtype.itemsize
    borders = 2
    if rank in (0, ranks - 1):
        borders = 1  # nothing goes back from the first stage, nor on from the last
    sent = borders * hidden
    embedding = causal.get_input_embeddings().weight
    tied = embedding is causal.get_output_embeddings().weight
    if tied and embedding.requires_grad and rank in (0, ranks - 1):
        sent += tensor_bytes(embedding)
    return sent


def predicted_rank_bytes(model: Any, *, ranks: int, rank: int) -> Kept:
    """What a rank of a pipeline keeps: its blocks, and an end of the model on the outer ones."""
    gradients = _bytes_of_stage(model, ranks, rank, trainable_bytes)
    weights = _bytes_of_stage(model, ranks, rank, weight_bytes)
    return Kept(weights, gradients, STATES * gradients)


def _bytes_of_stage(model: Any, ranks: int, rank: int, bytes_of: Callable[[nn.Module], int]) -> int:
    """The bytes of the model that one rank holds; a tied weight is held by two ranks."""
    causal = without_adapters(model)
    blocks = bytes_of(decoder_blocks(model))
    first = bytes_of(causal.get_input_embeddings())
    own = blocks // ranks
    if rank == 0:
        own += first
    if rank == ranks - 1:
        # All that is neither a block nor the embedding: the norm, and an untied output layer.
        own += bytes_of(model) - blocks - first
        tied = causal.get_input_embeddings().weight is causal.get_output_embeddings().weight
        if tied and ranks > 1:
            own += first
    return own
