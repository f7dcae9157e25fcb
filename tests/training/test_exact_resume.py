import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.training.exact_resume import (
    estimate_checkpoint,
    load_checkpoint,
    rows_of_step,
    save_checkpoint,
)

ROOT = Path(__file__).resolve().parents[2]
ROWS = torch.arange(1, 1 + 12 * 16).reshape(12, 16) % 127  # rows of the data [N, S]


def setup(seed=0, make=None):
    torch.manual_seed(seed)
    model = model_of_shape("tiny-llama", device="cpu")
    optimizer = make(model) if make else torch.optim.AdamW(model.parameters(), lr=1e-3)
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


RUN = {"lr": 1e-3, "data": "abc"}
OPTIMIZERS = {
    "AdamW": None,
    "8-bit": lambda model: eight_bit_adamw(model, lr=1e-3),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_resumed_run_has_the_identical_losses_and_weights(tmp_path, make):
    model, optimizer, schedule = setup(make=make)
    whole = [one_step(model, optimizer, schedule, step) for step in range(7)]

    first = setup(make=make)
    losses = [one_step(*first, step) for step in range(3)]
    parts = {"schedule": first[2]}
    save_checkpoint(
        tmp_path / "c.pt", step=3, model=first[0], optimizer=first[1], run=RUN, parts=parts
    )
    torch.rand(5)  # the process did other things before it died

    again = setup(seed=1, make=make)
    parts = {"schedule": again[2]}
    assert (
        load_checkpoint(tmp_path / "c.pt", model=again[0], optimizer=again[1], run=RUN, parts=parts)
        == 3
    )
    losses += [one_step(*again, step) for step in range(3, 7)]
    assert losses == whole
    for a, b in zip(model.parameters(), again[0].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("forget", ["optimizer", "schedule", "random", "data"])
def test_every_part_is_needed(tmp_path, forget):
    """The losses differ if one thing is not restored: what this test protects is not vacuous."""
    model, optimizer, schedule = setup()
    whole = [one_step(model, optimizer, schedule, step) for step in range(6)]
    first = setup()
    for step in range(3):
        one_step(*first, step)
    save_checkpoint(tmp_path / "c.pt", step=3, model=first[0], optimizer=first[1], run=RUN)
    model, optimizer, schedule = setup(seed=1)
    load_checkpoint(tmp_path / "c.pt", model=model, optimizer=optimizer, run=RUN)
    schedule.load_state_dict(first[2].state_dict())
    if forget == "optimizer":
        optimizer.state.clear()
    elif forget == "schedule":
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    elif forget == "random":
        torch.manual_seed(99)
    start = 0 if forget == "data" else 3
    assert [one_step(model, optimizer, schedule, start + i) for i in range(3)] != whole[3:]


KILLED_WHILE_SAVING = """
import os, signal, sys, torch
from recipes_lib.training import exact_resume
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
exact_resume.save_checkpoint(sys.argv[1], step=1, model=model, optimizer=optimizer, run={})
save = torch.save
def killed_half_way(state, file):
    save(state, file)
    file.flush()
    os.truncate(file.fileno(), 1000)
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = killed_half_way
exact_resume.save_checkpoint(sys.argv[1], step=2, model=model, optimizer=optimizer, run={})
"""


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path):
    path = tmp_path / "c.pt"
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_SAVING, str(path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    model = torch.nn.Linear(64, 64)
    assert (
        load_checkpoint(path, model=model, optimizer=torch.optim.AdamW(model.parameters()), run={})
        == 1
    )


def test_only_what_is_trainable_is_saved_and_estimated(tmp_path):
    model, _, _ = setup()
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(input_ids=ROWS, labels=ROWS, use_cache=False).loss.backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c.pt", step=1, model=model, optimizer=optimizer, run={})
    size = (tmp_path / "c.pt").stat().st_size
    assert estimate_checkpoint(model) == pytest.approx(size, rel=0.1)


def test_rows_of_step_visits_every_row_once_per_epoch():
    epochs = [
        [rows_of_step(s, rows=12, rows_per_step=4, seed=0) for s in range(e, e + 3)] for e in (0, 3)
    ]
    for epoch in epochs:
        assert sorted(row for rows in epoch for row in rows) == list(range(12))
    assert epochs[0] != epochs[1]
    assert rows_of_step(1, rows=12, rows_per_step=4, seed=1) != rows_of_step(
        1, rows=12, rows_per_step=4, seed=0
    )
    with pytest.raises(ValueError, match="give 1 to 12"):
        rows_of_step(0, rows=12, rows_per_step=13, seed=0)


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
    with pytest.raises(ValueError, match="other trainable weights or parts"):
        load_checkpoint(path, **load | {"model": model.requires_grad_(False)})
    with pytest.raises(ValueError, match="other trainable weights or parts"):
        load_checkpoint(
            path, **load | {"model": model.requires_grad_(True)}, parts={"scaler": optimizer}
        )
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="is damaged"):
        load_checkpoint(path, **load)
    assert all(torch.equal(a + 1, b) for a, b in zip(before, model.parameters(), strict=True))


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
