import copy

import pytest
import torch

from recipes_lib.precision._saved_states import load_as_saved


def weight(dtype, size=4):
    return torch.nn.Parameter(torch.ones(size, dtype=dtype))


def adamw(*parameters):
    """Two groups, so that the number of a parameter in a checkpoint is not its place in a group."""
    return torch.optim.AdamW([{"params": [parameter]} for parameter in parameters], lr=0.1)


def fill(optimizer, *parameters, dtype):
    """Give each parameter a state in `dtype` that no other one has, as if steps had made it."""
    for number, parameter in enumerate(parameters, start=1):
        # 1/3 has other digits in fp32 than in bf16: a cast on the way would show.
        optimizer.state[parameter] = {
            "step": number,
            "exp_avg": torch.full_like(parameter, number / 3, dtype=dtype),
        }


@pytest.mark.parametrize(
    ("weights", "states"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=["fp32 masters", "16-bit states"],
)
def test_states_come_back_as_they_were(weights, states):
    """Catches PyTorch's own cast to the dtype of the weight, and states of another weight."""
    first, second = weight(weights), weight(weights, size=7)
    saved = adamw(first, second)
    fill(saved, first, second, dtype=states)
    others = weight(weights), weight(weights, size=7)
    resumed = adamw(*others)
    load_as_saved(resumed, saved.state_dict())
    for ours, theirs in zip((first, second), others, strict=True):
        loaded = resumed.state[theirs]
        assert loaded["exp_avg"].dtype is states
        assert torch.equal(loaded["exp_avg"], saved.state[ours]["exp_avg"])
        assert loaded["step"] == saved.state[ours]["step"]


def test_the_checkpoint_keeps_its_own_states():
    """Catches states that are shared: steps after loading would change what is saved."""
    one = weight(torch.bfloat16)
    saved = adamw(one)
    fill(saved, one, dtype=torch.float32)
    checkpoint = saved.state_dict()
    before = copy.deepcopy(checkpoint["state"])
    other = weight(torch.bfloat16)
    resumed = adamw(other)
    load_as_saved(resumed, checkpoint)
    resumed.state[other]["exp_avg"].zero_()
    assert torch.equal(checkpoint["state"][0]["exp_avg"], before[0]["exp_avg"])


def test_options_and_parameters_without_a_state():
    """Catches a learning rate that is not taken over, and an error for a weight never stepped."""
    stepped, untouched = weight(torch.bfloat16), weight(torch.bfloat16)
    saved = adamw(stepped, untouched)
    fill(saved, stepped, dtype=torch.float32)
    saved.param_groups[1]["lr"] = 0.5
    others = weight(torch.bfloat16), weight(torch.bfloat16)
    resumed = adamw(*others)
    load_as_saved(resumed, saved.state_dict())
    assert [group["lr"] for group in resumed.param_groups] == [0.1, 0.5]
    assert others[1] not in resumed.state
