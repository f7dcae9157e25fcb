"""A model as a graph of operators."""

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput

from recipes_lib.core.model.marks import QUANTIZED_BY, mark
from recipes_lib.edge._graph import capture_graph

IMAGE = torch.randn(1, 1, 8, 8)


def small():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))


class LikeHuggingFace(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, x):
        return ImageClassifierOutput(logits=self.inner(x))


def test_the_graph_computes_what_the_model_computes_in_eval_mode():
    """In train mode, batch norm would use the numbers of the example, and change its statistics."""
    model = LikeHuggingFace().train()
    model.inner[0].eval()
    mean = model.inner[1].running_mean.clone()
    graph = capture_graph(model, (IMAGE,)).module()
    assert [model.inner[i].training for i in range(4)] == [False, True, True, True]
    assert torch.equal(model.inner[1].running_mean, mean)
    x = torch.randn(1, 1, 8, 8)
    torch.testing.assert_close(graph(x), model.eval()(x).logits)


def test_any_batch():
    """A graph that is fixed to the batch of its example."""
    model = small().eval()
    graph = capture_graph(model, (torch.randn(2, 1, 8, 8),), any_batch=True).module()
    for size in (1, 5):
        x = torch.randn(size, 1, 8, 8)
        torch.testing.assert_close(graph(x), model(x))


def quantized():
    model = small()
    mark(model[0], QUANTIZED_BY, "apply_quantization_aware")
    return model


def masked():
    model = small()
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    return model


def in_bf16():
    return small().bfloat16()


@pytest.mark.parametrize(
    ("make", "message"),
    [(quantized, "round it again"), (masked, "remove_pruning"), (in_bf16, r"model\.float\(\)")],
)
def test_what_is_no_finished_model(make, message):
    """Rounded twice; a mask that is computed in each call, and so keeps its weight in fp32."""
    with pytest.raises(ValueError, match=message):
        capture_graph(make(), (IMAGE,))
