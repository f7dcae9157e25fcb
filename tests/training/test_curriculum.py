import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipes_lib.core.data import load_text
from recipes_lib.core.model import model_of_shape
from recipes_lib.training import curriculum
from recipes_lib.training.curriculum import (
    curriculum_batches,
    curriculum_schedule,
    estimate_curriculum,
    flops_per_token,
)
from recipes_lib.workflows.bench.curriculum import compare_at_equal_compute, train_curriculum

STAGES = [(16, 0.4), (32, 0.3), (64, 0.3)]
SIZES = {"stages": STAGES, "tokens_per_step": 128, "steps": 10}
STREAM = torch.arange(20 * 64 + 37)  # ten steps are one epoch


def ids_of(tokens=STREAM, **options):
    return [batch["input_ids"] for batch in curriculum_batches(tokens, **SIZES | options)]


def test_rows_grow_and_tokens_per_step_stay():
    batches = list(curriculum_batches(STREAM, **SIZES))
    assert [tuple(b["input_ids"].shape) for b in batches] == [(8, 16)] * 4 + [(4, 32)] * 3 + [
        (2, 64)
    ] * 3
    for batch in batches:
        assert torch.equal(batch["labels"], batch["input_ids"])  # the model shifts them
        assert (
            batch["labels"].data_ptr() != batch["input_ids"].data_ptr()
        )  # masking one leaves the other


def test_every_token_once_per_epoch():
    """T is no multiple of the longest row: what is left over is another part in every epoch."""
    steps = ids_of(steps=40)
    epochs = [torch.cat([ids.flatten() for ids in steps[i : i + 10]]) for i in range(0, 40, 10)]
    for epoch in epochs:
        assert len(epoch.unique()) == len(epoch) == 20 * 64
        assert (epoch.view(-1, 64).diff() == 1).all()  # whole pieces of text
        assert (epoch.sort().values.diff() == 1).all()
    assert len({epoch.min().item() for epoch in epochs}) > 1
    assert not torch.equal(
        epochs[0] - epochs[0].min(), epochs[1] - epochs[1].min()
    )  # another order


def test_an_epoch_may_end_inside_a_step():
    stream, steps = torch.arange(5 * 64), ids_of(torch.arange(5 * 64), steps=10)
    pieces = torch.cat([ids.flatten() for ids in steps]).view(-1, 64)[
        :, 0
    ]  # the starts of all pieces
    for epoch in pieces.view(4, 5):
        assert torch.equal(epoch.sort().values, stream[::64])


def test_a_step_holds_the_same_tokens_under_every_schedule():
    for short, long in zip(ids_of(), ids_of(stages=[(64, 1.0)]), strict=True):
        assert torch.equal(short.flatten(), long.flatten())


def test_resumed_at_any_step_and_repeated_by_seed():
    whole = ids_of(steps=25)
    for start in (0, 1, 9, 10, 24, 25):
        rest = ids_of(steps=25, start_step=start)
        assert len(rest) == 25 - start and all(map(torch.equal, rest, whole[start:]))
    assert not torch.equal(ids_of(seed=1)[0], whole[0])


def test_documents_are_joined():
    documents = [list(range(start, start + 50)) for start in range(0, 1300, 50)]
    assert all(map(torch.equal, ids_of(documents), ids_of(torch.arange(1300))))


def test_shares_become_steps():
    def counts(steps, stages=STAGES):
        return [
            count
            for _, count in curriculum_schedule(stages=stages, tokens_per_step=64, steps=steps)
        ]

    assert counts(10) == [4, 3, 3] and counts(100) == [40, 30, 30]
    assert counts(7, [(16, 1 / 3), (32, 1 / 3), (64, 1 / 3)]) == [
        2,
        3,
        2,
    ]  # thirds sum to 1 but for rounding
    assert all(sum(counts(steps)) == steps for steps in range(4, 60))


