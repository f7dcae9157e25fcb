"""`torch.compile` of a whole model that techniques have changed: the same loss, the same gradients.

Each technique has its own test without the compiler. What it catches here is code that the compiler
cannot trace: a context for a checkpoint, hooks that open and close an autocast. Tracing takes its
time for each block, chunk and tile: the models have as few of them as show the mistake.
"""

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp

IDS = torch.arange(1, 33).view(2, 16)


def selective(model):
    return apply_activation_checkpointing(model, mode="selective")


def tiled_checkpointed_and_chunked(model):
    model = apply_activation_checkpointing(apply_tiled_mlp(model, tile_size=10))
    return apply_chunked_cross_entropy(model, chunk_size=20)


def loss_and_gradients(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("apply", "shape", "layers"),
    [
        (selective, "tiny-qwen3", 1),
        (tiled_checkpointed_and_chunked, "tiny-gpt2", 1),
    ],
)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_model_has_the_same_loss_and_gradients(apply, shape, layers):
    model = apply(model_of_shape(shape, layers=layers, device="cpu"))
    expected = loss_and_gradients(model)
    torch._dynamo.reset()
    model.compile(backend="eager")  # traced as by every backend, and then run as it is
    torch.testing.assert_close(loss_and_gradients(model), expected)
