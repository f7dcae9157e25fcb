"""Numbers that are none: public functions refuse them in one sentence, before they do anything.

The mistake: NaN passes every `value < least`, "3" fails deep inside with a TypeError, 2.5 layers
are cut to 2, and True is one row. What belongs to one technique alone is in that technique's test.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from recipes_lib.architecture.deep_thin import deep_thin_model
from recipes_lib.architecture.efficient_net import efficient_net
from recipes_lib.architecture.grouped_query_attention import apply_grouped_query_attention
from recipes_lib.architecture.mixture_of_experts import small_mixture
from recipes_lib.architecture.mobile_net import mobile_net
from recipes_lib.architecture.rms_norm import RMSNorm, predicted_norm_bytes
from recipes_lib.architecture.rope import (
    apply_rope_scaling,
    check_length,
    predicted_length,
    rope_frequencies,
)
from recipes_lib.architecture.swiglu import SwiGLU
from recipes_lib.attention.block_sparse import block_sparse_attention, predicted_share_of_pairs
from recipes_lib.attention.sliding_window import apply_sliding_window, sliding_window_attention
from recipes_lib.compression.distillation import distillation_loss
from recipes_lib.compression.student import choose_channels
from recipes_lib.core.budget import Shape
from recipes_lib.core.classify import accuracy
from recipes_lib.core.data import batches, collate
from recipes_lib.core.dry_step import dry_step
from recipes_lib.core.evaluation import evaluate, perplexity
from recipes_lib.core.images import Images
from recipes_lib.core.machine import seed_everything
from recipes_lib.core.measure import in_turns, measure
from recipes_lib.core.model import answer, model_of_shape
from recipes_lib.core.output_layer import OutputLayer
from recipes_lib.core.plain_step import budget_of
from recipes_lib.core.row_order import rows_of_step
from recipes_lib.core.timeline import TimelineRecorder
from recipes_lib.fine_tuning.honest_evaluation import RowLosses, compare, held_out_losses
from recipes_lib.fine_tuning.lora import apply_lora, estimate_lora, lora_parameters
from recipes_lib.fine_tuning.qlora import apply_qlora, nf4_layer
from recipes_lib.inference.batching import generate_batch
from recipes_lib.inference.compiled_decode import compile_decoder
from recipes_lib.inference.decode_loop import apply_decode_loop
from recipes_lib.inference.speculative import prompt_lookup_generate, speculative_generate
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import (
    apply_chunked_cross_entropy,
    chunked_cross_entropy,
)
from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.optimizer_offload import offload_optimizer
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.parallel.bandwidth import Link, predicted_collective_seconds
from recipes_lib.parallel.zero import predicted_rank_bytes
from recipes_lib.precision.awq import apply_awq, predicted_error_ratio
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw, predicted_state_bytes
from recipes_lib.precision.int4 import apply_int4, int4_linear
from recipes_lib.precision.pure_bf16 import bf16_adamw
from recipes_lib.precision.sixteen_bit_adam import sixteen_bit_adamw
from recipes_lib.training.curriculum import curriculum_batches, flops_per_token
from recipes_lib.training.data_loading import step_loader, stream_loader
from recipes_lib.training.dynamic_batch import predicted_micro_batches
from recipes_lib.training.exact_resume import save_checkpoint
from recipes_lib.training.muon import muon_adamw
from recipes_lib.training.sequence_packing import (
    collate_packed,
    pack_sequences,
    padded_tokens,
    predicted_speedup,
)
from recipes_lib.training.tracking import predicted_file_bytes, track
from recipes_lib.workflows.bench.losses import compare_losses
from recipes_lib.workflows.longest import find_longest, predicted_longest
from recipes_lib.workflows.out_of_memory_doctor import diagnose
from tests.test_architecture import TECHNIQUES, public_functions

ROWS = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
PACKS = [ROWS[0] | {"position_ids": [0, 1, 2]}]
IDS = [[1, 2, 3, 4] * 8] * 4
HIDDEN, WEIGHT = torch.ones(4, 8), torch.ones(16, 8)  # [N, H], [V, H]
LABELS = torch.tensor([1, 2, 3, 4])  # [N]
STREAM = datasets.IterableDataset.from_generator(lambda: iter(ROWS))
HEADS = torch.ones(1, 2, 16, 16)  # [B, H, S, E]
SHAPE = Shape(batch=2, seq=8)


@functools.cache
def model() -> Any:
    """One that nobody changes: every call here is refused."""
    return model_of_shape("tiny-llama", layers=2, device="cpu")


@functools.cache
def decoder() -> Any:
    return apply_decode_loop(model())


@functools.cache
def budget() -> Any:
    return budget_of(model(), SHAPE)


def losses() -> RowLosses:
    return RowLosses(torch.arange(4.0), torch.ones(4, dtype=torch.long))


def images() -> Images:
    return Images(torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.long))


def made(argument: Any) -> Any:
    """What a function of this file makes; everything else as it is."""
    if any(argument is maker for maker in (model, decoder, budget, losses, images)):
        return argument()
    return argument


def first_of(batches_of: Callable) -> Callable:
    @functools.wraps(batches_of)
    def first(**options: Any) -> Any:
        return next(iter(batches_of(**options)))

    return first


# Each function, arguments that it takes (a function here is called first), the whole numbers, and
# the other numbers.
FUNCTIONS: list[tuple[Callable, dict[str, Any], str, str]] = [
    (deep_thin_model, {"weights": 200_000, "layers": 4, "vocabulary": 256},
     "weights layers vocabulary", ""),
    (efficient_net, {}, "seed", ""),
    (small_mixture, {}, "seed", ""),
    (apply_grouped_query_attention, {"model": model}, "kv_heads", ""),
    (mobile_net, {}, "seed", ""),
    (RMSNorm, {"hidden": 8, "eps": 1e-6}, "hidden", "eps"),
    (predicted_norm_bytes, {"rows": 2, "hidden": 8, "itemsize": 4, "fused": True},
     "rows hidden itemsize", ""),
    (SwiGLU, {"hidden": 8, "width": 16}, "hidden width", "dropout"),
    (apply_rope_scaling, {"model": model, "kind": "linear"}, "", "factor"),
    (check_length, {"model": model}, "seq_len", ""),
    (predicted_length, {"model": model}, "", "factor"),
    (rope_frequencies, {"head_dim": 8, "base": 1e4, "kind": "yarn", "trained": 8},
     "head_dim trained seq_len", "base factor"),
    (block_sparse_attention, {"q": HEADS, "k": HEADS, "v": HEADS, "block_size": 4},
     "block_size local global_blocks stride", "scale"),
    (predicted_share_of_pairs, {"seq_len": 16, "block_size": 4},
     "seq_len block_size local global_blocks stride", ""),
    (apply_sliding_window, {"model": model, "window": 4}, "window sinks", ""),
    (sliding_window_attention, {"q": HEADS, "k": HEADS, "v": HEADS, "window": 4},
     "window sinks", "scale"),
    (distillation_loss, {"hidden": HIDDEN, "layer": OutputLayer(WEIGHT), "teacher_hidden": HIDDEN,
                         "teacher_layer": OutputLayer(WEIGHT), "labels": LABELS},
     "ignore_index", "temperature teacher_share"),
    (choose_channels, {"importance": [torch.ones(8)]}, "keep", ""),
    (accuracy, {"model": torch.nn.Identity(), "images": images}, "batch_size", ""),
    (collate, {"rows": ROWS, "pad_token_id": 0, "length": 8}, "pad_token_id length", ""),
    (first_of(batches), {"data": ROWS, "batch_size": 2, "pad_token_id": 0, "length": 8},
     "batch_size pad_token_id length", ""),
    (dry_step, {"model": model, "rows": 1, "length": 8}, "rows length", ""),
    (evaluate, {"model": model, "data": ROWS, "pad_token_id": 0}, "pad_token_id batch_size", ""),
    (perplexity, {"model": model, "tokenizer": None, "text": "a text"}, "context windows", ""),
    (seed_everything, {}, "seed", ""),
    (measure, {"step": int}, "tokens warmup repeats", ""),
    (in_turns, {"steps": {"a": int}}, "rounds", ""),
    (answer, {"model": model, "tokenizer": None, "question": "?"}, "max_new_tokens", ""),
    (rows_of_step, {"step": 0, "rows": 8, "rows_per_step": 2, "seed": 0},
     "step rows rows_per_step seed", ""),
    (held_out_losses, {"model": model, "data": ROWS, "pad_token_id": 0},
     "pad_token_id batch_size", ""),
    (compare, {"before": losses, "after": losses}, "resamples seed", "level"),
    (apply_lora, {"model": model}, "rank", "alpha dropout"),
    (lora_parameters, {"model": model}, "rank", ""),
    (estimate_lora, {"budget": budget, "model": model, "shape": SHAPE}, "rank", "dropout"),
    (apply_qlora, {"model": model}, "rank", "alpha dropout"),
    (nf4_layer, {"linear": torch.nn.Linear(64, 64)}, "block_size", ""),
    (generate_batch, {"decoder": decoder, "prompts": [[1, 2]], "new_tokens": 2}, "new_tokens", ""),
    (compile_decoder, {"decoder": decoder}, "max_tokens", ""),
    (prompt_lookup_generate, {"decoder": decoder, "prompt": [1, 2], "new_tokens": 2},
     "new_tokens draft_tokens ngram shortest", ""),
    (speculative_generate, {"decoder": decoder, "draft_decoder": decoder, "prompt": [1, 2],
                            "new_tokens": 2}, "new_tokens draft_tokens", ""),
    (apply_activation_checkpointing, {"model": model}, "every", ""),
    (offload_activations, {"model": model, "to": "host"}, "min_bytes in_flight", ""),
    (apply_chunked_cross_entropy, {"model": model}, "chunk_size", "label_smoothing z_loss"),
    (chunked_cross_entropy, {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS},
     "chunk_size ignore_index", "label_smoothing z_loss softcap num_items"),
    (apply_nested_checkpointing, {"model": model}, "group", ""),
    (apply_optimizer_in_backward, {"model": model}, "", "lr eps weight_decay max_grad_norm"),
    (offload_optimizer, {"model": model, "lr": 1e-3, "allow_cpu": True}, "micro_batches",
     "lr eps weight_decay max_grad_norm"),
    (apply_tiled_mlp, {"model": model}, "tile_size", ""),
    (Link, {"kind": "all_reduce", "ranks": 2, "latency": 1e-5, "bytes_per_second": 1e9},
     "ranks", "latency bytes_per_second"),
    (predicted_collective_seconds, {"kind": "all_reduce", "size": 1e6, "ranks": 2, "latency": 1e-5,
                                    "bytes_per_second": 1e9},
     "ranks", "size latency bytes_per_second"),
    (predicted_rank_bytes, {"model": model, "stage": 1, "ranks": 2},
     "stage ranks rank states_per_weight", ""),
    (predicted_error_ratio, {"scale": 2.0}, "", "scale step_ratio"),
    (apply_awq, {"model": model, "batches": []}, "group alphas tokens", ""),
    (apply_int4, {"model": model}, "group", ""),
    (int4_linear, {"linear": torch.nn.Linear(64, 64)}, "group", ""),
    (predicted_state_bytes, {"model": model}, "embedding_bits", ""),
    (eight_bit_adamw, {"model_or_params": model, "lr": 1e-3}, "embedding_bits",
     "lr eps weight_decay"),
    (sixteen_bit_adamw, {"model_or_params": model, "lr": 1e-3}, "seed", "lr eps weight_decay"),
    (first_of(curriculum_batches), {"tokens": IDS, "stages": [(8, 1.0)], "tokens_per_step": 16,
                                    "steps": 4},
     "tokens_per_step steps seed start_step", ""),
    (flops_per_token, {"model": model}, "seq_len", ""),
    (step_loader, {"rows": ROWS, "rows_per_step": 2, "steps": 2, "collate": list},
     "rows_per_step steps start seed rank ranks workers prefetch", ""),
    (stream_loader, {"stream": STREAM, "rows_per_step": 2, "collate": list},
     "rows_per_step shuffle_rows seed epoch rank ranks workers prefetch", ""),
    (save_checkpoint, {"path": "/nowhere/a.pt", "model": model, "optimizer": None, "run": {}},
     "step", ""),
    (pack_sequences, {"rows": ROWS, "length": 8}, "length seed", ""),
    (collate_packed, {"packs": PACKS, "pad_token_id": 0}, "pad_token_id length", ""),
    (padded_tokens, {"lengths": [1, 2], "batch_size": 2}, "batch_size", ""),
    (predicted_speedup, {"lengths": [1, 2], "length": 4, "batch_size": 2},
     "length batch_size packs_per_batch", ""),
    (predicted_file_bytes, {"scalars": 1, "steps": 1}, "scalars steps tag_length", ""),
    (track, {"folder": "/nowhere/log"}, "resume_step", ""),
    (predicted_micro_batches, {"plan": lambda shape: budget(), "shape": SHAPE}, "", "limit_bytes"),
    (predicted_longest, {"plan": lambda tokens: budget()}, "", "limit_bytes"),
    (find_longest, {"peak": int, "limit_bytes": 1000, "start": 8},
     "start", "limit_bytes most resolution"),
    (compare_losses, {"tokens": 8, "hidden": 8, "vocab": 16}, "tokens hidden vocab rounds", ""),
    (TimelineRecorder, {"model": model}, "limit_bytes", ""),
    (diagnose, {"model": model, "batch_size": 1, "seq_len": 8, "memory_bytes": 10**9},
     "batch_size seq_len", "memory_bytes"),
]  # fmt: skip
NO_NUMBERS = [math.nan, math.inf, "3", True]
MAY_BE_NEGATIVE = {"ignore_index", "scale", "difference"}


def no_numbers_for(function: Callable, name: str, *, whole: bool) -> list[Any]:
    """What is given in place of a number; not None where that has a meaning."""
    values = list(NO_NUMBERS)
    if whole:
        values.append(2.5)
    parameter = inspect.signature(function).parameters.get(name)
    if parameter is not None and "None" not in parameter.annotation:
        values.append(None)
    if name not in MAY_BE_NEGATIVE:
        values.append(-1)
    return values


@pytest.mark.parametrize(
    ("function", "arguments", "whole", "number"),
    FUNCTIONS,
    ids=[function.__name__ for function, *_ in FUNCTIONS],
)
def test_what_is_no_number_is_refused_by_name(function, arguments, whole, number):
    taken = []
    for name in [*whole.split(), *number.split()]:
        for value in no_numbers_for(function, name, whole=name in whole.split()):
            given = {key: made(argument) for key, argument in arguments.items()} | {name: value}
            try:
                function(**given)
            except ValueError as error:
                if name not in str(error) or str(value) not in str(error):
                    taken.append((name, value, error))
            except Exception as error:  # from inside
                taken.append((name, value, error))
            else:
                taken.append((name, value, "no error"))
    assert taken == []


OPTIMIZERS = [
    (bf16_adamw, {"lr": 1e-3}),
    (eight_bit_adamw, {"lr": 1e-3}),
    (sixteen_bit_adamw, {"lr": 1e-3}),
    (muon_adamw, {"lr": 1e-3}),
    (offload_optimizer, {"lr": 1e-3, "allow_cpu": True}),
    (apply_optimizer_in_backward, {}),
]


@pytest.mark.parametrize(
    ("make", "options"), OPTIMIZERS, ids=[make.__name__ for make, _ in OPTIMIZERS]
)
def test_betas_are_two_numbers(make, options):
    """`betas=0.9` and a missing second one came out of the middle as a TypeError."""
    for betas in (0.9, (0.9,), "ab", None, (0.9, 1.0), (0.9, None)):
        with pytest.raises(ValueError, match="beta"):
            make(model(), **options, betas=betas)


# --- switches -------------------------------------------------------------------------------------

# They are called inside of a technique, in every step.
INNER = {"attend", "attention_and_sums", "code_table"}


def unchecked_switches(path: Path) -> list[str]:
    """Parameters that are True or False, and that a public function neither checks nor hands on.

    Handing on counts by name, `double_quant=double_quant`, to a function that is public as well.
    """
    found = []
    for function in public_functions(path):
        parameters = [*function.args.args, *function.args.kwonlyargs]
        switches = [each.arg for each in parameters if ast.unparse(each.annotation) == "bool"]
        handed_on = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and not ast.unparse(node.func).startswith("_"):
                handed_on |= {each.arg for each in node.keywords}
        if function.name not in INNER:
            found += [f"{function.name}({each})" for each in switches if each not in handed_on]
    return found


@pytest.mark.parametrize("path", TECHNIQUES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_switches_are_checked(path):
    """`offload="no"` counts as true in Python: the technique would do the opposite."""
    assert unchecked_switches(path) == []


def test_the_rule_of_switches_can_fail(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("def apply_a(*, on: bool):\n    if on:\n        _inner(on=on)\n")
    assert unchecked_switches(path) == ["apply_a(on)"]
    path.write_text("def apply_a(*, on: bool):\n    check_flag(on=on)\n")
    assert unchecked_switches(path) == []