def test_flops_per_token_are_those_of_the_matrix_products(tiny):
    """Eager attention multiplies the upper triangle too, as causal attention would in rows of twice the length."""
    tiny.set_attn_implementation("eager")
    for batch_size, seq_len in ((4, 32), (2, 129)):
        ids = torch.randint(1, 128, (batch_size, seq_len))
        with FlopCounterMode(display=False) as counter:
            tiny(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        expected = ids.numel() * flops_per_token(tiny, seq_len=2 * seq_len)
        assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_estimate_is_the_share_of_the_counted_operations(llama):
    kernels = torch.ops.aten

    def attention(q, k, v, *args, **kwargs):
        return 4 * q[0] * q[1] * q[2] * k[2] * q[3] // 2  # two products, causal

    custom = {
        kernels._scaled_dot_product_flash_attention_for_cpu: attention,
        kernels._scaled_dot_product_flash_attention_for_cpu_backward: lambda gradient, *a, **b: (
            2 * attention(*a)
        ),
    }

    def count(stages):
        with FlopCounterMode(custom_mapping=custom, display=False) as counter:
            for batch in curriculum_batches(
                torch.randint(0, 128, (4096,)), stages=stages, tokens_per_step=512, steps=10
            ):
                llama(**batch, use_cache=False).loss.backward()
        return counter.get_total_flops()

    stages = [(32, 0.4), (128, 0.3), (512, 0.3)]
    share = count(stages) / count([(512, 1.0)])
    assert estimate_curriculum(llama, stages=stages) == pytest.approx(share, rel=0.01)
    assert share < 0.8
    assert estimate_curriculum(llama, stages=[(512, 1.0)]) == 1


def test_training_is_the_plain_loop_and_the_loss_falls():
    text = torch.tensor(list(load_text(split="validation")[:50_000].encode("ascii", "replace")))
    sizes = {"stages": [(32, 0.5), (128, 0.5)], "tokens_per_step": 512, "steps": 24}

    def train(**options):
        torch.manual_seed(0)
        model = model_of_shape("tiny-llama", device="cpu")
        losses = train_curriculum(model, text, **sizes, learning_rate=3e-3, **options)
        return model, losses

    model, losses = train()
    assert len(losses) == 24 and losses[0] == pytest.approx(4.85, abs=0.3)  # ln 128
    assert sum(losses[-4:]) / 4 < losses[0] - 1
    assert train()[1] == losses and train(seed=1)[1] != losses

    torch.manual_seed(0)
    plain = model_of_shape("tiny-llama", device="cpu")
    optimizer = torch.optim.AdamW(plain.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step, batch in enumerate(curriculum_batches(text, **sizes)):
        # 24 steps: one of warm-up, and a cosine from 1 to 0.1 over the tokens.
        decay = (
            0.55 + 0.45 * torch.cos(torch.tensor(torch.pi * step / 24, dtype=torch.float64)).item()
        )
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
    """Steps x tokens x operations per token is the same for all, also for one that never sees the full length."""
    first, spent = {}, {}

    def train(model, tokens, *, stages, tokens_per_step, steps, learning_rate, seed):
        first.setdefault(seed, []).append(next(model.parameters()).detach().clone())
        batches = curriculum_batches(
            tokens, stages=stages, tokens_per_step=tokens_per_step, steps=steps
        )
        lengths = [batch["input_ids"].shape[1] for batch in batches]
        spent.setdefault(seed, []).append(
            sum(flops_per_token(model, seq_len=length) for length in lengths)
        )
        assert learning_rate == 1e-3 and tokens_per_step == 256

    monkeypatch.setattr(curriculum, "train_curriculum", train)
    schedules = {"fixed": [(256, 1.0)], "growing": [(32, 0.5), (256, 0.5)], "short": [(32, 1.0)]}
    tokens, held_out = torch.randint(0, 128, (5000,)), torch.randint(0, 128, (2, 256))
    got = compare_at_equal_compute(
        lambda: model_of_shape("tiny-llama", device="cpu"),
        tokens,
        held_out,
        schedules=schedules,
        steps=200,
        learning_rate=1e-3,
        seeds=(3, 4),
    )
    assert list(got) == list(schedules) and all(len(losses) == 2 for losses in got.values())
    for seed in (3, 4):
        assert all(torch.equal(weights, first[seed][0]) for weights in first[seed])
        assert spent[seed] == pytest.approx([spent[seed][0]] * 3, rel=0.01)
    assert not torch.equal(first[3][0], first[4][0])
    assert got["fixed"] == got["short"] and got["fixed"][0] == pytest.approx(
        4.85, abs=0.3
    )  # nothing was trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": []}, "ascending"),
        ({"stages": [(64, 0.5), (32, 0.5)]}, "ascending"),
        ({"stages": [(32, 0.5), (32, 0.5)]}, "ascending"),
        ({"stages": [(1, 0.5), (64, 0.5)]}, "2 or more"),
        ({"stages": [(24, 0.5), (64, 0.5)]}, "divide the longest"),
        ({"tokens_per_step": 96}, "divide the longest"),
        ({"tokens_per_step": 0}, "divide the longest"),
        ({"stages": [(32, 0.5), (64, 0.4)]}, "sum to 1, not to 0.9"),
        ({"stages": [(32, 1.5), (64, -0.5)]}, "positive"),
        ({"steps": 2}, "raise it, or drop a stage"),
        ({"start_step": 11}, "0 to 10"),
        ({"start_step": -1}, "0 to 10"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        curriculum_batches(STREAM, **SIZES | options)


@pytest.mark.parametrize("stream", [torch.arange(127), torch.zeros(4, 128), [[1, 2], [3]]])
def test_a_stream_that_is_too_short_is_refused(stream):
    with pytest.raises(ValueError, match="at least one step, 128 tokens"):
        curriculum_batches(stream, **SIZES)


@pytest.mark.gpu
def test_on_a_gpu():
    model = model_of_shape("tiny-llama", dtype=torch.bfloat16, device="cuda")
    batch = next(
        itertools.islice(curriculum_batches(STREAM % 128, **SIZES, device="cuda"), 9, None)
    )
    assert batch["input_ids"].device.type == "cuda"
    losses = train_curriculum(model, STREAM % 128, **SIZES, learning_rate=3e-3)
    assert losses[-1] < losses[0]
