"""Compiled blocks: torch.compile turns each decoder block into one graph, for training.

Problem    Between its matrix products a block runs some fifty small operators: norms, RoPE, casts,
           the activation of the MLP. Each one reads its input from memory and writes its output
           back, and costs a call.
Idea       Write the small operators between two products as one kernel, forward and backward:

               eager      x -> pow -> mean -> add -> rsqrt -> mul -> mul -> [product] -> …
               compiled   x ->            one kernel          -> [product] -> …

           All blocks do the same with other weights, so the first one is compiled and the others
           run its code. A whole model as one graph would take as many times longer to compile as it
           has blocks.
Saves      Time, most where the products are fast: in 16 bits, on a GPU. And activations: backward
           computes in its own kernels again what is cheap, and forward does not keep it.
Costs      Seconds of compiling, in the first step and again for the first batch of another shape;
           `break_even_steps` says after how many steps they are earned. The order of sums changes,
           so losses and gradients are equal up to rounding. Errors in a block are harder to read.
Use when   The run has more steps than it takes to break even.
Not when   Each run is a few steps, shapes change all the time, or a block looks at values, as a
           mixture of experts does that routes in Python: the forward then says so.
In production   `model.model.layers[i].compile()` for each block, before `fully_shard` (torchtitan);
           `TrainingArguments(torch_compile=True)` compiles the whole model instead.
Source     Ansel et al., "PyTorch 2", ASPLOS 2024; "Reducing torch.compile cold start compilation
           time with regional compilation", PyTorch tutorials.

The order of recipes: adapters and 4-bit weights, then this, then checkpointing. The checkpoint
stays outside and runs the compiled block a second time. Inside of a graph it would be compiled away
or refused.

Shapes: B batch, S sequence, T = B*S tokens, D hidden.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from recipes_lib.core.budget import Budget, Order, Shape, estimate
from recipes_lib.core.causal_lm import decoder_blocks, require_causal_lm
from recipes_lib.core.checks import check_choice, check_number
from recipes_lib.core.live_bytes import LiveBytes
from recipes_lib.core.marks import CHECKPOINTED_INDEX, COMPILED, any_marked, mark, unmark
from recipes_lib.core.mixing import mix_in, unmix
from recipes_lib.core.plain_step import require_adapters, saved_outside_the_blocks
from recipes_lib.core.recompute import caches_among
from recipes_lib.core.sizes import quantization_tensors, storage_bytes

BACKEND = "inductor"  # PyTorch's own, which writes the kernels

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
    Hooks on modules inside of a block have to be there before the first step, and dropout in there
    draws other numbers than it did.

    Args:
        dynamic: None compiles for the first shape of a batch, and for a second one a graph that
            takes all shapes; True makes that graph at once, False one for each shape.
    Raises ValueError without a compiler for this device, and for a model that is no causal LM or is
    compiled or checkpointed already. The model's forward raises one for a block that is not one
    graph, and when too many different graphs were compiled.
    """
    require_causal_lm(model)
    check_choice((None, True, False), dynamic=dynamic)
    blocks = decoder_blocks(model)
    _require_first(blocks)
    _require_compiler(blocks[0])
    for block in blocks:
        compiled = _compile_once(type(block), _kind_of(block), dynamic)
        mix_in(block, _Compiled, compiled_forward=compiled)
        mark(block, COMPILED)
    return model


def remove_compiled_blocks(model: Any) -> Any:
    """Give every block its own class back. Raises ValueError if there is nothing to remove."""
    blocks = [block for block in decoder_blocks(model) if isinstance(block, _Compiled)]
    if not blocks:
        raise ValueError("this model has no block that apply_compiled_blocks() has changed")
    for block in blocks:
        unmix(block, _Compiled, attributes=["compiled_forward"])
        unmark(block, COMPILED)
    return model


def compile_seconds() -> float:
    """Seconds that this process has spent in torch.compile so far, forward and backward graphs.

    Kernels that an earlier process has left in PyTorch's cache on the disk are not compiled again.
    """
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]


def break_even_steps(
    *, compile_seconds: float, plain_step: float, compiled_step: float
) -> int | None:
    """After how many steps compiling has paid for itself; None if the compiled step is no faster.

    All three in seconds, of which two are measured steps. Raises ValueError for negative ones.
    """
    check_number(least=0, compile_seconds=compile_seconds)
    check_number(least=0, plain_step=plain_step, compiled_step=compiled_step)
    earned_per_step = plain_step - compiled_step
    if earned_per_step <= 0:
        return None
    return math.ceil(compile_seconds / earned_per_step)


