"""What copies or divides a model refuses the same mistakes, on every rank and without a hang."""

from functools import partial

import torch

from recipes_lib.core.ranks import rank
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.parallel.data_parallel import apply_data_parallel, data_parallel_step
from recipes_lib.parallel.fully_sharded import apply_fully_sharded
from recipes_lib.parallel.quantized_shards import apply_quantized_shards
from recipes_lib.parallel.zero import apply_zero
from tests.core.refusal import refusal
from tests.parallel.parity import own_batches, sgd, tiny_model

EVERY = {
    "data parallel": apply_data_parallel,
    "ZeRO": partial(apply_zero, optimizer_class=torch.optim.SGD, stage=3),
    "FSDP": apply_fully_sharded,
}


def refused_by_each():
    """On a rank: what each says to each mistake."""
    told = {}
    for name, apply in EVERY.items():
        stepping = tiny_model()
        apply_optimizer_in_backward(stepping, lr=1e-3)
        done = apply(tiny_model())
        if name == "ZeRO":
            done, _ = done
        told[name] = {
            "another model": refusal(apply, tiny_model(num_hidden_layers=2 + rank())),
            "steps in backward": refusal(apply, stepping),
            "twice": refusal(apply, done),
        }
    return told


def test_the_same_mistakes(two_ranks):
    """The mistakes: each rank trains alone without an error, or waits for the other for ever."""
    for name, told in two_ranks.run(refused_by_each, timeout=90).items():
        assert "give the same on all ranks" in told["another model"], name
        assert "takes gradients in backward" in told["steps in backward"], name
        assert "on several ranks already" in told["twice"], name


def refused_by_one():
    """On a rank: what only one of them has to refuse."""
    thawed = tiny_model()
    thawed.lm_head.requires_grad_(False)
    wrapper = apply_data_parallel(thawed)
    optimizer = sgd(thawed.parameters())
    thawed.lm_head.requires_grad_(True)
    four_bits = tiny_model()
    four_bits.lm_head.weight.quant_state = "scales"
    return {
        "trains since": refusal(data_parallel_step, wrapper, optimizer, own_batches(0)),
        "other weights": refusal(apply_fully_sharded, tiny_model(seed=rank())),
        "four bits": refusal(apply_fully_sharded, four_bits),
        "no four bits": refusal(apply_quantized_shards, tiny_model()),
    }


def test_the_mistakes_of_one(two_ranks):
    """The mistakes: a weight that nobody averages, parts of models that no rank ever had, scales
    that are whole on every rank.
    """
    told = two_ranks.run(refused_by_one, timeout=60)
    assert "lm_head.weight" in told["trains since"]
    assert "give the same on all ranks" in told["other weights"]
    assert "use apply_quantized_shards" in told["four bits"]
    assert "no layer in 4 bits" in told["no four bits"]
