"""The sizes of notebook 03 fit the cards of their tiers, by arithmetic."""

import ast
from pathlib import Path

import pytest

from recipes_lib.core.machine import GIB
from recipes_lib.core.model import model_of_shape

SOURCE = Path(__file__).parents[1] / "notebooks/source/03_optimizing_inference_speed.py"
# What a program gets of the smallest card of each tier: a T4, an L4, an A100.
CARDS = {"gpu16": 14.7 * GIB, "gpu24": 22.0 * GIB, "gpu80": 79.1 * GIB}
CONTEXT = 0.6 * GIB  # CUDA, cuBLAS and their workspaces
# The cells before leave a few models of SmolLM2: as many bytes as so many in fp32.
KEPT_MODELS = 5


def sizes_of_tiers():
    """The arguments of `choose_sizes` in the notebook, without running it."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    found = {}
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