@functools.cache
def _compile_once(block_class: type, kind: tuple, dynamic: bool | None) -> Callable[..., Any]:
    """The compiled forward that all blocks of one class and kind share, in later models too."""

    def forward(block: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return block_class.forward(block, *args, **kwargs)

    # PyTorch counts the graphs of each code object and stops at eight. So each kind gets its own.
    forward.__code__ = forward.__code__.replace()
    return torch.compile(forward, fullgraph=True, dynamic=dynamic, backend=BACKEND)


def _kind_of(block: torch.nn.Module) -> tuple:
    """What makes the graph of one block another one than that of the next: not its values."""
    parameters = block.named_parameters()
    return tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in parameters)


class _Compiled:
    """What is mixed into a block. `forward` and not `__call__`: hooks fire once, outside."""

    compiled_forward: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training or not torch.is_grad_enabled() or _operators_are_counted():
            return super().forward(*args, **kwargs)
        if caches_among(args, kwargs):
            _warn_of_cache()
            return super().forward(*args, **kwargs)
        _refuse_selective_checkpoint()
        hidden, *others = args  # [B, S, D], and what the family of the model gives by position
        if not hidden.requires_grad and _trains(self):
            hidden = _with_gradient(hidden)
        with _clear_errors(self):
            # Called as a plain function: a bound method would tie a copy of the block to this one.
            return self.compiled_forward(self, hidden, *others, **kwargs)


def _trains(block: torch.nn.Module) -> bool:
    """Whether a weight of the block trains. Frozen blocks below all others have no backward."""
    return any(parameter.requires_grad for parameter in block.parameters())


def _with_gradient(hidden: torch.Tensor) -> torch.Tensor:
    """The block's input [B, S, D], such that it needs a gradient, as it does in all later blocks.

    Under adapters the first block's input needs none. That alone would take a graph of its own, and
    as many seconds of compiling again.
    """
    if hidden.requires_grad:
        return hidden
    return hidden.detach().requires_grad_()


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _require_first(blocks: torch.nn.ModuleList) -> None:
    if any_marked(blocks, COMPILED):
        raise ValueError(
            "the blocks are compiled already: call remove_compiled_blocks(model) first"
        )
    if any_marked(blocks, CHECKPOINTED_INDEX):
        raise ValueError(
            "this model is checkpointed, and a checkpoint has to stay outside of the graph: remove "
            "the checkpointing, compile the blocks, then checkpoint them again"
        )


def _require_compiler(block: torch.nn.Module) -> None:
    """Raise ValueError if torch.compile has nothing to compile kernels with."""
    device = next(block.parameters()).device.type
    if device == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ValueError(
                "torch.compile needs Triton to compile for this GPU: `pip install triton`, on a "
                "card of compute capability 7.0 or newer; or train without compiled blocks"
            )
    elif device == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except (InvalidCxxCompiler, RuntimeError) as error:
            raise ValueError(
                "torch.compile needs a C++ compiler on a CPU and finds none: install one (`apt "
                "install g++`) or name it in the variable CXX; or train without compiled blocks"
            ) from error


@contextlib.contextmanager
def _clear_errors(block: torch.nn.Module) -> Iterator[None]:
    """Say in the words of this recipe what PyTorch's compiler could not do."""
    from torch._dynamo import exc

    name = type(block).__name__
    try:
        yield
    except exc.FailOnRecompileLimitHit as error:
        raise ValueError(
            f"{name} would need yet another compiled graph: pad the batches to few shapes, or pass "
            f"apply_compiled_blocks(model, dynamic=True); torch.compiler.reset() forgets the "
            f"graphs of earlier models"
        ) from error
    except exc.Unsupported as error:
        raise ValueError(
            f"{name} cannot be compiled as one graph: call remove_compiled_blocks(model) and train "
            f"without; PyTorch says: {error}"
        ) from error


def _operators_are_counted() -> bool:
    """Whether a mode sees each operator, as that of a timeline does, or a dry run.

    torch.compile compiles nothing in most of them, and of compiled code a mode would see nothing.
    `core.measure` measures the memory of compiled blocks without such a mode.
    """
    inside = dispatch.is_in_any_mode_without_ignore_compile_internals()
    # On a GPU that of our account lets code be compiled, which FlexAttention needs.
    modes = dispatch._get_current_dispatch_mode_stack()
    counted = any(isinstance(mode, LiveBytes) for mode in modes)
    return inside or counted or torch._guards.active_fake_mode() is not None


