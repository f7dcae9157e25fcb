"""A training step on tensors without data: what it allocates, block by block.

    step = dry_step(model, rows=1, length=8192)
    step.activations      bytes that forward saves
    step.loss             bytes that the output layer and the loss add to them at their worst
    step.blocks           what each block saves, and what is alive in its backward

The step runs on a copy of the model whose tensors have shapes and no data, so neither memory nor
time goes into it: a model of 7 billion weights takes one to two seconds. The bytes are those of
every operator that the model's own code calls on this device, counted by the same account as a
measured step. So it covers models of which nobody has written a formula.

What depends on values cannot be seen, such as a loop over those experts that got a token.

Legend: B rows, S tokens of a row, L blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from recipes_lib.core.checks import check_flag, check_whole
from recipes_lib.core.measure import dry, dry_run, without_data
from recipes_lib.core.measure.live_bytes import LiveBytes
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model.causal_lm import decoder_blocks, without_adapters
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.predict.block_bytes import BlockBytes

Prepare = Callable[[Any], Any]

MOST_REMEMBERED = 64


@dataclass(frozen=True)
class DryStep:
    """The bytes of one step beside weights and states, as a dry step has counted them.

    `activations` is what forward has saved when the output layer begins, and `behind` the part of
    it that belongs to what follows the last block. `loss` is what joins the activations at the
    worst moment from there to the last block. `end` is the most that is alive after backward has
    left the first block, all gradients included. `head` are the gradients that exist when backward
    reaches the last block, and `waiting` the part of them that is not complete by then.
    """

    activations: int
    behind: int
    loss: int
    end: int
    head: int
    waiting: int
    blocks: tuple[BlockBytes, ...]


def dry_step(
    model: Any,
    *,
    rows: int,
    length: int,
    autocast: torch.dtype | None = None,
    packed: bool = False,
    prepare: Prepare | None = None,
    key: Hashable = None,
) -> DryStep:
    """Forward and backward of `rows` x `length` tokens [B, S], on a copy of `model` without data.

    `model` stays as it is. What it is now decides: which weights train, in which dtype, on which
    device. A model on "meta" is taken to be on this machine's device. Steps are remembered.

    Args:
        autocast: the dtype of the operators in forward, as in `torch.autocast`.
        packed: whether the rows have several documents, which attention keeps apart.
        prepare: changes the copy before the step, and returns the model to run: with adapters, say.
        key: what `prepare` does, in words or numbers; with it the step is remembered, too.
    Raises ValueError if the step cannot run without data, with the reason in its message.
    """
    check_flag(packed=packed)
    check_whole(rows=rows, length=length)
    known = None
    if prepare is None or key is not None:
        known = (_signature(model), rows, length, autocast, packed, key)
        if known in _remembered:
            return _remembered[known]
    with _dry(), _documents(packed):
        step = _step(
            model, rows=rows, length=length, autocast=autocast, packed=packed, prepare=prepare
        )
    if known is not None:
        if len(_remembered) >= MOST_REMEMBERED:
            _remembered.pop(next(iter(_remembered)))  # the oldest
        _remembered[known] = step
    return step


def _step(
    model: Any,
    *,
    rows: int,
    length: int,
    autocast: torch.dtype | None,
    packed: bool,
    prepare: Prepare | None,
) -> DryStep:
    twin = without_data(model)
    if prepare is not None:
        twin = prepare(twin)
    twin.train()
    for module in twin.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # the budget of a plain step
    if not any(parameter.requires_grad for parameter in twin.parameters()):
        twin.enable_input_require_grads()  # as with adapters: backward goes through all blocks
    device = twin.get_input_embeddings().weight.device
    tokens = torch.zeros((rows, length), dtype=torch.long, device=device)
    options = {"use_cache": False}
    if packed:
        options["position_ids"] = tokens  # as all tokens without data, they are equal
    try:
        with _Watch(twin) as watch:
            computes_in = contextlib.nullcontext()
            if autocast is not None:
                computes_in = torch.autocast(device.type, autocast)
            with computes_in:
                loss = twin(input_ids=tokens, labels=tokens, **options).loss
            loss.backward()
            del loss
            return watch.result()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"no prediction for {type(without_adapters(model)).__name__}: a step on tensors "
            f"without data fails with {type(error).__name__} ({first_line}); "
            f"measure this one with PeakMemory"
        ) from error


@contextlib.contextmanager
def _dry() -> Iterator[None]:
    """A dry run, or the one that is there already."""
    if dry():
        yield
        return
    with dry_run():
        yield


@contextlib.contextmanager
def _documents(packed: bool) -> Iterator[None]:
    """Let transformers find documents in the positions, which have no data to find them in."""
    if not packed:
        yield
        return
    from transformers import masking_utils

    numbers = mock.patch.object(
        masking_utils, "find_packed_sequence_indices", side_effect=torch.zeros_like
    )
    with numbers:
        yield


# --- the same step is asked for more than once ----------------------------------------------------

_remembered: dict[Hashable, DryStep] = {}


def _signature(model: Any) -> Hashable:
    """All of a model that can decide what a step allocates: its code, settings and tensors."""
    parts: list[Hashable] = [without_adapters(model).config.to_json_string(use_diff=False)]
    parts.append(without_adapters(model).config.get_text_config()._attn_implementation)
    for name, module in model.named_modules():
        settings = []
        for each, value in vars(module).items():
            if value is None or isinstance(value, bool | int | float | str):
                settings.append((each, value))
        parts.append((name, type(module), tuple(settings)))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        kind = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
        parts.append((name, *kind))
    return hash(tuple(parts))


# --- the account, block by block ------------------------------------------------------------------


class _Watch:
    """Notes the live bytes as forward and backward pass from block to block.

    Everything is counted beside what was alive before the step: the weights.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._blocks = list(decoder_blocks(model))
        self._account = _Account(machine().device)
        self._hooks: list[Any] = []
        count = len(self._blocks)
        self._before: list[int] = [0] * count  # forward arrives at the block
        self._after: list[int] = [0] * count  # forward leaves it
        self._forward: list[int] = [0] * count  # the most in between
        self._head_begins = 0
        self._in_loss = 0
        self._head_gradients = 0
        # The most while backward is in a block: all of it, and without complete gradients.
        self._backward: list[tuple[int, int]] = [(0, 0)] * count
        self._in_block: int | None = None
        self._blocks_are_over = False
        self._end = 0

    def __enter__(self) -> _Watch:
        for index, block in enumerate(self._blocks):
            arrives = self._arrives(index)
            self._hook(block.register_forward_pre_hook(arrives, with_kwargs=True))
            self._hook(block.register_forward_hook(self._leaves(index)))
        head = self._model.get_output_embeddings()
        self._hook(head.register_forward_pre_hook(self._head_arrives))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                self._hook(parameter.register_post_accumulate_grad_hook(self._account.complete))
        self._account.__enter__()
        self._base = self._account.current
        return self

    def __exit__(self, *error: Any) -> None:
        self._account.__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _hook(self, hook: Any) -> None:
        self._hooks.append(hook)

    # Forward.

    def _arrives(self, index: int) -> Callable[..., None]:
        def note(module: Any, inputs: tuple, named: dict[str, Any]) -> None:
            self._account.restart()
            self._before[index] = self._account.current - self._base
            hidden = first_tensor([*inputs, named.get("hidden_states")])
            if index == 0 and hidden is not None and hidden.requires_grad:
                self._hook(hidden.register_hook(self._comes_back(None)))

        return note

    def _leaves(self, index: int) -> Callable[..., None]:
        def note(module: Any, inputs: Any, output: Any) -> None:
            most, _ = self._account.restart()
            self._forward[index] = most - self._base - self._before[index]
            self._after[index] = self._account.current - self._base
            hidden = first_tensor(output)
            if hidden is not None and hidden.requires_grad:
                self._hook(hidden.register_hook(self._comes_back(index)))

        return note

    def _head_arrives(self, *ignored: Any) -> None:
        self._account.restart()
        self._head_begins = self._account.current - self._base

    # Backward.

    def _comes_back(self, index: int | None) -> Callable[..., None]:
        """A hook of what the block `index` returned; None for what the first one was given."""

        def note(gradient: torch.Tensor) -> None:
            self._end_of_part()
            self._in_block = index
            if index is None:
                self._blocks_are_over = True
            if index == len(self._blocks) - 1:
                self._head_gradients = self._account.completed

        return note

    def _end_of_part(self) -> None:
        """Give the part of backward that ends here its peaks."""
        most, at_once = self._account.restart()
        if self._blocks_are_over:
            self._end = max(self._end, most - self._base)
        elif self._in_block is None:
            self._in_loss = max(self._in_loss, most - self._base)
        else:
            self._backward[self._in_block] = (most - self._base, at_once - self._base)

    # The result.

    def result(self) -> DryStep:
        """The bytes of the step. Call it when backward is over, inside of the context."""
        self._end_of_part()
        saved = self._saved()
        count = len(self._blocks)
        before = self._before[0]
        behind = self._head_begins - before - sum(saved)
        waiting = self._waiting()
        head = self._head_gradients + waiting
        gradients = [_trainable(block) for block in self._blocks]
        later = head + sum(gradients)
        blocks = []
        for index in range(count):
            later -= gradients[index]
            most, at_once = self._backward[index]
            blocks.append(
                BlockBytes(
                    saved=saved[index],
                    forward=self._forward[index],
                    backward=most - before - later,
                    at_once=at_once - before - waiting,
                    gradients=gradients[index],
                )
            )
            before += saved[index]
        return DryStep(
            activations=self._head_begins,
            behind=behind,
            loss=self._in_loss - self._head_begins,
            end=self._end,
            head=head,
            waiting=waiting,
            blocks=tuple(blocks),
        )

    def _saved(self) -> list[int]:
        """What each block has saved: from the end of the block before it to its own end.

        Both ends have the input and the output of a block. The first block has none before it.
        """
        if len(self._blocks) == 1:
            return [self._after[0] - self._before[0]]
        saved = [self._before[1] - self._before[0]]
        for earlier, later in zip(self._after, self._after[1:], strict=False):
            saved.append(later - earlier)
        return saved

    def _waiting(self) -> int:
        """The output layer's part of a tied embedding's gradient, which waits for the rest."""
        embedding = self._model.get_input_embeddings().weight
        head = self._model.get_output_embeddings().weight
        if embedding is head and head.requires_grad:
            return tensor_bytes(head)
        return 0


def first_tensor(values: Any) -> torch.Tensor | None:
    """The first tensor of what a block was given or has returned, which is hidden [B, S, D]."""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            return value
    return None


def _trainable(module: torch.nn.Module) -> int:
    return sum(tensor_bytes(p) for p in module.parameters() if p.requires_grad)


class _Account(LiveBytes):
    """Live bytes, and beside them the live bytes without the gradients that are complete."""

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.completed = 0
        self._peak_at_once = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._peak_at_once = max(self._peak_at_once, self.current - self.completed)
        return out

    def complete(self, parameter: torch.Tensor) -> None:
        """The gradient of this parameter is complete."""
        self.completed += tensor_bytes(parameter.grad)

    def restart(self) -> tuple[int, int]:
        """The largest numbers since the last call: of all bytes, and without complete gradients."""
        peaks = (self.peak, self._peak_at_once)
        self.peak = self.current
        self._peak_at_once = self.current - self.completed
        return peaks
