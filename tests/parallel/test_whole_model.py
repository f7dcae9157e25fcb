"""What no rank could copy or divide is refused in a sentence. Without a group: see test_zero."""

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from recipes_lib.core.model import model_of_shape
from recipes_lib.parallel._whole_model import require_whole_model
from tests.core.refusal import refusal


def refusals():
    """What is said of each model, on a rank."""
    plain = model_of_shape("tiny-mistral", device="cpu")
    on_meta = model_of_shape("tiny-mistral", device="meta")
    frozen = model_of_shape("tiny-mistral", device="cpu").requires_grad_(False)
    in_parts = model_of_shape("tiny-mistral", device="cpu")
    fully_shard(in_parts.model.layers[0])
    told = {
        "plain": refusal(require_whole_model, plain),
        "meta": refusal(require_whole_model, on_meta),
        "frozen": refusal(require_whole_model, frozen),
        "in parts": refusal(require_whole_model, in_parts),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "get_backend_config", only_on_gpus)
        told["elsewhere"] = refusal(require_whole_model, plain)
    return told


def only_on_gpus():
    """As after `init_process_group("nccl")`."""
    return "cuda:nccl"


def test_refusals(two_ranks):
    told = two_ranks.run(refusals)
    assert told["plain"] is None
    assert "on ['meta']: move them to one" in told["meta"]
    assert "no parameter trains" in told["frozen"]
    assert "spread over ranks already" in told["in parts"]
    # The mistake: NCCL says of a tensor on a CPU that it knows no backend, in the first step.
    assert "the model is on cpu, and the ranks have collectives for cuda:nccl" in told["elsewhere"]
    assert not torch.distributed.is_initialized()