def _refuse_selective_checkpoint() -> None:
    """A selective checkpoint chooses among operators. A compiled block is none of them."""
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    for mode in dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, _CachedTorchDispatchMode | _CachingTorchDispatchMode):
            raise ValueError(
                "a selective checkpoint cannot look into compiled blocks, which choose by "
                "themselves what they keep: use mode='block' with them"
            )


@functools.cache  # once per process
def _warn_of_cache() -> None:
    warnings.warn(
        "with a KV cache blocks are not compiled: pass use_cache=False to the model's forward",
        stacklevel=3,
    )


# --- the arithmetic -------------------------------------------------------------------------------


@estimate(Order.MLP)
def estimate_compiled_blocks(
    budget: Budget, model: Any, shape: Shape, *, dtype: torch.dtype = torch.float32
) -> Budget:
    """The budget when blocks keep for backward what PyTorch's partitioner chooses.

    No formula covers its choice: it weighs the bytes of each tensor against computing it again. So
    one block is traced and partitioned here, without compiling a kernel, and what it keeps is
    counted. That takes a second or two and a copy of one block; the model is left as it is.

    Args:
        model: with its adapters, if any; its blocks may be compiled already.
        dtype: of autocast, as in `estimate_mixed_precision`.
    Raises ValueError for a model without weights, as on the meta device or in a dry run.
    """
    require_adapters(budget, model)
    one_block = compiled_block_bytes(model, shape, dtype=dtype)
    all_blocks = len(decoder_blocks(model)) * one_block
    outside = saved_outside_the_blocks(budget, model)
    return budget.change(activations=all_blocks + outside, one_block=one_block)


def compiled_block_bytes(model: Any, shape: Shape, *, dtype: torch.dtype) -> int:
    """Bytes that one compiled block keeps of `shape.rows` rows; under autocast with its copies."""
    block = decoder_blocks(model)[0]
    device = next(block.parameters()).device.type
    if device == "meta" or torch._guards.active_fake_mode() is not None:
        raise ValueError(
            "what a compiled block keeps is counted on a block with weights: give a model that is "
            "not on the meta device, outside of a dry run"
        )
    with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
        hidden, others, options = _inputs_of(model, block, shape)
        block = _plain_copy(block)
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _partitioned(block)(_with_gradient(hidden), *others, **options)
    for tensor in _stored(block):  # the weights are counted elsewhere
        kept.pop(tensor.untyped_storage()._cdata, None)
    return storage_bytes(kept.values())


def _inputs_of(model: Any, block: torch.nn.Module, shape: Shape) -> tuple[torch.Tensor, list, dict]:
    """What the model gives to its first block: hidden [B, S, D], other arguments, keywords."""
    taken = []

    def take(block: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        taken.append((args, kwargs))
        raise _Enough

    ids = torch.zeros(shape.rows, shape.seq, dtype=torch.long, device=model.device)  # [B, S]
    hook = block.register_forward_pre_hook(take, with_kwargs=True)
    with hook, torch.no_grad(), contextlib.suppress(_Enough):
        model(input_ids=ids, use_cache=False)
    (hidden, *others), options = taken[0]
    return hidden, others, options


class _Enough(Exception):
    """Ends the forward of a model in front of its first block."""


def _plain_copy(block: torch.nn.Module) -> torch.nn.Module:
    """A copy of a block as it was before it was compiled, in training mode."""
    block = copy.deepcopy(block).train()
    if isinstance(block, _Compiled):
        unmix(block, _Compiled, attributes=["compiled_forward"])
    return block


def _stored(block: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of a block, and what quantized parameters have beside them."""
    tensors = [*block.parameters(), *block.buffers()]
    for parameter in block.parameters():
        tensors += quantization_tensors(parameter)
    return tensors


def _partitioned(block: torch.nn.Module) -> Callable[..., Any]:
    """`block` traced and divided into forward and backward, and run operator by operator."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return block(*args, **kwargs)

    # A new code object has no graphs yet, and leaves none to those that train.
    forward.__code__ = forward.__code__.replace()
    return torch.compile(
        forward, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition"
    )
