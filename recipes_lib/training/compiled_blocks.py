"""Compiled blocks: torch.compile turns each decoder block into one graph, for training.

Problem    Between its matrix products a block runs some fifty small operators: norms, RoPE, casts,
           the activation of the MLP. Each reads and writes memory, and costs a call.
Idea       Write the small operators between two products as one kernel, forward and backward:

               eager      x -> pow -> mean -> add -> rsqrt -> mul -> mul -> [product] -> …
               compiled   x ->            one kernel          -> [product] -> …

           All blocks do the same with other weights, so the first one is compiled and the others
           run its code. A whole model as one graph would take as many times longer to compile as it
           has blocks.
Saves      Time, most where the products are fast: in 16 bits, on a GPU. And activations: backward
           computes again what is cheap, and forward does not keep it.
Costs      Seconds of compiling, in the first step and for the first batch of another shape;
           `break_even_steps` says after how many steps they are earned. The order of sums changes,
           so losses and gradients are equal up to rounding, and dropout draws other numbers.
Use when   The run has more steps than it takes to break even.
Not when   Each run is a few steps, shapes change all the time (pad the batches to few), or a block
           looks at values, as a mixture of experts does that routes in Python: PyTorch raises an
           error then.
In production   `model.model.layers[i].compile()` for each block, before `fully_shard` (torchtitan);
           `TrainingArguments(torch_compile=True)` compiles the whole model instead.
Source     Ansel et al., "PyTorch 2", ASPLOS 2024; "Reducing torch.compile cold start compilation
           time with regional compilation", PyTorch tutorials.

The order of recipes: adapters and 4-bit weights, then this, then checkpointing, which stays outside
and runs the compiled block a second time. Hugging Face's own checkpointing lies outside by itself,
whenever it is switched on.

Shapes: B batch, S sequence, D hidden.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from recipes_lib.core.measure.dry_run import dry
from recipes_lib.core.measure.live_bytes import LiveBytes
from recipes_lib.core.model.bytes_of_tensors import quantization_tensors
from recipes_lib.core.model.caches_of_checkpointed_blocks import caches_among
from recipes_lib.core.model.causal_lm import decoder_blocks, require_causal_lm
from recipes_lib.core.model.compiling import compile_apart, require_compiler
from recipes_lib.core.model.marks import CHECKPOINTED_INDEX, any_marked
from recipes_lib.core.model.mixins import mix_in, require_forward_of_class, unmixed_class

BACKEND = "inductor"  # PyTorch's own, which writes the kernels

# Each shape, dtype and kind of mask has a graph of its own. PyTorch's limit is eight of them.
MOST_GRAPHS = 64

# --- the idea: what a learner can copy ------------------------------------------------------------


def compiled_by_hand(model: Any) -> Any:
    """Compile the blocks of `model`: the first forward compiles one, and the others use its code.

    `fullgraph` raises an error where PyTorch would leave a part of the block uncompiled.
    """
    for block in decoder_blocks(model):
        block.compile(fullgraph=True)  # in place: parameters keep their names
    return model


# --- the technique --------------------------------------------------------------------------------


def apply_compiled_blocks(model: Any, *, dynamic: bool | None = None) -> Any:
    """Let each block run as one compiled graph when the model trains. Returns `model`.

    The first step compiles. Without gradients, in eval mode and with a KV cache the block runs as
    it did before. Parameter names, hooks on a block, `isinstance` and `copy.deepcopy` work as ever.
    Hooks on modules inside of a block have to be there before the first step.

    Args:
        dynamic: None compiles for the first shape of a batch, and for a second one a graph that
            takes all shapes; True makes that graph at once, False one for each shape.
    """
    require_causal_lm(model)
    blocks = decoder_blocks(model)
    _require_first(model)
    require_forward_of_class(blocks)
    require_compiler(next(blocks[0].parameters()).device)
    divided: dict[Any, Callable[..., Any]] = {}
    for block in blocks:
        forward = _compile_once(type(block), dynamic)
        mix_in(block, Compiled, compiled=True, compiled_forward=forward, divided=divided)
    return model


def can_compile(device: str) -> bool:
    """Whether there is something to compile with: a C++ compiler for a CPU, Triton for a GPU."""
    try:
        require_compiler(torch.device(device))
    except ValueError:
        return False
    return True


def compile_seconds() -> float:
    """Seconds that this process has spent in torch.compile so far, forward and backward graphs."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]


def break_even_steps(
    *, compile_seconds: float, plain_step: float, compiled_step: float
) -> int | None:
    """After how many steps compiling has paid for itself; None if it is no faster."""
    earned_per_step = plain_step - compiled_step
    if earned_per_step <= 0:
        return None
    return math.ceil(compile_seconds / earned_per_step)


