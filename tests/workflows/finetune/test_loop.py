"""The loop of notebook 05 against a plain one, killed and resumed, and beside the production libraries."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch

from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.data import IGNORED, load_instructions
from recipes_lib.core.machine import seed_everything
from recipes_lib.core.measure import PeakMemory, measure
from recipes_lib.core.model import load_tokenizer, model_of_shape
from recipes_lib.precision.mixed_precision import mixed_precision
from recipes_lib.training.sequence_packing import pack_sequences
from recipes_lib.workflows.finetune.libraries import hf_trainer, side_by_side, trl_sft
from recipes_lib.workflows.finetune.loop import (
    CHECKPOINT,
    Step,
    adapt,
    few_steps,
    loading_share,
    micro_batches,
    prepare,
    training_steps,
)
from recipes_lib.workflows.finetune.settings import Settings

RUN = Settings(
    base_model="tiny",
    data_file="",
    output_dir="unused",
    method="full",
    learning_rate=1e-3,
    max_grad_norm=0.5,
    steps=5,
    warmup_steps=2,
    rows_per_step=4,
    micro_batch_size=2,
    seq_len=64,
    packing=False,
    precision="fp32",
    gradient_checkpointing=False,
    seed=0,
    eps=1e-3,  # at Adam's first steps a gradient near zero is a sign: rounding would flip updates
    weight_decay=0.0,  # the Trainer spares the norms
)


def change(**values):
    return dataclasses.replace(RUN, **values)


def make_rows(count=12, vocab=128, shortest=5, longest=39):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for n in torch.randint(shortest, longest + 1, (count,), generator=generator).tolist():
        ids = torch.randint(1, vocab, (n,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORED] * (n // 2) + ids[n // 2 :]})
    return rows


def fresh(shape="tiny-llama", **values):
    seed_everything(0)
    return adapt(model_of_shape(shape, device="cpu"), run=change(**values))


def losses(steps):
    return [step.loss for step in steps]


FAMILIES = ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral", "tiny-gemma2", "tiny-gpt2"]


@pytest.mark.parametrize("shape", FAMILIES)
def test_loop_equals_a_plain_one_on_the_whole_batch(shape):
    """Accumulation over unequal lengths, answers only, clipping and schedule: nothing changes the training."""
    from transformers import get_cosine_schedule_with_warmup

    from recipes_lib.core.data import collate
    from recipes_lib.training.exact_resume import rows_of_step

    rows, model = make_rows(), fresh(shape)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RUN.learning_rate, eps=RUN.eps, weight_decay=0.0
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, RUN.warmup_steps, RUN.steps)
    expected = []
    for number in range(RUN.steps):
        chosen = rows_of_step(number, rows=len(rows), rows_per_step=4, seed=0)
        batch = collate([rows[i] for i in chosen], pad_token_id=0)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), RUN.max_grad_norm).item()
        expected.append((loss.item(), norm, schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    ours = [
        (step.loss, step.gradient_norm, step.learning_rate)
        for step in training_steps(fresh(shape), rows, run=RUN, pad_token_id=0)
    ]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=2e-4, atol=1e-5)
    assert max(norm for _, norm, _ in expected) > RUN.max_grad_norm  # it did clip
    plain = model.state_dict()
    trained = fresh(shape)
    list(training_steps(trained, rows, run=RUN, pad_token_id=0))
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_learn_on_every_family(shape, method):
    if (shape, method) == ("tiny-gpt2", "qlora"):
        with pytest.raises(ValueError, match=r"only nn\.Linear is quantized"):
            fresh(shape, method=method)
        return
    run = change(method=method, steps=12, learning_rate=1e-2, eps=1e-8, gradient_checkpointing=True)
    rows = make_rows(4)
    curve = losses(training_steps(fresh(shape, **vars(run)), rows, run=run, pad_token_id=0))
    assert curve[-1] < curve[0] - 0.1


def test_packed_rows_give_the_loss_of_the_padded_ones():
    rows = make_rows(8)
    packed = pack_sequences(rows, length=64)
    one_step = {"steps": 1, "warmup_steps": 0}
    padded = losses(
        training_steps(fresh(), rows, run=change(**one_step, rows_per_step=8), pad_token_id=0)
    )
    run = change(**one_step, rows_per_step=len(packed), micro_batch_size=1)
    assert losses(training_steps(fresh(), packed, run=run, pad_token_id=0)) == pytest.approx(
        padded, rel=1e-5
    )


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_bnb_8bit"])
def test_a_run_that_stops_goes_on_with_the_identical_losses(tmp_path, optimizer):
    """A step is logged before it is kept, so the last one that was seen is done again."""
    run, rows = change(optimizer=optimizer, save_steps=1, method="lora", dropout=0.1), make_rows()
    options = {"run": run, "pad_token_id": 0}
    whole = losses(training_steps(fresh(**vars(run)), rows, **options))
    first = training_steps(fresh(**vars(run)), rows, **options, folder=tmp_path)
    begun = [next(first).loss for _ in range(3)]
    first.close()
    rest = list(training_steps(fresh(**vars(run)), rows, **options, folder=tmp_path, resume=True))
    assert rest[0].number == 2 and begun == whole[:3]
    assert begun[:2] + losses(rest) == whole


@pytest.mark.parametrize(
    ("save_steps", "taken", "kept"),
    [(1, 1, None), (1, 4, 3), (2, 4, 2), (2, 5, 4), (None, 5, None)],
)
def test_checkpoint_of_a_step_comes_after_it_was_taken(tmp_path, save_steps, taken, kept):
    def saved():
        return (
            torch.load(tmp_path / CHECKPOINT)["step"] if (tmp_path / CHECKPOINT).exists() else None
        )

    steps = training_steps(
        fresh(), make_rows(), run=change(save_steps=save_steps), pad_token_id=0, folder=tmp_path
    )
    for _ in range(taken):
        next(steps)
    assert saved() == kept
    list(steps)
    assert saved() == RUN.steps


def test_bad_input_is_refused_before_any_compute(tmp_path):
    rows = make_rows()

    def start(rows, folder=None, resume=False, **values):
        model = torch.nn.Linear(1, 1)  # any use of it would fail otherwise
        next(
            training_steps(
                model, rows, run=change(**values), pad_token_id=0, folder=folder, resume=resume
            )
        )

    with pytest.raises(ValueError, match="data set is empty"):
        start([])
    with pytest.raises(ValueError, match="12 rows are fewer than rows_per_step=16"):
        start(rows, rows_per_step=16)
    with pytest.raises(ValueError, match=r"longer than seq_len=20 \(row \d+: \d\d tokens\)"):
        start(rows, seq_len=20)
    with pytest.raises(ValueError, match="row 3 has no target"):
        masked = [
            row | {"labels": [IGNORED] * len(row["labels"])} if i == 3 else row
            for i, row in enumerate(rows)
        ]
        start(masked)
    with (
        pytest.raises(ValueError, match="this machine has no GPU"),
        mock.patch("recipes_lib.finetune.machine") as here,
    ):
        here.return_value.device = "cpu"
        next(
            training_steps(fresh(), rows, run=change(optimizer="paged_adamw_8bit"), pad_token_id=0)
        )
    run = change(save_steps=1)
    begun = training_steps(fresh(), rows, run=run, pad_token_id=0, folder=tmp_path)
    next(begun), next(begun)  # the second step keeps the first
    kept = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(ValueError, match="resume it, or choose another folder"):
        start(rows, folder=tmp_path)
    for other, what in (
        ({"learning_rate": 1.0}, "learning_rate"),
        ({"rows_per_step": 2}, "rows_per_step"),
    ):
        with pytest.raises(ValueError, match=rf"another run .*{what}"):
            next(
                training_steps(
                    fresh(), rows, run=change(**other), pad_token_id=0, folder=tmp_path, resume=True
                )
            )
    with pytest.raises(ValueError, match=r"another run .*data"):
        next(
            training_steps(fresh(), rows[1:], run=run, pad_token_id=0, folder=tmp_path, resume=True)
        )
    assert (tmp_path / CHECKPOINT).read_bytes() == kept


# --- the arithmetic and the clock -----------------------------------------------------------------


def alive():
    with PeakMemory() as memory:
        return memory.current


PACKED = {"packing": True, "micro_batch_size": 1}
CHECKPOINTED = {"gradient_checkpointing": True}
BF16 = {"precision": "bf16"}


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("tiny-llama", {}),
        ("tiny-qwen3", {"optimizer": "adamw_bnb_8bit", "seq_len": 32}),  # the states weigh most
        ("tiny-gemma2", BF16),
        ("tiny-gpt2", CHECKPOINTED),
        ("tiny-mistral", PACKED | BF16 | CHECKPOINTED),
        ("tiny-qwen2", {"method": "lora"}),
        ("tiny-qwen3", {"method": "lora", "micro_batch_size": 4} | BF16),
        ("tiny-llama", {"method": "lora"} | PACKED),
        ("tiny-gemma2", {"method": "lora"} | CHECKPOINTED),
        ("tiny-gpt2", {"method": "lora", "optimizer": "adamw_bnb_8bit"}),
        ("smollm2-135m", {"method": "lora", "micro_batch_size": 1}),  # the logits do
        ("tiny-mistral", {"method": "qlora"}),
        ("tiny-qwen2", {"method": "qlora"} | PACKED | CHECKPOINTED),
        ("tiny-llama", {"method": "lora", "target_modules": ["q_proj", "v_proj"]}),
        ("tiny-llama", {"method": "lora", "dropout": 0.1}),
        ("tiny-qwen3", {"method": "qlora", "dropout": 0.1}),
        ("tiny-llama", {"method": "lora", "dropout": 0.1} | BF16),
        ("tiny-llama", {"method": "qlora", "dropout": 0.1} | BF16),
        ("tiny-mistral", {"method": "lora", "dropout": 0.1, "dtype": torch.bfloat16}),
        ("tiny-llama", {"method": "lora", "dtype": torch.bfloat16} | BF16),
        ("tiny-llama", {"method": "lora", "dtype": torch.bfloat16} | PACKED),
        ("tiny-llama", {"method": "lora", "dtype": torch.float16} | PACKED),
        ("tiny-llama", {"method": "qlora"} | BF16),
        (
            "tiny-gemma2",
            {"method": "lora", "seq_len": 320} | CHECKPOINTED,
        ),  # eager: the gradients of the scores
    ],
    ids=str,
)
def test_peak_of_a_step_is_as_predicted(shape, options):
    options = {"dtype": torch.float32, "seq_len": 160, "rows_per_step": 4} | options
    dtype = options.pop("dtype")
    before, run = alive(), change(**options)
    longest = run.seq_len // 2 if run.packing else run.seq_len
    rows = make_rows(24, shortest=20, longest=longest)
    rows = pack_sequences(rows, length=run.seq_len) if run.packing else rows
    base = model_of_shape(shape, layers=2, dtype=dtype, device="cpu")
    model, plan = prepare(base, rows, run=run, pad_token_id=0, number=1)
    steps = training_steps(model, rows, run=run, pad_token_id=0)
    next(steps)  # makes the states
    measured = measure(lambda: next(steps), warmup=0, repeats=0).peak_bytes - before
    assert plan.peak == pytest.approx(measured, rel=0.1)


def test_few_steps_are_those_of_the_optimizer():
    """It holds a third of the weights: the losses of a plain loop, and the share of the last block that changed."""
    (batch,) = micro_batches(
        make_rows(4), run=change(micro_batch_size=4), pad_token_id=0, device="cpu"
    )
    model, plain, expected = fresh(), fresh(), []

    def sgd(model):
        names = [
            name for name, _ in model.named_parameters() if "q_proj" in name or "gate_proj" in name
        ]
        return torch.optim.SGD([model.get_parameter(name) for name in names], lr=0.1)

    optimizer = sgd(plain)
    for _ in range(3):
        loss = plain(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    found, seconds, changed = few_steps(model, sgd(model), batch)
    assert found == pytest.approx(expected, rel=1e-5) and expected[2] < expected[0] and seconds > 0
    of_all = (64 * 64 + 64 * 160) / sum(p.numel() for p in decoder_blocks(model)[-1].parameters())
    assert changed == pytest.approx(of_all, rel=1e-2)


def test_few_steps_pass_the_autocast_on():
    (batch,) = micro_batches(
        make_rows(4), run=change(micro_batch_size=4), pad_token_id=0, device="cpu"
    )
    found = []
    for autocast in (
        contextlib.nullcontext,
        mixed_precision(dtype=torch.bfloat16, device="cpu").autocast,
    ):
        model = fresh()
        found.append(
            few_steps(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, autocast=autocast)
        )
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-2) and found[0][0] != found[1][0]
    assert found[0][2] == found[1][2] == 0, "nothing changes at learning rate 0"


def test_loading_share_is_of_all_seconds():
    rest = {"loss": 1.0, "gradient_norm": 1.0, "learning_rate": 1.0, "tokens": 1}
    steps = [Step(0, seconds=1.0, loading=0.5, **rest), Step(1, seconds=3.0, loading=0.1, **rest)]
    assert loading_share(steps) == pytest.approx(0.6 / 4)


# --- beside the libraries -------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_trainer_trains_the_same(tmp_path, packed):
    rows = pack_sequences(make_rows(20), length=64) if packed else make_rows()
    run = change(output_dir=str(tmp_path), packing=packed, rows_per_step=4, method="lora")
    turns = []
    ours = list(training_steps(fresh(method="lora"), rows, run=run, pad_token_id=0))
    theirs = hf_trainer(
        fresh(method="lora"), rows, run=run, pad_token_id=0, turn=lambda: turns.append(1)
    )
    assert len(turns) == len(theirs) == run.steps
    for a, b in zip(ours, theirs, strict=True):
        assert a.loss == pytest.approx(b.loss, abs=2e-4)  # the Trainer rounds to four digits
        assert a.learning_rate == pytest.approx(b.learning_rate) and a.tokens == b.tokens
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-3)


def test_trl_trains_the_same(tmp_path):
    tokenizer = load_tokenizer()
    rows = [
        {"input_ids": row["input_ids"], "labels": row["labels"]}
        for row in load_instructions(tokenizer, max_tokens=64, limit=12)
    ]
    run = change(output_dir=str(tmp_path), method="lora")

    def small():
        seed_everything(0)
        return adapt(model_of_shape("smollm2-135m", layers=1, device="cpu"), run=run)

    ours = losses(training_steps(small(), rows, run=run, pad_token_id=tokenizer.pad_token_id))
    theirs = losses(trl_sft(small(), rows, run=run, tokenizer=tokenizer))
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_side_by_side_trains_the_same_three_times(tmp_path):
    run = change(output_dir=str(tmp_path), method="lora", steps=3, warmup_steps=1)
    found = side_by_side(
        lambda: fresh(method="lora"), make_rows(), run=run, tokenizer=load_tokenizer()
    )
    assert list(found) == ["ours", "Trainer", "SFTTrainer"]
    for name, facts in found.items():
        more = set() if name == "ours" else {"time_ratio"}
        assert facts.keys() == {"losses", "tokens_per_second", "peak_bytes"} | more
        assert (
            facts["losses"] == pytest.approx(found["ours"]["losses"], rel=1e-3)
            and len(facts["losses"]) == 3
        )
        assert facts["tokens_per_second"] > 0
        assert facts["peak_bytes"] >= found["ours"]["peak_bytes"], (
            "the libraries compute every logit"
        )


def test_the_peak_of_a_library_is_its_own(tmp_path):
    """Nothing of the run before may be alive: the second library's peak is what it is when it comes first."""
    run = change(output_dir=str(tmp_path), method="lora", steps=2, warmup_steps=1)
    peaks = [
        side_by_side(
            lambda: fresh(method="lora"),
            make_rows(),
            run=run,
            tokenizer=load_tokenizer(),
            libraries=libraries,
        )["SFTTrainer"]["peak_bytes"]
        for libraries in (["SFTTrainer"], ["Trainer", "SFTTrainer"])
    ]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)
