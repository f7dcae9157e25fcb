"""Layer streaming: frozen weights wait on the host, and pass through the device block by block.

Problem    The weights alone are too large for the device, even in 4 bits.
Idea       A frozen weight is only read. So it can come when its block is computed and go again,
           once in forward and once in backward, in which a checkpoint computes the block anew:

               host or disk   w0 w1 w2 … wL-1           all the time
                               |     ^ next one on its way
               device          w0                       forward: block 0, then block 1, …
                                     wL-1               backward: block L-1, then block L-2, …

           Adapters, their states, the embedding and the output layer stay on the device.
Saves      The weights of L-2 blocks.
Costs      Every weight crosses the link twice a step: bytes / rate of the link is the least that a
           step takes. Long batches hide it, short ones wait for it. And one more forward.
Use when   QLoRA does not fit, or leaves no room for the batch: by arithmetic 8 billion
           weights on 6 GB.
Not when   The weights fit. Or they train: their gradients and states are larger still (FSDP with
           `offload`, `optimizer_offload`).
In production   DeepSpeed ZeRO-3 with `offload_param`, for weights that train as well; accelerate's
           `cpu_offload`, whose hooks leave the weights in the graph until backward has used them.
Source     ZeRO-Infinity, arXiv 2104.07857.

Two traps. To put an empty tensor behind `parameter.data` after forward would also empty what
autograd has saved, and gradients would be those of other weights: here the module gets another
parameter. And in `torch.utils.checkpoint` the first forward still makes a graph, in which the
4-bit products of bitsandbytes hold their weights: here it makes none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recipes_lib.core.measure.dry_run import real_tensors
from recipes_lib.core.model.caches_of_checkpointed_blocks import (
    generates,
    require_no_checkpoints,
    without_caches,
)
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.mixins import mix_in
from recipes_lib.core.model.probe import Limits, proves
from recipes_lib.core.model.random_states import random_states, set_random_states
from recipes_lib.core.model.second_derivatives import first_derivatives_only
from recipes_lib.memory._host_and_disk_stores import SavedStorage, Store, layout_of, make_store

SMALLEST = 4096  # bytes: norms and biases stay

# --- the idea: what a learner can copy ------------------------------------------------------------


def streamed_by_hand(
    blocks: Sequence[Callable], fetch: Callable[[int], list[torch.Tensor]], hidden: torch.Tensor
) -> torch.Tensor:
    """Run `blocks`, each with weights that `fetch(number)` brings, and that go when it is done.

    A block is called as `block(hidden, *weights)`. The checkpoint keeps the input alone, so nobody
    holds the weights after forward; in backward it calls `run` again, which brings them again.
    """
    for number, block in enumerate(blocks):

        def run(hidden: torch.Tensor, number: int = number, block: Callable = block):
            return block(hidden, *fetch(number))

        hidden = checkpoint(run, hidden, use_reentrant=False)
    return hidden


# --- the technique --------------------------------------------------------------------------------


def _promise(*, device: torch.device | str | None = None, **others: Any) -> Limits:
    """The same numbers as before. Those of another device are others, and prove nothing."""
    if device is not None:
        raise ValueError(
            "on another device the numbers are others, so there is nothing to compare: "
            "with a device say check=False, which trusts"
        )
    return Limits("exact")


@proves(_promise)
def apply_layer_streaming(
    model: Any,
    *,
    to: str = "host",
    directory: str | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Move the frozen weights of all blocks away, and let them come when they are used.

    Apply it last, to a model with adapters (`apply_lora`, `apply_qlora`). It checkpoints the blocks
    itself. Returns `model`.

    Args:
        to: "host" is pinned memory, from which a second CUDA stream copies ahead; "disk" is a file,
            which a thread reads ahead.
        directory: of the file; None is /var/tmp.
        device: that computes; None is the one where the model is. A model in host memory, too large
            for the device also in 4 bits, gets "cuda" here, with check=False: only what stays moves
            there now, and never all blocks at once. Where that is too much, load the model anew.
    """
    blocks = decoder_blocks(model)
    require_no_checkpoints(blocks)
    places = [_weights_to_stream(block) for block in blocks]
    if not all(places):
        raise ValueError(
            "the blocks have no frozen weights, and only those can wait elsewhere: "
            "apply_lora or apply_qlora first"
        )
    here = next(blocks[0].parameters()).device
    device = here if device is None else torch.device(device)
    weights = StreamedWeights(places, make_store(to, device, directory))
    for number, block in enumerate(blocks):
        mix_in(block, Streamed, checkpointed_index=number, streamed_weights=weights)
    if device != here:
        # As `model.to(device)`, but for the weights that are away: those have no data now.
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return model


