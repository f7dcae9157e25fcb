"""The sizes of notebooks 02 and 03 fit their cards, by arithmetic."""

import ast
from pathlib import Path

import pytest
import torch

from recipes_lib.core.measure.machine import GIB
from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.on_ranks.train import small_llama

SOURCE = Path(__file__).parents[1] / "notebooks/source/03_optimizing_inference_speed.py"
# What a program gets of the smallest card of each tier: a T4, an L4, an A100.
CARDS = {"gpu16": 14.7 * GIB, "gpu24": 22.0 * GIB, "gpu80": 79.1 * GIB}
CONTEXT = 0.6 * GIB  # CUDA, cuBLAS and their workspaces
# The cells before leave a few models of SmolLM2: as many bytes as so many in fp32.
KEPT_MODELS = 5


def sizes_of_tiers(source=SOURCE, **known):
    """The arguments of `choose_sizes` in a notebook, without running it.

    `known` are names whose values the notebook asks of the machine.
    """
    tree = ast.parse(source.read_text(encoding="utf-8"))
    found = dict(known)
    for statement in tree.body:
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if isinstance(statement, ast.Assign | ast.AugAssign) and "choose_sizes" in names:
            scope = found | {"choose_sizes": dict}
            exec(compile(ast.Module([statement], []), SOURCE.name, "exec"), scope)
            return scope["sizes"]
        if isinstance(statement, ast.Assign | ast.AugAssign) and names <= {*found, "dict"} | {
            target.id
            for target in [getattr(statement, "target", None), *getattr(statement, "targets", [])]
            if isinstance(target, ast.Name)
        }:
            exec(compile(ast.Module([statement], []), SOURCE.name, "exec"), found)
    raise AssertionError("the notebook has no sizes")


def most_bytes(shape, layers):
    """Of the wider model: all rows are alive together, while the last one is made."""
    model = model_of_shape(shape, layers=layers, device="meta")
    weights = model.num_parameters()
    fused = 0  # what the decode loop copies
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            fused += parameter.numel()
    head = model.get_output_embeddings().weight.numel()
    model_and_loop = 4 * weights + 4 * fused
    sixteen_bits = 2 * weights
    int8 = 2 * weights  # two rows; the embedding is the model's
    int4 = 0.625 * (weights - head) + head
    # A row begins as a loop in fp32, and rounding makes copies of its largest layer.
    while_made = max(4 * fused, 2 * 4 * head)
    return model_and_loop + sixteen_bits + int8 + int4 + while_made


@pytest.mark.parametrize("tier", CARDS)
def test_the_wider_model_fits(tier):
    """The mistake: every size of a tier that nobody ran. One row more, and nothing fits."""
    sizes = sizes_of_tiers()[tier]
    kept = KEPT_MODELS * 4 * model_of_shape("smollm2-135m", device="meta").num_parameters()
    assert most_bytes(sizes["shape"], sizes["wide_layers"]) + kept + CONTEXT < CARDS[tier]


# --- training on ranks ----------------------------------------------------------------------------

SCALING = SOURCE.with_name("02_multi_gpu_training.py")
# Bytes per parameter of the greediest row: DeepSpeed has weights, gradients and their buckets,
# fp32 masters and states.
MOST_PER_PARAMETER = 4 + 4 + 4 + 4 + 8


def parameters_of(sizes, tokens):
    with torch.device("meta"):
        return small_llama(sizes=sizes, tokens=tokens).num_parameters()


def activations_of(sizes, rows, tokens):
    """Generously: 40 numbers per token and hidden channel in each block, and four per logit."""
    in_blocks = 40 * sizes["hidden_size"] * sizes["num_hidden_layers"]
    in_blocks += 8 * sizes["intermediate_size"] * sizes["num_hidden_layers"]
    return 4 * rows * tokens * (in_blocks + 4 * 256)


@pytest.mark.parametrize("tier", CARDS)
def test_the_ranks_of_four_gpus_fit(tier):
    """The mistake: the first GPU serves a rank of all three pools, and none gives memory back."""
    sizes = sizes_of_tiers(SCALING, on_gpus=True)[tier]
    model, rows, tokens = sizes["model"], sizes["rows"], sizes["tokens"]
    parameters = parameters_of(model, tokens)
    one_process = 16 * parameters + activations_of(model, rows, tokens)
    of_two = MOST_PER_PARAMETER * parameters + activations_of(model, rows // 2, tokens)
    of_four = 16 * parameters + activations_of(model, rows // 4, tokens)  # "no shard" is DDP
    assert one_process + of_two + of_four + 3 * CONTEXT < CARDS[tier]