@functools.cache
def _compile_once(block_class: type, dynamic: bool | None) -> Callable[..., Any]:
    """The compiled forward of all blocks of one class, in later models too.

    A function, without a block in it: a deep copy of a block runs its own weights.
    """

    def forward(block: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return block_class.forward(block, *args, **kwargs)

    return compile_apart(  # other classes have graphs of their own
        forward,
        # Else PyTorch runs a block in pieces, or beyond the limit as it is, and says nothing.
        fullgraph=True,
        dynamic=dynamic,
        backend=BACKEND,
        most_graphs=MOST_GRAPHS,
    )


class Compiled:
    """What is mixed into a compiled block. `forward`, not `__call__`: hooks fire once, outside."""

    compiled: bool  # a mark, which the measuring of memory reads
    compiled_forward: Callable[..., Any]
    divided: dict[Any, Callable[..., Any]]  # what dry runs of this model have traced, by shape

    def forward(self, hidden_states: torch.Tensor, *others: Any, **options: Any) -> Any:
        """A compiled block, on [B, S, D]; `others` is what the family gives by position."""
        if not self.training or not torch.is_grad_enabled():
            return super().forward(hidden_states, *others, **options)
        if _operators_are_counted() and not dry():
            return super().forward(hidden_states, *others, **options)
        if caches_among(others, options):
            _warn_of_cache()
            return super().forward(hidden_states, *others, **options)
        if not hidden_states.requires_grad and any(p.requires_grad for p in self.parameters()):
            # Under adapters the first block's input needs no gradient. That alone would take a
            # graph of its own, and as many seconds of compiling again.
            hidden_states = hidden_states.detach().requires_grad_()
        if dry():
            return self._as_divided(hidden_states, others, options)
        return self.compiled_forward(self, hidden_states, *others, **options)

    def _as_divided(self, hidden: torch.Tensor, others: tuple, options: dict[str, Any]) -> Any:
        """In a dry run, operator by operator: kept for backward is what the compiler would keep."""
        device = hidden.device.type
        ranges = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        which = (hidden.shape, hidden.dtype, ranges)
        if which not in self.divided:
            self.divided[which] = _divided_function(self)
        parameters = dict(self.named_parameters())
        scales = {name: quantization_tensors(each) for name, each in parameters.items()}
        return self.divided[which](parameters, scales, hidden, others, options)


def _divided_function(block: torch.nn.Module) -> Callable[..., Any]:
    """A compiled block as a function of parameters and inputs, traced in a dry run when called.

    PyTorch's partitioner divides it into forward and backward: it weighs the bytes of each tensor
    against computing it again. No kernel is compiled.
    """
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch.nn.utils.stateless import _reparametrize_module

    block_class = unmixed_class(block)

    def forward(
        parameters: dict, scales: dict, hidden: torch.Tensor, others: tuple, options: dict
    ) -> Any:
        """A block with these parameters and their scales, as the compiler traces it."""
        for name, tensors in scales.items():
            if tensors:
                attributes = vars(block.get_parameter(name))
                state = _with_scales(attributes["quant_state"], tensors)
                vars(parameters[name]).update(attributes, quant_state=state)
        with _reparametrize_module(block, parameters):
            return block_class.forward(block, hidden, *others, **options)

    return aot_function(
        forward,
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler=BACKEND),
        decompositions=select_decomp_table(),
    )


def _with_scales(state: Any, tensors: list[torch.Tensor]) -> Any:
    """For a compiled block: what bitsandbytes knows of a 4-bit weight, with these scales."""
    state = copy.copy(state)
    state.absmax, state.code, *others = tensors
    if state.nested:
        state.offset, *others = others
        state.state2 = copy.copy(state.state2)
        state.state2.absmax, state.state2.code = others
    return state


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _require_first(model: Any) -> None:
    """Sharding and checkpoints have to stay outside of compiled graphs, so they come later."""
    from recipes_lib.core.ranks.measured_bytes import is_sharded  # imports much

    if is_sharded(model):
        raise ValueError(
            "this model is sharded already: compile the blocks first, and shard them then"
        )
    blocks = decoder_blocks(model)
    if any_marked(blocks, CHECKPOINTED_INDEX):
        raise ValueError(
            "this model is checkpointed: remove the checkpointing, compile the blocks, then "
            "checkpoint them again"
        )


def _operators_are_counted() -> bool:
    """Whether a block may not be compiled: a mode counts each operator, or there is a dry run.

    torch.compile compiles nothing in most of them, and of compiled code a mode would see nothing.
    """
    inside = dispatch.is_in_any_mode_without_ignore_compile_internals()
    # On a GPU that of our account lets code be compiled, which FlexAttention needs.
    modes = dispatch._get_current_dispatch_mode_stack()
    counted = any(isinstance(mode, LiveBytes) for mode in modes)
    return inside or counted or torch._guards.active_fake_mode() is not None


@functools.cache  # once per process
def _warn_of_cache() -> None:
    warnings.warn(
        "with a KV cache blocks are not compiled: pass use_cache=False to the model's forward",
        stacklevel=3,
    )
