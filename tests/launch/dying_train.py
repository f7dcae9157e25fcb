"""launch/train.py, whose last rank kills itself in its fifth step, once."""

import os
import signal

import torch

from tests.launch.scripts import load

train = load("train")
train_step = train.train_step
trained = []


def train_or_die(*step):
    """A step, or what a failing machine does to a process."""
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    if len(trained) == 4 and is_last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    trained.append(step)
    return train_step(*step)


train.train_step = train_or_die
train.main()
