"""Every technique that changes a causal LM refuses another model before it has changed anything.

The functions are found in the package, so a new technique is covered without a line here. If its
function needs options, they are named in `OPTIONS`. If it takes something else than a causal LM, it
is named in `EXEMPT`.
"""

import contextlib
import importlib
import inspect
import pkgutil

import pytest
import torch
import transformers

import recipes_lib
from tests.core.refusal import refusal
from tests.small_models import small_config
from tests.snapshots import assert_unchanged, snapshot

TECHNIQUES = ["precision", "architecture", "attention", "memory", "training", "fine_tuning"]
TECHNIQUES += ["parallel", "inference", "compression", "edge"]
PREFIXES = ("apply_", "offload_", "quantize_")

# What these take instead: a part of a model, a file, any module.
EXEMPT = {
    "apply_optimizer_in_backward",
    "apply_channel_pruning",
    "apply_int8_cache",
    "apply_pruning",
    "apply_quantization_aware",
    "apply_rounding",
    "quantize_onnx",
    "quantize_pt2e",
    "quantize_rows",
}

# What has no default.
OPTIONS = {
    "apply_awq": {"batches": []},
    "apply_grouped_query_attention": {"kv_heads": 1},
    "apply_deepspeed": {"optimizer_class": torch.optim.SGD, "config": {}, "rows": 1},
    "apply_distillation": {"teacher": None},
    "apply_block_sparse": {"block_size": 16, "window_blocks": 1},
    "apply_nested_checkpointing": {"group": 1},
    "apply_pipeline_parallel": {"micro_batches": 2},
    "apply_rope_scaling": {"kind": "linear", "factor": 2.0},
    "apply_sliding_window": {"window": 8},
    "apply_zero": {"optimizer_class": torch.optim.SGD, "stage": 1},
    "offload_optimizer": {"lr": 1e-3, "allow_cpu": True},
}


def call(function, model, options):
    changed = function(model, **options)
    if isinstance(changed, contextlib.AbstractContextManager):
        changed.__enter__()


def functions_that_change_a_model():
    found = {}
    for module in pkgutil.walk_packages(recipes_lib.__path__, "recipes_lib."):
        if module.name.split(".")[1] not in TECHNIQUES:
            continue
        members = inspect.getmembers(importlib.import_module(module.name), inspect.isfunction)
        for name, function in members:
            at_home = inspect.unwrap(function).__module__ == module.name
            if at_home and name.startswith(PREFIXES):
                found[name] = function
    return found


@pytest.fixture
def one_rank(tmp_path):
    """This process as the only rank: techniques for many look for a process group first."""
    place = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_another_model_is_refused_and_unchanged():
    """The mistake: half of an encoder-decoder is changed, and its loss still falls."""
    functions = functions_that_change_a_model()
    assert EXEMPT | OPTIONS.keys() <= functions.keys(), "a leftover would exempt the next one"
    assert len(functions) > 30
    model = transformers.T5ForConditionalGeneration(small_config("T5"))
    before = snapshot(model)
    for name in sorted(functions.keys() - EXEMPT):
        told = refusal(call, functions[name], model, OPTIONS.get(name, {}))
        assert told is not None and "give a decoder-only model" in told, name
        assert_unchanged(model, before)
