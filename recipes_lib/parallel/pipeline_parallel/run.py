"""The stages of one rank, run by PyTorch's schedule together with those of the other ranks.

Shapes: B batch, M micro-batches, S sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from recipes_lib.core.checks import check_number, check_whole
from recipes_lib.core.data import IGNORED
from recipes_lib.core.model.causal_lm import without_adapters
from recipes_lib.core.model.output_layer import at_least_fp32
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.gradient_norm import clip_gradients
from recipes_lib.core.ranks.pipeline_grid import Action
from recipes_lib.parallel.pipeline_parallel.clock import Clock, timed_stage
from recipes_lib.parallel.pipeline_parallel.stage import Stage, drop_all_but


class Pipeline:
    """The stages of this rank, and the schedule that runs them with those of the other ranks.

    `stages` are modules, of which each has its `number`. `rank` counts inside of the pipeline.
    """

    def __init__(
        self, model: Any, mesh: Any, schedule: str, micro_batches: int, stages_per_rank: int
    ) -> None:
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
        self._tied = self._is_tied(causal)
        drop_all_but(model, self.stages)
        self.clock: Clock | None = None
        self._schedule: Any = None  # PyTorch's, for batches of this shape:
        self._shape: torch.Size | None = None
        self._tokens = 1

    def _is_tied(self, causal: Any) -> bool:
        """Whether this rank has a copy of a weight that another rank has, too."""
        embedding = causal.get_input_embeddings().weight
        tied = embedding is causal.get_output_embeddings().weight
        return tied and self.ranks > 1 and self.rank in (0, self.ranks - 1)

    def step(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        position_ids: Tensor | None = None,
        tokens: int | None = None,
        record: bool = False,
    ) -> float:
        """Forward and backward of a whole batch. Gradients are added to `.grad`. Returns the loss.

        The loss is the sum over all tokens that count, divided by their number. It is the same on
        every rank, and the same number as without a pipeline.

        Args:
            input_ids: [B, S], the same on every rank.
            labels: [B, S] as transformers takes them: not shifted, IGNORED where nothing counts.
            position_ids: [B, S]; where they restart, a new document begins. By default 0, 1, 2, …
            tokens: what the sum is divided by; by default the labels of this batch that count. With
                several pipelines side by side, the number of all of them.
            record: keep begin and end of each action for `recorded`.
        Raises ValueError, on every rank, for a batch that does not divide into micro-batches, for
        labels or positions of another shape, for ranks with other shapes, and if no label counts.
        """
        given = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
        shapes = {name: [*tensor.shape] for name, tensor in given.items() if tensor is not None}
        # A rank that differs would wait for messages that nobody sends.
        agree(**shapes, tokens=tokens, record=record)
        self._require_shapes(shapes)
        nothing = labels.new_full((len(labels), 1), IGNORED)
        # [B, S]: each label in the place of the token that has to predict it.
        targets = torch.cat([labels[:, 1:], nothing], dim=1)
        if tokens is None:
            tokens = int((targets != IGNORED).sum())
        check_whole(tokens=tokens)
        self._tokens = tokens
        if self._shape != input_ids.shape:
            self._schedule = self._schedule_for(*input_ids.shape)
            self._shape = input_ids.shape
        self.clock = None
        if record:
            self.clock = Clock(self._device, self._group, self.rank)

        ids = []
        rest: dict[str, Any] = {}
        losses: list[Tensor] = []
        if position_ids is not None:
            rest["position_ids"] = position_ids
        if self.rank == 0:
            ids = [input_ids]
        if self.rank == self.ranks - 1:
            rest |= {"target": targets, "losses": losses}
        earlier = self._take_tied_gradient()
        # `return_outputs` would keep and join the logits of all micro-batches.
        self._schedule.step(*ids, return_outputs=False, **rest)
        self._add_tied_gradients(earlier)
        return self._loss_of_all(losses)

    def recorded(self) -> list[Action]:
        """What all ranks did in the last step with `record=True`, in seconds since it began.

        All ranks of the pipeline have to call it. Raises ValueError if nothing was recorded.
        """
        if self.clock is None:
            raise ValueError("nothing was recorded: call step(…, record=True) first")
        parts: list[Any] = [None] * self.ranks
        distributed.all_gather_object(parts, self.clock.actions(), group=self._group)
        return [action for part in parts for action in part]

    # --- parameters -------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the names that they have in the whole model.

        A tied weight is that of the embedding on rank 0, and that of the output layer on the last.
        """
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                yield stage.whole_name(name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for the optimizer."""
        for _, parameter in self.named_parameters():
            yield parameter

    def clip_gradients(self, max_norm: float) -> float:
        """Clip the gradients of all stages to one norm. Returns the norm that they had together.

        All ranks of the pipeline have to call it. Raises ValueError for a norm of 0 or less.
        """
        check_number(above=0, max_norm=max_norm)
        counted = list(self.parameters())
        if self._tied and self.rank > 0:
            # Rank 0 has the same gradient and counts it.
            tied = self._tied_weight()
            counted = [parameter for parameter in counted if parameter is not tied]
        norm = clip_gradients(counted, math.inf, stages=self.mesh)  # measures
        total = torch.tensor(norm, device=self._device)
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, total)
        return norm

    # --- pieces of a step -------------------------------------------------------------------------

    def _require_shapes(self, shapes: dict[str, list[int]]) -> None:
        """Raise ValueError unless all are [B, S], and B divides into micro-batches."""
        for name, shape in shapes.items():
            if shape != shapes["input_ids"] or len(shape) != 2:
                raise ValueError(
                    f"{name} {shape} beside input_ids {shapes['input_ids']}: give all of them as "
                    f"[rows, tokens]"
                )
        rows = shapes["input_ids"][0]
        if rows % self.micro_batches:
            raise ValueError(
                f"{rows} rows: give a multiple of micro_batches={self.micro_batches}, so that all "
                f"micro-batches have one size"
            )

    def _schedule_for(self, rows: int, seq: int) -> Any:
        """PyTorch's schedule for batches [rows, seq] over this rank's stages."""
        from torch.distributed import pipelining

        rows = rows // self.micro_batches
        ids = torch.empty(rows, seq, dtype=torch.long, device="meta")
        hidden = torch.empty(rows, seq, self._hidden_size, dtype=self._dtype, device="meta")
        logits = torch.empty(rows, seq, self._vocabulary, dtype=self._dtype, device="meta")
        stages = []
        for stage in self.stages:
            enters = hidden.detach().requires_grad_()
            leaves = hidden.detach().requires_grad_()
            if stage.number == 0:
                enters = ids
            if stage.number == self._all_stages - 1:
                leaves = logits.detach().requires_grad_()
            # The shapes are known, so PyTorch need not find them out by running the model.
            shapes = {"input_args": enters, "output_args": leaves}
            place = {"device": self._device, "group": self._group, "num_stages": self._all_stages}
            stages.append(timed_stage(self, stage, **place, **shapes))
        options = {
            "n_microbatches": self.micro_batches,
            "loss_fn": self._loss_of,
            "scale_grads": False,  # True divides by the micro-batches, for a loss that is a mean
        }
        if self.schedule == "gpipe":
            return pipelining.ScheduleGPipe(stages[0], **options)
        if self.schedule == "1f1b":
            return pipelining.Schedule1F1B(stages[0], **options)
        return pipelining.ScheduleInterleaved1F1B(stages, **options)

    def _loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The part of one micro-batch in the loss of the step; logits [B/M, S, V]."""
        total = functional.cross_entropy(
            at_least_fp32(logits.flatten(0, 1)),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        loss = total / self._tokens
        if self.clock is not None:
            self.clock.prolong()  # the last forward includes the loss
        return loss

    def _loss_of_all(self, losses: list[Tensor]) -> float:
        """The last rank's loss, on all ranks."""
        total = torch.zeros((), device=self._device)
        if losses:
            total = torch.stack(losses).sum().detach()
        distributed.broadcast(total, group=self._group, group_src=self.ranks - 1)
        return total.item()

    def _tied_weight(self) -> nn.Parameter:
        """The copy that this rank has: the embedding on rank 0, the output layer on the last."""
        if self.rank == 0:
            return self.stages[0].embedding.weight
        return self.stages[-1].head.weight

    def _take_tied_gradient(self) -> Tensor | None:
        """What earlier steps have left in a tied gradient: it is the sum of both ranks already."""
        if not self._tied:
            return None
        weight = self._tied_weight()
        earlier = weight.grad
        weight.grad = None
        return earlier

    def _add_tied_gradients(self, earlier: Tensor | None) -> None:
        """Both copies of a tied weight get the sum of their gradients: the copies stay equal."""
        if not self._tied or not self._tied_weight().requires_grad:
            return
        weight = self._tied_weight()
        theirs = torch.empty_like(weight.grad)
        peer = {"group": self._group, "group_peer": self.ranks - 1 - self.rank}
        send = distributed.P2POp(distributed.isend, weight.grad, **peer)
        receive = distributed.P2POp(distributed.irecv, theirs, **peer)
        for work in distributed.batch_isend_irecv([send, receive]):
            work.wait()
        weight.grad.add_(theirs)
        if earlier is not None:
            weight.grad.add_(earlier)