class Streamed:
    """What is mixed into a block: it has its weights while it is computed."""

    checkpointed_index: int  # among the blocks; other techniques read this mark
    streamed_weights: StreamedWeights

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run with the streamed weights, which come before and go afterwards."""
        if generates(self, args, kwargs):
            return self._with_streamed_weights(super().forward, *args, **kwargs)
        args, kwargs = without_caches(
            args, kwargs, index=self.checkpointed_index, names=self.forward_arguments
        )
        forward = functools.partial(self._with_streamed_weights, super().forward)
        trainable = [each for each in self.parameters() if each.requires_grad]
        hidden, *others = args
        run = OnceMore(forward, others, kwargs)
        return BlockOnceMore.apply(run, hidden, *trainable)

    def taken_out(self) -> None:
        self.streamed_weights.come(self.checkpointed_index)

    def _with_streamed_weights(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        self.streamed_weights.come(self.checkpointed_index)
        try:
            return forward(*args, **kwargs)
        finally:  # also when a checkpoint has all that it needs, and leaves forward early
            self.streamed_weights.go(self.checkpointed_index)


class OnceMore:
    """A call of a block, and the random numbers and the autocast under which it happened."""

    def __init__(self, forward: Callable, others: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._forward = forward
        self._others = others
        self._kwargs = kwargs

    def __call__(self, hidden: torch.Tensor) -> Any:
        """Run the streamed block without a graph; note random states and autocast."""
        self._device = hidden.device.type
        self._random_states = random_states()
        self._autocast = {
            "enabled": torch.is_autocast_enabled(self._device),
            "dtype": torch.get_autocast_dtype(self._device),
        }
        return self._forward(hidden, *self._others, **self._kwargs)

    def again(self, hidden: torch.Tensor) -> Any:
        """Run the streamed block again, with a graph; random numbers and autocast as they were."""
        before = random_states()
        set_random_states(self._random_states)
        try:
            with torch.enable_grad(), torch.autocast(self._device, **self._autocast):
                return self._forward(hidden, *self._others, **self._kwargs)
        finally:
            set_random_states(before)


class BlockOnceMore(torch.autograd.Function):
    """A streamed block whose first forward makes no graph. Its adapters are inputs, too."""

    @staticmethod
    def forward(ctx: Any, run: OnceMore, hidden: torch.Tensor, *trainable: torch.Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(hidden, *trainable)
        return run(hidden)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run the streamed block once more with its weights, and go back through that graph."""
        hidden, *trainable = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[1])
        outputs = ctx.run.again(hidden)
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        wanted = [hidden, *trainable] if hidden.requires_grad else trainable
        made = [pair for pair in zip(outputs, gradients) if pair[1] is not None]
        outputs, gradients = zip(*made, strict=True)
        found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        if not hidden.requires_grad:
            found = (None, *found)
        return None, *found


class Place:
    """Where a streamed weight belongs: a module and a name there."""

    saved: SavedStorage  # the weight itself, wherever it is

    def __init__(self, module: nn.Module, name: str) -> None:
        """The place of a frozen weight, and what is to be known of it while it is away."""
        self._module = module
        self._name = name
        parameter: nn.Parameter = module._parameters[name]
        self._kind = type(parameter)
        # Those of bitsandbytes, for instance; without what every tensor of a dry run has.
        usual = vars(torch.empty(0))
        self._attributes = {
            name: value for name, value in vars(parameter).items() if name not in usual
        }
        self._layout = layout_of(parameter)
        with real_tensors():  # so that it takes no memory in a dry run, either
            shape = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
            )
            self._empty = self._parameter_like(shape)

    def send(self, store: Store) -> None:
        """The streamed weight goes to the host for good: nothing else refers to it then."""
        self.saved = SavedStorage(self._module._parameters[self._name].data)
        store.send(self.saved)
        self.saved.arrive()
        scales = self._attributes.get("quant_state")
        if scales is not None:  # of bitsandbytes: small beside the weight, so they stay
            scales.to(store.device)

    def fill(self, device: torch.device) -> None:
        """Put the streamed weight in its place, when it has come back."""
        self.saved.arrive()
        weight = self.saved.tensor(self._layout, device)
        self._module._parameters[self._name] = self._parameter_like(weight)

    def clear(self) -> None:
        """Leave a parameter without data in the place of the streamed weight."""
        self.saved.free()
        self._module._parameters[self._name] = self._empty

    def _parameter_like(self, data: torch.Tensor) -> nn.Parameter:
        """A parameter for a streamed weight, of the same kind: also of bitsandbytes."""
        if issubclass(self._kind, nn.Parameter) and self._kind is not nn.Parameter:
            parameter = torch.Tensor._make_subclass(self._kind, data, False)
        else:
            parameter = nn.Parameter(data, requires_grad=False)
        vars(parameter).update(self._attributes)
        return parameter


def _weights_to_stream(block: nn.Module) -> list[Place]:
    """The places of the frozen weights of a block, small ones aside."""
    places = []
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad:
                continue
            if parameter.numel() * parameter.element_size() >= SMALLEST:
                places.append(Place(module, name))
    return places


class StreamedWeights:
    """The weights of all blocks: away, on their way, or in their place."""

    def __init__(self, places: list[list[Place]], store: Store) -> None:
        """Send the weights of all blocks to the store; they come back by number."""
        self._places = places
        self._store = store
        self._on_their_way: set[int] = set()
        for number, of_block in enumerate(places):
            for place in of_block:
                place.send(store)
            self.go(number)

    def come(self, number: int) -> None:
        """Put the weights of a block in their places, and send for those of the next one."""
        self._send_for(number)
        self._on_their_way.remove(number)
        backward = torch._C._current_graph_task_id() != -1
        following = number - 1 if backward else number + 1
        if following in range(len(self._places)):
            self._send_for(following)
        for place in self._places[number]:
            place.fill(self._store.device)

    def _send_for(self, number: int) -> None:
        if number in self._on_their_way:
            return
        self._on_their_way.add(number)
        for place in self._places[number]:
            self._store.fetch(place.saved)

    def go(self, number: int) -> None:
        """Take the weights of a block away. The graph keeps those that its backward will read."""
        for place in self._places[number]:
            place.clear()
