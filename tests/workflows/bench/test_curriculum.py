"""Schedules of the row length: trained by a plain loop, at equal compute."""

import math

import pytest
import torch

from recipes_lib.core.data import load_text
from recipes_lib.core.model import model_of_shape
from recipes_lib.training.curriculum import curriculum_batches, curriculum_schedule, flops_per_token
from recipes_lib.workflows.bench import curriculum
from recipes_lib.workflows.bench.curriculum import compare_at_equal_compute, train_curriculum

STAGES = [(32, 0.5), (64, 0.5)]


def test_training_is_the_plain_loop_and_the_loss_falls():
    text = torch.tensor(list(load_text(split="validation")[:50_000].encode("ascii", "replace")))
    sizes = {"stages": STAGES, "tokens_per_step": 512, "steps": 24}

    def train(**options):
        torch.manual_seed(0)
        model = model_of_shape("tiny-llama", device="cpu")
        losses = train_curriculum(model, text, learning_rate=3e-3, **sizes | options)
        return model, losses

    model, losses = train()
    assert len(losses) == 24
    assert losses[0] == pytest.approx(math.log(128), abs=0.3)
    assert sum(losses[-4:]) / 4 < losses[0] - 1
    # The seed decides the order of the text, and nothing else is random.
    few = {"steps": 2, "stages": STAGES}
    assert train(**few)[1] == train(**few)[1] != train(**few, seed=1)[1]

    torch.manual_seed(0)
    plain = model_of_shape("tiny-llama", device="cpu")
    optimizer = torch.optim.AdamW(plain.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step, batch in enumerate(curriculum_batches(text, **sizes)):
        # 24 steps: one of warm-up, and a cosine from 1 to 0.1.
        decay = 0.55 + 0.45 * math.cos(math.pi * step / 24)
        optimizer.param_groups[0]["lr"] = 3e-3 * decay
        loss = plain(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        assert loss.item() == pytest.approx(losses[step], abs=1e-5)
    for got, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


def test_schedules_are_compared_at_equal_compute_from_equal_weights(monkeypatch):
    """Steps x tokens x operations per token is the same for all.

    Also for a schedule that never sees the full length: a share of *its* longest rows would give it
    too few steps.
    """
    first, spent = {}, {}

    def train(model, tokens, *, stages, tokens_per_step, steps, learning_rate, seed):
        assert (learning_rate, tokens_per_step) == (1e-3, 256)
        weights = next(model.parameters()).detach().clone()
        first.setdefault(seed, []).append(weights)
        operations = 0
        schedule = curriculum_schedule(stages=stages, tokens_per_step=256, steps=steps)
        for length, count in schedule:
            operations += count * flops_per_token(model, seq_len=length)
        spent.setdefault(seed, []).append(operations)

    monkeypatch.setattr(curriculum, "train_curriculum", train)
    schedules = {"fixed": [(256, 1.0)], "growing": [(32, 0.5), (256, 0.5)], "short": [(32, 1.0)]}
    got = compare_at_equal_compute(
        lambda: model_of_shape("tiny-llama", device="cpu"),
        torch.randint(0, 128, (5000,)),
        torch.randint(0, 128, (2, 256)),
        schedules=schedules,
        steps=200,
        learning_rate=1e-3,
        seeds=(3, 4),
    )
    assert list(got) == list(schedules)
    assert all(len(losses) == 2 for losses in got.values())
    for seed in (3, 4):
        assert all(torch.equal(weights, first[seed][0]) for weights in first[seed])
        assert spent[seed] == pytest.approx([spent[seed][0]] * 3, rel=0.01)
    assert not torch.equal(first[3][0], first[4][0])
    # Nothing was trained: the loss is that of equal weights.
    assert got["fixed"] == got["short"]
    assert got["fixed"][0] == pytest.approx(math.log(128), abs=0.3)
