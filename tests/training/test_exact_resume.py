import os
import signal
from pathlib import Path

import numpy
import pytest
import torch

from recipes_lib.core.data.row_order import rows_of_step
from recipes_lib.core.model import model_of_shape
from recipes_lib.memory.optimizer_offload import offload_optimizer
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.training.exact_resume import (
    load_by_hand,
    load_checkpoint,
    predicted_checkpoint_bytes,
    save_by_hand,
    save_checkpoint,
)

ROWS = torch.arange(1, 1 + 12 * 16).reshape(12, 16) % 127  # rows of the data [N, S]
RUN = {"lr": 1e-3, "data": "abc"}


def setup(seed=0, make=None):
    torch.manual_seed(seed)
    model = model_of_shape("tiny-llama", device="cpu")
    if make is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
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


OPTIMIZERS = {
    "AdamW": None,
    "8-bit": lambda model: eight_bit_adamw(model, lr=1e-3),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    # Its parameters are masters in host memory, which were taken for weights of no model.
    "on the host": lambda model: offload_optimizer(model, lr=1e-3, allow_cpu=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_resumed_run_has_the_identical_losses_and_weights(tmp_path, make):
    path = tmp_path / "c.pt"
    model, optimizer, schedule = setup(make=make)
    whole = [one_step(model, optimizer, schedule, step) for step in range(7)]

    first = setup(make=make)
    losses = [one_step(*first, step) for step in range(3)]
    parts = {"schedule": first[2]}
    save_checkpoint(path, step=3, model=first[0], optimizer=first[1], run=RUN, parts=parts)
    torch.rand(5)  # the process did other things before it died

    again = setup(seed=1, make=make)
    parts = {"schedule": again[2]}
    done = load_checkpoint(path, model=again[0], optimizer=again[1], run=RUN, parts=parts)
    assert done == 3
    losses += [one_step(*again, step) for step in range(3, 7)]
    assert losses == whole
    for a, b in zip(model.parameters(), again[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_checkpoint_by_hand_resumes_the_same_run(tmp_path):
    """Both files bring a run back to the same next losses."""
    first = setup()
    one_step(*first, 0)
    model, optimizer, _ = first
    save_by_hand(tmp_path / "by_hand.pt", model, optimizer, step=1)
    save_checkpoint(tmp_path / "c.pt", step=1, model=model, optimizer=optimizer, run=RUN)

    model, optimizer, schedule = setup(seed=1)
    assert load_by_hand(tmp_path / "by_hand.pt", model, optimizer) == 1
    by_hand = [one_step(model, optimizer, schedule, step) for step in (1, 2)]

    model, optimizer, schedule = setup(seed=2)
    load_checkpoint(tmp_path / "c.pt", model=model, optimizer=optimizer, run=RUN)
    assert [one_step(model, optimizer, schedule, step) for step in (1, 2)] == by_hand


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Six losses of a whole run, and the file and schedule of one that stopped after three."""
    path = tmp_path_factory.mktemp("stopped") / "c.pt"
    run = setup()
    whole = [one_step(*run, step) for step in range(6)]
    model, optimizer, schedule = setup()
    for step in range(3):
        one_step(model, optimizer, schedule, step)
    save_checkpoint(path, step=3, model=model, optimizer=optimizer, run=RUN)
    return whole, path, schedule.state_dict()


@pytest.mark.parametrize("forget", ["nothing", "optimizer", "schedule", "random", "data"])
def test_every_part_is_needed(stopped, forget):
    """The losses differ if one thing is not restored: the tests above are not vacuous."""
    whole, path, schedule_state = stopped
    model, optimizer, schedule = setup(seed=1)
    load_checkpoint(path, model=model, optimizer=optimizer, run=RUN)
    schedule.load_state_dict(schedule_state)
    start = 3
    if forget == "optimizer":
        optimizer.state.clear()
    elif forget == "schedule":
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    elif forget == "random":
        torch.manual_seed(99)
    elif forget == "data":
        start = 0
    losses = [one_step(model, optimizer, schedule, start + i) for i in range(3)]
    assert (losses == whole[3:]) == (forget == "nothing")


def killed_half_way(state, file):
    """In the place of torch.save: the process dies when a part of the file is written."""
    file.write(b"x" * 1000)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    path = tmp_path / "c.pt"
    model = torch.nn.Linear(64, 64)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "run": {}}
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


def test_only_what_is_trainable_is_saved_and_predicted(tmp_path):
    model, _, _ = setup()
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(input_ids=ROWS, labels=ROWS, use_cache=False).loss.backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c.pt", step=1, model=model, optimizer=optimizer, run={})
    size = (tmp_path / "c.pt").stat().st_size
    assert predicted_checkpoint_bytes(model) == pytest.approx(size, rel=0.1)


def test_bad_input_changes_nothing(tmp_path):
    model, optimizer, _ = setup()
    path = tmp_path / "c.pt"
    load = {"model": model, "optimizer": optimizer, "run": RUN}
    with pytest.raises(ValueError, match="there is no checkpoint"):
        load_checkpoint(path, **load)
    save_checkpoint(path, step=1, **load)
    content = path.read_bytes()
    before = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data += 1
    with pytest.raises(ValueError, match=r"another run \(lr: 0.001 there, 0.1 here"):
        load_checkpoint(path, **load | {"run": RUN | {"lr": 0.1}})
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="other trainable weights"):
        load_checkpoint(path, **load)
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="other parts"):
        load_checkpoint(path, **load, parts={"scaler": optimizer})
    model.double()
    with pytest.raises(ValueError, match=r"in torch.float32 there, .* in torch.float64 here"):
        load_checkpoint(path, **load)
    model.float()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="is damaged"):
        load_checkpoint(path, **load)
    torch.save(model.state_dict(), path)  # another program's checkpoint
    with pytest.raises(ValueError, match="no checkpoint of this kind"):
        load_checkpoint(path, **load)
    assert all(torch.equal(a + 1, b) for a, b in zip(before, model.parameters(), strict=True))


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


def a_net(seed=0):
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    return net, optimizer


def trained_net(path):
    """A net after one step, and its checkpoint."""
    net, optimizer = a_net()
    net(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    save_checkpoint(path, step=1, model=net, optimizer=optimizer, run={})
    return net, optimizer


def test_a_flipped_byte_is_found(tmp_path):
    """PyTorch writes checksums and does not read them: the weight would be another one."""
    path = tmp_path / "c.pt"
    net, optimizer = trained_net(path)
    content = bytearray(path.read_bytes())
    place = content.find(net.first.weight.detach().numpy().tobytes())
    assert place > 0
    content[place + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged .*the checksum of"):
        load_checkpoint(path, model=net, optimizer=optimizer, run={})


def test_running_statistics_come_back(tmp_path):
    path = tmp_path / "c.pt"
    trained, _ = trained_net(path)
    net, optimizer = a_net()
    load_checkpoint(path, model=net, optimizer=optimizer, run={})
    assert net.norm.running_mean.abs().max() > 0
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, net.state_dict()[name]), name


def test_states_follow_the_names(tmp_path):
    """By position, `first` would get the averages of `second`, which has its shape."""
    path = tmp_path / "c.pt"
    trained, averages = trained_net(path)
    net, _ = a_net()
    optimizer = torch.optim.AdamW(list(net.parameters())[::-1])
    load_checkpoint(path, model=net, optimizer=optimizer, run={})
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            expected = averages.state[trained.get_parameter(name)]
            torch.testing.assert_close(optimizer.state[parameter], expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda net: torch.optim.SGD(net.parameters()), "states of AdamW, not of SGD"),
        (lambda net: torch.optim.AdamW(net.first.parameters()), "with 6 parameters .* has 1, or"),
        (
            lambda net: torch.optim.AdamW(
                [{"params": net.first.parameters()}, {"params": net.second.parameters()}]
            ),
            "with 6 parameters in its groups, and this one has 1, 1",
        ),
    ],
)
def test_another_optimizer_changes_nothing(tmp_path, make, message):
    """It was found after the weights had been overwritten, or never."""
    path = tmp_path / "c.pt"
    trained_net(path)
    net, _ = a_net(seed=1)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.base.load_state_dict(a_net()[0].base.state_dict())
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path, model=net, optimizer=make(net), run={})
    assert torch.equal(net.first.weight, before["first.weight"])


def test_another_base_is_refused(tmp_path):
    path = tmp_path / "c.pt"
    trained_net(path)
    net, optimizer = a_net(seed=1)
    with pytest.raises(ValueError, match="trained on another base"):
        load_checkpoint(path, model=net, optimizer=optimizer, run={})


class Part:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"run": {"data": Path("a")}}, r"the fact data .* not equal to itself .*str\(path\)"),
        ({"run": {"limit": float("nan")}}, "the fact limit .* is nan, which is not equal"),
        ({"run": {"rows": [torch.ones(2)]}}, "the fact rows .* not equal to itself"),
        ({"parts": {"part": Part(Path("a"))}}, "PosixPath could not be loaded: .*"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, odd, message):
    """Facts with a path were written and never came back; the checkpoint before stays."""
    path = tmp_path / "c.pt"
    net, optimizer = trained_net(path)
    content = path.read_bytes()
    state = {"model": net, "optimizer": optimizer, "run": {}} | odd
    with pytest.raises(ValueError, match=message):
        save_checkpoint(path, step=2, **state)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_another_schedule_or_scaling_changes_nothing(tmp_path):
    """A schedule took over any other one's numbers; a scaling refused after the weights."""
    path = tmp_path / "c.pt"
    net, optimizer = a_net()
    state = {"model": net, "optimizer": optimizer, "run": {}}
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    off = torch.amp.GradScaler("cpu", enabled=False)
    save_checkpoint(path, step=1, **state, parts={"schedule": cosine, "scaler": off})
    with torch.no_grad():
        net.first.weight += 1
    before = net.first.weight.clone()
    steps = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(ValueError, match="as schedule the state of CosineAnnealingLR, not of St"):
        load_checkpoint(path, **state, parts={"schedule": steps, "scaler": off})
    on = torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match="state dict is empty"):
        load_checkpoint(path, **state, parts={"schedule": cosine, "scaler": on})
    assert torch.equal(net.first.weight, before)


def test_a_learning_rate_of_numpy_comes_back(tmp_path):
    """`torch.load` takes no number of NumPy from a file, and a formula with numpy.cos gives one."""
    net, optimizer = a_net()
    optimizer.param_groups[0]["lr"] = numpy.float64(0.25)
    state = {"model": net, "optimizer": optimizer, "run": {}}
    save_checkpoint(tmp_path / "c.pt", step=1, **state)
    optimizer.param_groups[0]["lr"] = 0.0
    load_checkpoint(tmp_path / "c.pt", **state)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_weights_outside_of_the_model_are_saved_or_refused(tmp_path):
    """Their averages came back and they themselves did not, without a word."""
    path = tmp_path / "c.pt"
    net, _ = a_net()
    beside = torch.nn.Linear(4, 4)
    both = torch.optim.AdamW([*beside.parameters(), *net.parameters()])
    with pytest.raises(ValueError, match=r"2 parameters of the optimizer are not in the model"):
        save_checkpoint(path, step=1, model=net, optimizer=both, run={})
    save_checkpoint(path, step=1, model=net, optimizer=both, run={}, parts={"beside": beside})
    expected = beside.weight.clone()
    torch.nn.init.zeros_(beside.weight)
    load_checkpoint(path, model=net, optimizer=both, run={}, parts={"beside": beside})
    assert torch.equal(beside.weight, expected)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    model = model_of_shape("tiny-llama", device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(input_ids=ROWS.cuda(), labels=ROWS.cuda(), use_cache=False).loss.backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c.pt", step=1, model=model, optimizer=optimizer, run=RUN)
    expected = torch.rand(3, device="cuda")
    load_checkpoint(tmp_path / "c.pt", model=model, optimizer=optimizer, run=RUN)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert all(state["exp_avg"].is_cuda for state in optimizer.state.values())
