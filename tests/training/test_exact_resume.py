import os
import signal

import numpy as np
import pytest
import torch

from recipes_lib.core.data.row_order import rows_of_step
from recipes_lib.core.model import model_of_shape
from recipes_lib.memory.optimizer_offload import offload_optimizer
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.training.exact_resume import (
    load_by_hand,
    load_checkpoint,
    save_by_hand,
    save_checkpoint,
)

ROWS = torch.arange(1, 1 + 12 * 16).reshape(12, 16) % 127  # rows of the data [N, S]
RUN = {"lr": 1e-3, "data": "abc"}

OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "8-bit": lambda model: eight_bit_adamw(model, lr=1e-3),
    # Its parameters are masters in host memory, which are weights of no model.
    "on the host": lambda model: offload_optimizer(model, lr=1e-3, allow_cpu=True),
}


def setup(seed=0, make=OPTIMIZERS["AdamW"]):
    torch.manual_seed(seed)
    model = model_of_shape("tiny-llama", device="cpu")
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, schedule


def one_step(model, optimizer, schedule, step):
    """With dropout on the input: the random state matters."""
    rows = ROWS[rows_of_step(step, rows=len(ROWS), rows_per_step=4, seed=7)]
    embedded = torch.nn.functional.dropout(model.get_input_embeddings()(rows), 0.2)
    loss = model(inputs_embeds=embedded, labels=rows, use_cache=False).loss
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_resumed_run_has_the_identical_losses_and_weights(tmp_path, make):
    """The mistake: something that the next step reads is not in the file."""
    model, optimizer, schedule = setup(make=make)
    whole = [one_step(model, optimizer, schedule, step) for step in range(6)]

    first = setup(make=make)
    losses = [one_step(*first, step) for step in range(3)]
    parts = {"schedule": first[2]}
    path = tmp_path / "c.pt"
    save_checkpoint(path, step=3, model=first[0], optimizer=first[1], run=RUN, parts=parts)
    torch.rand(5)  # the process did other things before it died

    again = setup(seed=1, make=make)
    parts = {"schedule": again[2]}
    done = load_checkpoint(path, model=again[0], optimizer=again[1], run=RUN, parts=parts)
    losses += [one_step(*again, step) for step in range(done, 6)]
    assert losses == whole
    assert all(map(torch.equal, model.parameters(), again[0].parameters()))


def test_a_schedule_that_counts_in_numbers_of_numpy(tmp_path):
    """The mistake: numpy.cos makes numbers that torch.load refuses, and the first save raises."""
    model, optimizer, _ = setup()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step))
    rate = optimizer.param_groups[0]["lr"]
    state = {"model": model, "optimizer": optimizer, "run": RUN, "parts": {"schedule": schedule}}
    save_checkpoint(tmp_path / "c.pt", step=1, **state)
    assert load_checkpoint(tmp_path / "c.pt", **state) == 1
    assert type(rate) is np.float64 and optimizer.param_groups[0]["lr"] == rate


def test_by_hand_the_run_goes_on_the_same(tmp_path):
    """The mistake: the idea that a learner copies forgets what the next step reads."""
    run = setup()
    one_step(*run, 0)
    save_by_hand(tmp_path / "c.pt", run[0], run[1], step=1)
    expected = [one_step(*run, step) for step in (1, 2)]
    model, optimizer, schedule = setup(seed=1)
    assert load_by_hand(tmp_path / "c.pt", model, optimizer) == 1
    schedule.last_epoch = 1
    assert [one_step(model, optimizer, schedule, step) for step in (1, 2)] == expected


def killed_half_way(state, file):
    """In the place of torch.save: the process dies when a part of the file is written."""
    file.write(b"x" * 1000)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    """The mistake: the file is written in its place, and half of it is what is left."""
    model = torch.nn.Linear(64, 64)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "run": {}}
    path = tmp_path / "c.pt"
    save_checkpoint(path, step=1, **state)
    monkeypatch.setattr(torch, "save", killed_half_way)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # not in a forked process
    # A fork, because a new interpreter would need seconds to import torch.
    child = os.fork()
    if child == 0:
        try:
            save_checkpoint(path, step=2, **state)
        finally:
            os._exit(0)  # not reached: the process is dead
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert load_checkpoint(path, **state) == 1
    assert (tmp_path / "c.pt.part").stat().st_size == 1000  # it was writing


def test_only_what_is_trainable_is_saved(tmp_path):
    """The mistake: adapters of megabytes are saved with their base of gigabytes."""
    model, _, _ = setup()
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(input_ids=ROWS, labels=ROWS, use_cache=False).loss.backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c.pt", step=1, model=model, optimizer=optimizer, run={})
    size = (tmp_path / "c.pt").stat().st_size
    trainable = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert size == pytest.approx(3 * trainable, rel=0.1)  # weights and two averages


# --- what is refused ------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Two weights of one shape, a norm with running statistics, and a frozen base."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(4, 4).requires_grad_(False)
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.norm = torch.nn.BatchNorm1d(4)
        self.second = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.second(self.norm(self.first(self.base(x))))


def a_run():
    """A net after one step, and what saves it."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {"model": net, "optimizer": optimizer, "run": RUN, "parts": {"schedule": cosine}}


def changed(run, what):
    """`run`, but one thing is another one."""
    net = run["model"]
    if what == "setting":
        run["run"] = RUN | {"lr": 0.1}
    elif what == "base":
        torch.nn.init.ones_(net.base.weight)
    elif what == "order":  # by position, `first` would get the averages of `second`
        run["optimizer"] = torch.optim.AdamW(list(net.parameters())[::-1])
    elif what == "schedule":
        run["parts"] = {"schedule": torch.optim.lr_scheduler.StepLR(run["optimizer"], 2)}
    return run


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("setting", "run lr: 0.001 there, 0.1 here"),
        ("base", "base base.weight: '"),
        ("order", "optimized first.weight: 'group 0, place 2' there, 'group 0, place 3' here"),
        ("schedule", "parts schedule: 'CosineAnnealingLR' there, 'StepLR' here"),
    ],
)
def test_another_run_changes_nothing(tmp_path, what, message):
    """The mistake: each of these loads without an error, and trains something else."""
    path = tmp_path / "c.pt"
    save_checkpoint(path, step=1, **a_run())
    run = changed(a_run(), what)
    with torch.no_grad():
        run["model"].second.weight += 1
    before = run["model"].second.weight.clone()
    with pytest.raises(ValueError, match=f"another run .*{message}"):
        load_checkpoint(path, **run)
    assert torch.equal(run["model"].second.weight, before)


def test_running_statistics_come_back(tmp_path):
    """The mistake: buffers are no parameters, and evaluation uses those of a fresh model."""
    trained = a_run()
    save_checkpoint(tmp_path / "c.pt", step=1, **trained)
    again = a_run()
    again["model"].norm.reset_running_stats()
    load_checkpoint(tmp_path / "c.pt", **again)
    assert again["model"].norm.running_mean.abs().max() > 0
    assert torch.equal(again["model"].norm.running_mean, trained["model"].norm.running_mean)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """The mistake: random states of the GPU stay as they are, or states end on the CPU."""
    model = model_of_shape("tiny-llama", device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(input_ids=ROWS.cuda(), labels=ROWS.cuda(), use_cache=False).loss.backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c.pt", step=1, model=model, optimizer=optimizer, run=RUN)
    expected = torch.rand(3, device="cuda")
    load_checkpoint(tmp_path / "c.pt", model=model, optimizer=optimizer, run=RUN)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert all(state["exp_avg"].is_cuda for state in optimizer.state.values())
