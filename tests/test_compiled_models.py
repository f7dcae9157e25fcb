"""`torch.compile` of a whole model that techniques have changed: the same loss, the same gradients.

Each technique has its own test without the compiler. What it catches here is code that the compiler
cannot trace: a context for a checkpoint, hooks that open and close an autocast, a mask that is
asked for while nothing has a value yet.
"""

import pytest
import torch

from recipes_lib.attention.sliding_window import apply_sliding_window
from recipes_lib.core.model import model_of_shape
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp

IDS = torch.arange(1, 33).view(2, 16)


def selective(model):
    return apply_activation_checkpointing(model, mode="selective")


def nested(model):
    return apply_nested_checkpointing(apply_lora(model, rank=2), group=2)


def tiled_checkpointed_and_chunked(model):
    model = apply_activation_checkpointing(apply_tiled_mlp(model, tile_size=10))
    return apply_chunked_cross_entropy(model, chunk_size=8)


def windowed(model):
    return apply_sliding_window(model, window=4, sinks=1)


def loss_and_gradients(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("apply", "shape"),
    [
        (apply_activation_checkpointing, "tiny-llama"),
        (apply_activation_checkpointing, "tiny-gpt2"),
        (selective, "tiny-qwen3"),
        (nested, "tiny-llama"),
        (tiled_checkpointed_and_chunked, "tiny-gemma2"),
        (windowed, "tiny-llama"),
    ],
)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_model_has_the_same_loss_and_gradients(apply, shape):
    model = apply(model_of_shape(shape, device="cpu"))
    expected = loss_and_gradients(model)
    torch._dynamo.reset()
    model.compile(backend="eager")  # traced as by every backend, and then run as it is
    torch.testing.assert_close(loss_and_gradients(model), expected)


def test_a_compiled_window_still_refuses_packed_rows():
    """transformers looks for them where there are values, and a trace has none."""
    model = windowed(model_of_shape("tiny-llama", device="cpu"))
    model.compile(backend="eager")
    positions = torch.arange(8).repeat(2, 2)  # [2, 16]: two documents in each row
    with pytest.raises(ValueError, match="positions restart"):
        model(input_ids=IDS, position_ids=positions, use_cache=False)
