"""Every technique that changes a causal LM refuses another model before it has changed anything.

The functions are found in the package, so a new technique is covered without a line here. If its
function needs options, they are named in `OPTIONS`. If it takes something else than a causal LM,
it says so in its docstring and is named in `EXEMPT`.
"""

import importlib
import inspect
import pkgutil

import pytest
import torch

import recipes_lib
from tests.not_causal import not_causal
from tests.snapshots import assert_unchanged, snapshot

TECHNIQUES = ["precision", "architecture", "attention", "memory", "training", "fine_tuning"]
TECHNIQUES += ["parallel", "inference", "compression", "edge"]
PREFIXES = ("apply_", "offload_", "quantize_")

# What these take instead, in the words of their docstrings.
EXEMPT = {
    "apply_optimizer_in_backward": "any",  # any nn.Module
    "apply_channel_pruning": "MobileNetV2",
    "apply_int8_cache": "decoder",
    "apply_pruning": "any module",
    "apply_quantization_aware": "network with nn.Conv2d",
    "apply_rounding": "network with convolutions",
    "quantize_onnx": "file",
    "quantize_pt2e": "graph",
    "quantize_rows": "weight",
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


EVERY_FUNCTION = functions_that_change_a_model()
FUNCTIONS = {name: function for name, function in EVERY_FUNCTION.items() if name not in EXEMPT}


@pytest.fixture
def one_rank(tmp_path):
    """This process as the only rank: techniques for many look for a process group first."""
    place = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("function_name", FUNCTIONS)
def test_another_model_is_refused_and_unchanged(function_name):
    """The mistake: half of an encoder-decoder is changed, and its loss still falls."""
    model = not_causal("encoder_decoder")
    before = snapshot(model)
    with pytest.raises(ValueError, match="give a decoder-only model"):
        FUNCTIONS[function_name](model, **OPTIONS.get(function_name, {}))
    assert_unchanged(model, before)


def test_the_functions_are_found():
    """An empty list would pass every test above."""
    assert {"apply_lora", "apply_qlora", "quantize_nf4", "offload_activations"} <= FUNCTIONS.keys()
    assert len(FUNCTIONS) >= 30


def test_exemptions_and_options_are_of_functions_that_exist():
    """A leftover name would exempt the next technique of that name."""
    assert OPTIONS.keys() <= FUNCTIONS.keys()
    assert EXEMPT.keys() <= EVERY_FUNCTION.keys()
    for name, takes in EXEMPT.items():
        assert takes in EVERY_FUNCTION[name].__doc__
