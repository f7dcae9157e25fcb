"""The loop of notebook 05 against a plain one, killed and resumed, and beside the production libraries."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from recipes_lib.core.data import IGNORED, load_instructions
from recipes_lib.core.machine import seed_everything
from recipes_lib.core.model import load_tokenizer, model_of_shape
from recipes_lib.export import Settings
from recipes_lib.finetune import CHECKPOINT, adapt, run_command, training_steps
from recipes_lib.production import hf_trainer, trl_sft
from recipes_lib.training.sequence_packing import pack_sequences

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


def make_rows(count=12, vocab=128):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for n in torch.randint(5, 40, (count,), generator=generator).tolist():
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=RUN.learning_rate, eps=RUN.eps, weight_decay=0.0)
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
    padded = losses(training_steps(fresh(), rows, run=change(**one_step, rows_per_step=8), pad_token_id=0))
    run = change(**one_step, rows_per_step=len(packed), micro_batch_size=1)
    assert losses(training_steps(fresh(), packed, run=run, pad_token_id=0)) == pytest.approx(padded, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_bnb_8bit"])
def test_a_run_that_stops_goes_on_with_the_identical_losses(tmp_path, optimizer):
    run, rows = change(optimizer=optimizer, save_steps=1, method="lora", dropout=0.1), make_rows()
    options = {"run": run, "pad_token_id": 0}
    whole = losses(training_steps(fresh(**vars(run)), rows, **options))
    first = training_steps(fresh(**vars(run)), rows, **options, folder=tmp_path)
    begun = [next(first).loss for _ in range(3)]
    first.close()
    rest = losses(training_steps(fresh(**vars(run)), rows, **options, folder=tmp_path, resume=True))
    assert begun + rest == whole


def test_bad_input_is_refused_before_any_compute(tmp_path):
    rows = make_rows()

    def start(rows, folder=None, resume=False, **values):
        model = torch.nn.Linear(1, 1)  # any use of it would fail otherwise
        next(training_steps(model, rows, run=change(**values), pad_token_id=0, folder=folder, resume=resume))

    with pytest.raises(ValueError, match="data set is empty"):
        start([])
    with pytest.raises(ValueError, match="12 rows are fewer than rows_per_step=16"):
        start(rows, rows_per_step=16)
    with pytest.raises(ValueError, match=r"longer than seq_len=20 \(row \d+: \d\d tokens\)"):
        start(rows, seq_len=20)
    with pytest.raises(ValueError, match="row 3 has no target"):
        masked = [row | {"labels": [IGNORED] * len(row["labels"])} if i == 3 else row for i, row in enumerate(rows)]
        start(masked)
    run = change(save_steps=1)
    next(training_steps(fresh(), rows, run=run, pad_token_id=0, folder=tmp_path))
    kept = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(ValueError, match="resume it, or choose another folder"):
        start(rows, folder=tmp_path)
    for other, what in (({"learning_rate": 1.0}, "learning_rate"), ({"rows_per_step": 2}, "rows_per_step")):
        with pytest.raises(ValueError, match=rf"another run .*{what}"):
            next(training_steps(fresh(), rows, run=change(**other), pad_token_id=0, folder=tmp_path, resume=True))
    with pytest.raises(ValueError, match=r"another run .*data"):
        next(training_steps(fresh(), rows[1:], run=run, pad_token_id=0, folder=tmp_path, resume=True))
    assert (tmp_path / CHECKPOINT).read_bytes() == kept


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A random model with the real tokenizer, as a folder: a process of its own can load it."""
    folder = tmp_path_factory.mktemp("model")
    seed_everything(0)
    model = model_of_shape("smollm2-135m", layers=1, device="cpu")
    small = model.config
    small.hidden_size, small.intermediate_size, small.head_dim = 36, 64, 4
    type(model)(small).save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    lines = [{"prompt": f"What is {i} plus {i}?", "completion": f"It is {2 * i}, of course."} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def command(small_model, pairs, output, *more, steps=8):
    return ["--model", str(small_model), "--data", str(pairs), "--output", str(output), "--steps", str(steps),
            "--save-steps", "2", "--rows-per-step", "2", "--seq-len", "64", "--precision", "fp32", *more]  # fmt: skip


def test_command_is_killed_and_resumed_with_the_identical_losses(small_model, pairs, tmp_path):
    """SIGKILL between two steps; the log shows each step once; the folder holds all that was promised."""
    expected = run_command(*command(small_model, pairs, tmp_path / "whole"))
    assert sorted(expected) == list(range(8))
    killed = tmp_path / "killed"
    before = run_command(*command(small_model, pairs, killed), kill_at=4)
    assert 4 in before and 7 not in before
    after = run_command(*command(small_model, pairs, killed, "--resume"))
    assert before | after == expected and min(after) >= 4
    assert all(before[step] == after[step] for step in before.keys() & after.keys())

    from recipes_lib.training.tracking import read_back

    log = read_back(killed / "log", backend="tensorboard")
    assert [step for step, _ in log["loss"]] == list(range(8))
    assert [f"{loss:.4f}" for _, loss in log["loss"]] == [f"{float(expected[s]):.4f}" for s in range(8)]
    assert {"loss", "tokens_per_second", "peak_bytes", "gradient_norm", "learning_rate"} <= log.keys()
    files = {path.name for path in killed.iterdir()}
    assert {"adapter", "axolotl.yml", "accelerate.yml", "train.jsonl", "checkpoint.pt", "log"} <= files
    same = [(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert same[0] == same[1]

    with pytest.raises(RuntimeError, match="is there already, a finished run"):
        run_command(*command(small_model, pairs, killed))
    assert run_command(*command(small_model, pairs, tmp_path / "new", "--resume", steps=2)), "nothing there: it begins"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "(no rows)"),
        ([{"prompt": "a", "completion": "b " * 200}] * 30, "longer than seq_len=64"),
        ([{"text": "a"}], "`prompt` and `completion` are needed"),
        ([{"prompt": "a", "completion": "b"}] * 5, "held-out rows"),
    ],
)
def test_command_refuses_bad_data(small_model, tmp_path, lines, error):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(RuntimeError, match=f"error: .*{re.escape(error)}"):
        run_command(*command(small_model, path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# --- beside the libraries -------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_trainer_trains_the_same(tmp_path, packed):
    rows = pack_sequences(make_rows(20), length=64) if packed else make_rows()
    run = change(output_dir=str(tmp_path), packing=packed, rows_per_step=4, method="lora")
    turns = []
    ours = list(training_steps(fresh(method="lora"), rows, run=run, pad_token_id=0))
    theirs = hf_trainer(fresh(method="lora"), rows, run=run, pad_token_id=0, turn=lambda: turns.append(1))
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
