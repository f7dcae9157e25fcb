import pytest
import torch
from torch import nn

from recipes_lib.core.model.marks import QUANTIZED_BY, mark
from recipes_lib.edge._graph_capture import capture_graph, in_eval_mode, logits_of


class Decides(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x - 1


class LeavesPyTorch(nn.Module):
    def forward(self, x):
        return torch.from_numpy(x.numpy()) * 2


class ReturnsNothing(nn.Module):
    def forward(self, x):
        return None


class LikeHuggingFace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        from transformers.modeling_outputs import ImageClassifierOutput

        return ImageClassifierOutput(logits=self.linear(x))


def small():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))


def test_the_graph_computes_what_the_model_computes_in_eval_mode():
    """In train mode, batch norm would use the numbers of the example, and change its statistics."""
    model = small().train()
    model[0].eval()
    mean = model[1].running_mean.clone()
    graph = capture_graph(model, (torch.randn(1, 1, 8, 8),)).module()
    assert [model[i].training for i in range(4)] == [False, True, True, True]
    assert torch.equal(model[1].running_mean, mean)
    x = torch.randn(1, 1, 8, 8)
    torch.testing.assert_close(graph(x), model.eval()(x))


def test_the_graph_of_a_training_step():
    """Its norms use the batch; the statistics of the model do not move while it is written down."""
    model = small()
    mean = model[1].running_mean.clone()
    x = torch.randn(4, 1, 8, 8)
    graph = capture_graph(model.eval(), (x,), any_batch=True, training=True).module()
    assert not any(part.training for part in model.modules())
    assert torch.equal(model[1].running_mean, mean)
    y = graph(x)
    y.sum().backward()
    torch.testing.assert_close(y, model.train()(x))


def test_any_batch():
    model = small()
    graph = capture_graph(model, (torch.randn(2, 1, 8, 8),), any_batch=True).module()
    for size in (1, 5):
        x = torch.randn(size, 1, 8, 8)
        torch.testing.assert_close(graph(x), model.eval()(x))
    with pytest.raises(ValueError, match="one batch size of 2 or more"):
        capture_graph(model, (torch.randn(1, 1, 8, 8),), any_batch=True)


def test_of_hugging_face_the_logits():
    model = LikeHuggingFace()
    x = torch.randn(2, 4)
    assert torch.equal(capture_graph(model, (x,)).module()(x), model.linear(x))
    assert logits_of(x) is x


@pytest.mark.parametrize(
    ("model", "example", "message"),
    [
        (Decides(), (torch.ones(3),), "Decides decides in Python by the numbers of a tensor"),
        (LeavesPyTorch(), (torch.ones(3),), "cannot be written down as a graph"),
        (small(), (torch.ones(1, 3, 8, 8),), r"does not run on the example \[1, 3, 8, 8\]"),
        (small(), (torch.ones(0, 1, 8, 8),), "give an example with numbers in it"),
        (small(), (), "give a tuple of tensors"),
        (small(), "images", "give a tuple of tensors"),
        (small().bfloat16(), (torch.ones(1, 1, 8, 8),), r"call model\.float\(\)"),
        ("model", (torch.ones(1),), "str"),
    ],
)
def test_what_cannot_be_captured(model, example, message):
    with pytest.raises(ValueError, match=message):
        capture_graph(model, example)


def test_eval_mode_of_a_graph_that_refuses_eval():
    graph = capture_graph(small(), (torch.ones(1, 1, 8, 8),)).module()
    graph.training = True
    with in_eval_mode(graph):
        assert not graph.training
    assert graph.training


def with_a_mask():
    model = small()
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    return model


def quantized(by):
    model = small()
    mark(model[0], QUANTIZED_BY, by)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: quantized("apply_quantization_aware"), r"call remove_quantization_aware\(model\)"),
        (lambda: quantized("apply_rounding"), "export the model as it was before"),
        (with_a_mask, r"call remove_pruning\(model\) for masks"),
        (lambda: nn.LazyConv2d(4, 3), "lazy layer.*call the model once"),
        (ReturnsNothing, "returns no tensor, but NoneType"),
        (lambda: nn.Linear, "Linear is a class: give a model"),
    ],
)
def test_what_is_no_finished_model(make, message):
    """Layers that round by themselves were said to decide in Python; None made an empty file."""
    with pytest.raises(ValueError, match=message):
        capture_graph(make(), (torch.ones(1, 1, 8, 8),))
