import copy
import math

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from recipes_lib.core.data import IGNORED, evaluate, tokenize_pair
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import answer, load_model, load_tokenizer, model_of_shape
from recipes_lib.fine_tuning.honest_evaluation import (
    Comparison,
    RowLosses,
    compare,
    estimate_held_out_interval,
    generate_answers,
    held_out_losses,
    perplexity,
    rows_needed,
    text_windows,
)
from recipes_lib.fine_tuning.lora import apply_lora

PROMPTS = ["Hi", "def add(a, b):\n    return a + b", "What is the capital of France?", "1 2 3 4"]


def ascii_tokenizer(bos=False):
    """One token per character, 128 in all, as many as the tiny models have; no chat template."""
    vocab = {chr(i): i for i in range(1, 127)} | {"<pad>": 0, "<eos>": 127}
    core = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<eos> $A", special_tokens=[("<eos>", 127)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>"
    )


def make_rows(count=7, vocab=128, prompt=4):
    """Rows of unequal lengths in no order, with unequal numbers of targets."""
    rows = []
    for length in torch.randint(prompt + 1, 30, (count,)).tolist():
        ids = torch.randint(1, vocab, (length,)).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return rows


def drawn_rows(count, *, hard=0.5, generator):
    """Synthetic rows and all their token losses: a row has its own difficulty. The mean over tokens is 3."""
    targets = torch.randint(5, 30, (count,), generator=generator).double()
    difficulty = 3 + hard * torch.randn(count, generator=generator).double()
    tokens = [
        d + torch.randn(int(t), generator=generator).double() for d, t in zip(difficulty, targets)
    ]
    return RowLosses(torch.stack([t.sum() for t in tokens]), targets), torch.cat(tokens)


def shifted(before, *, by, noise, generator):
    """The same rows under a model whose loss differs by `by`, give or take `noise` per row."""
    change = by + noise * torch.randn(len(before.losses), generator=generator).double()
    return RowLosses(before.losses + change * before.targets, before.targets)


def sharpen(model):
    """Large weights in the blocks: the next token depends on all tokens before, and rounding does not decide it."""
    for module in model.modules():
        if (
            isinstance(module, torch.nn.Linear | transformers.pytorch_utils.Conv1D)
            and module is not model.lm_head
        ):
            module.weight.data *= 20
    return model


# --- held-out losses ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_rows_one_at_a_time_and_the_mean_of_evaluate(tiny, batch_size):
    model, rows = sharpen(tiny), make_rows()
    model.lm_head.weight.data *= 30  # logits that reach Gemma 2's soft cap
    found = held_out_losses(model, rows, pad_token_id=0, batch_size=batch_size)
    for row, loss, targets in zip(rows, found.losses, found.targets, strict=True):
        out = model(**{name: torch.tensor([values]) for name, values in row.items()})
        assert targets == len(row["labels"]) - 4
        assert loss.item() == pytest.approx(out.loss.item() * targets.item(), rel=1e-4)
    assert found.mean == pytest.approx(evaluate(model, rows, pad_token_id=0), rel=1e-5)
    assert found.losses.dtype == torch.float64 and found.losses.device.type == "cpu"
    if model.config.model_type == "gemma2":
        assert 15 < out.logits.abs().max() <= model.config.final_logit_softcapping


def test_bf16_adapters_and_models_that_ignore_logits_to_keep(llama, monkeypatch):
    rows = make_rows()
    expected = held_out_losses(llama, rows, pad_token_id=0)
    half = held_out_losses(copy.deepcopy(llama).bfloat16(), rows, pad_token_id=0)
    assert half.mean == pytest.approx(expected.mean, rel=1e-2)
    forward = llama.forward
    monkeypatch.setattr(llama, "forward", lambda logits_to_keep=0, **inputs: forward(**inputs))
    torch.testing.assert_close(held_out_losses(llama, rows, pad_token_id=0).losses, expected.losses)
    monkeypatch.undo()
    adapted = held_out_losses(apply_lora(llama, rank=2), rows, pad_token_id=0)
    torch.testing.assert_close(adapted.losses, expected.losses)


def test_evaluates_without_dropout_or_gradients_and_leaves_every_mode_as_it_was(llama):
    llama.model.layers[0].eval()  # for instance a frozen block
    modes, during = [module.training for module in llama.modules()], set()
    llama.model.layers[1].register_forward_hook(
        lambda m, *_: during.add((m.training, torch.is_grad_enabled()))
    )
    held_out_losses(llama, make_rows(), pad_token_id=0)
    generate_answers(llama, ascii_tokenizer(), ["a"], max_new_tokens=1)
    with pytest.raises(IndexError):  # a token that the model does not have
        held_out_losses(llama, [{"input_ids": [1, 500], "labels": [1, 500]}], pad_token_id=0)
    assert during == {(False, False)}
    assert [module.training for module in llama.modules()] == modes and torch.is_grad_enabled()


def test_long_prompts_do_not_pay_for_the_vocabulary():
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(vocab_size=8192, num_key_value_heads=2, **sizes)
    model, rows = transformers.LlamaForCausalLM(config), make_rows(8, prompt=24)
    peaks = []
    for measured in (evaluate, held_out_losses):
        with PeakMemory() as memory:
            measured(model, rows, pad_token_id=0)
        peaks.append(memory.peak - memory.current)
    assert peaks[1] < 0.3 * peaks[0]


# --- intervals ------------------------------------------------------------------------------------


def test_interval_covers_the_truth_and_one_over_tokens_does_not():
    generator, by_row, by_token = torch.Generator().manual_seed(0), 0, 0
    for seed in range(200):
        rows, tokens = drawn_rows(60, generator=generator)
        low, high = rows.interval(resamples=500, seed=seed)
        by_row += low <= 3 <= high
        by_token += abs(tokens.mean() - 3) <= 1.96 * tokens.std() / len(tokens) ** 0.5
    assert 180 <= by_row <= 198
    assert by_token < 160


def test_interval_is_deterministic_and_grows_with_its_level():
    rows, _ = drawn_rows(50, generator=torch.Generator().manual_seed(0))
    assert rows.interval() == rows.interval() != rows.interval(seed=1)
    (low, high), (lower, higher) = rows.interval(level=0.8), rows.interval(level=0.99)
    assert lower < low < rows.mean < high < higher
    many, _ = drawn_rows(600, generator=torch.Generator().manual_seed(0))
    width = 2 * estimate_held_out_interval(many, rows=600)  # this many rows are resampled in parts
    assert math.dist(many.interval(), (many.mean - width / 2, many.mean + width / 2)) < 0.15 * width


def test_paired_interval_sees_what_two_intervals_do_not():
    generator = torch.Generator().manual_seed(0)
    before, _ = drawn_rows(64, generator=generator)
    after = shifted(before, by=-0.1, noise=0.1, generator=generator)
    assert before.interval()[0] < after.interval()[1]  # they overlap
    result = compare(before, after)
    assert str(result).endswith("better") and str(compare(after, before)).endswith("worse")
    assert result.difference == pytest.approx(after.mean - before.mean)
    low, high = before.interval()
    assert (
        str(before) == f"{before.mean:.2f} nats per token (95 % interval {low:.2f} to {high:.2f})"
    )
    assert result.high - result.low < (high - low) / 3
    nothing = compare(before, shifted(before, by=0.0, noise=0.1, generator=generator))
    assert nothing.low < 0 < nothing.high and "no difference" in str(nothing)


def test_verdicts_as_text():
    better = Comparison(-0.9183, -1.0467, -0.8, 0.95)
    assert str(better) == "-0.918 nats per token (95 % interval -1.05 to -0.800): better"
    worse = Comparison(0.002, 0.0004, 0.0031, 0.99)
    assert str(worse) == "+0.00200 nats per token (99 % interval +0.000400 to +0.00310): worse"
    assert str(Comparison(0.0, 0.0, 0.0, 0.95)).endswith(
        "): no difference that this many rows can show"
    )


@pytest.mark.parametrize("count", [100, 300])
def test_estimate_is_the_width_of_the_bootstrap(count, llama):
    generator = torch.Generator().manual_seed(count)
    synthetic, real = (
        drawn_rows(count, generator=generator)[0],
        held_out_losses(llama, make_rows(count), pad_token_id=0),
    )
    for rows in (synthetic, real, shifted(real, by=0.1, noise=0.3, generator=generator)):
        low, high = rows.interval()
        assert estimate_held_out_interval(rows, rows=count) == pytest.approx(
            (high - low) / 2, rel=0.15
        )


def test_a_pilot_says_how_many_rows_a_difference_needs():
    generator = torch.Generator().manual_seed(0)
    pilot, _ = drawn_rows(400, generator=generator)
    paired = shifted(pilot, by=-0.1, noise=0.3, generator=generator) - pilot
    count = rows_needed(paired, difference=-0.1)
    seen = 0
    for seed in range(200):
        before, _ = drawn_rows(count, generator=generator)
        result = compare(
            before,
            shifted(before, by=-0.1, noise=0.3, generator=generator),
            resamples=400,
            seed=seed,
        )
        seen += result.high < 0
    assert 140 <= seen <= 180  # 80 %
    wide = rows_needed(paired, difference=0.1, power=0.5)
    assert wide < count and estimate_held_out_interval(paired, rows=wide) == pytest.approx(
        0.1, rel=0.02
    )
    assert rows_needed(paired, difference=0.01) == pytest.approx(100 * count, rel=0.02)
    assert rows_needed(pilot, difference=0.1) > 2 * count  # unpaired, even of one model only


# --- forgetting -----------------------------------------------------------------------------------


def test_windows_are_even_and_do_not_overlap():
    text = "".join(chr(32 + i * i % 91) for i in range(1003))
    rows = text_windows(ascii_tokenizer(), text=text, context=40, windows=5)
    decoded = [ascii_tokenizer().decode(row["input_ids"]) for row in rows]
    assert decoded == [text[start : start + 40] for start in (0, 200, 400, 600, 800)]
    assert all(row["labels"] == row["input_ids"] for row in rows)
    with_bos = text_windows(ascii_tokenizer(bos=True), text=text, context=40, windows=5)
    assert [row["input_ids"] for row in with_bos] == [[127, *row["input_ids"][:39]] for row in rows]


def test_perplexity(tiny):
    text, tokenizer = "The quick brown fox jumps over the lazy dog. " * 20, ascii_tokenizer()
    rows = text_windows(tokenizer, text=text, context=32, windows=4)
    expected = math.exp(evaluate(tiny, rows, pad_token_id=0))
    assert perplexity(tiny, tokenizer, text=text, context=32, windows=4) == pytest.approx(
        expected, rel=1e-4
    )
    tiny.get_output_embeddings().weight.data.zero_()  # knows nothing: every one of the 128 tokens is as likely
    assert perplexity(tiny, tokenizer, text=text, context=32, windows=4) == pytest.approx(
        128, rel=1e-4
    )


# --- answers --------------------------------------------------------------------------------------


@torch.no_grad()
def plain_answer(model, tokenizer, text, *, steps, eos=None):
    """Greedy search without padding, cache or `generate`."""
    ids = tokenizer(text)["input_ids"]
    start = len(ids)
    for _ in range(steps):
        ids = [
            *ids,
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item(),
        ]
        if ids[-1] == eos:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True).strip()


@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_answers_in_batches_equal_plain_greedy_search(tiny, batch_size):
    model, tokenizer = sharpen(tiny), ascii_tokenizer()
    expected = [plain_answer(model, tokenizer, f"{prompt}\n\n", steps=8) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS)
    assert (
        generate_answers(model, tokenizer, PROMPTS, max_new_tokens=8, batch_size=batch_size)
        == expected
    )
    assert tokenizer.padding_side == "right"


def test_answers_end_at_the_end_mark_whatever_the_generation_config_says(llama):
    """One answer of the batch ends early; sampling and penalties of the model's own configuration are off."""
    model, tokenizer = sharpen(llama), ascii_tokenizer()
    free = generate_answers(model, tokenizer, PROMPTS, max_new_tokens=12)
    eos = ord(free[1][3])
    options = {
        "do_sample": True,
        "repetition_penalty": 3.0,
        "no_repeat_ngram_size": 1,
        "eos_token_id": eos,
    }
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    expected = [
        plain_answer(model, tokenizer, f"{prompt}\n\n", steps=12, eos=eos) for prompt in PROMPTS
    ]
    assert generate_answers(model, tokenizer, PROMPTS, max_new_tokens=12) == expected
    assert len(set(map(len, expected))) > 1


def test_prompts_are_questions_or_rows_with_and_without_a_template(llama):
    model, tokenizer = apply_lora(sharpen(llama), rank=2), ascii_tokenizer()
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    answers = []
    for tokenizer.chat_template in (None, template):
        answers.append(generate_answers(model, tokenizer, PROMPTS, max_new_tokens=8))
        rows = [tokenize_pair(tokenizer, prompt, "an answer") for prompt in PROMPTS]
        assert generate_answers(model, tokenizer, rows, max_new_tokens=8) == answers[-1]
        assert (
            generate_answers(model, tokenizer, PROMPTS[1], max_new_tokens=8) == answers[-1][1:2]
        )  # a string is one
    expected = [
        plain_answer(model, tokenizer, f"<user>{prompt}<assistant>", steps=8) for prompt in PROMPTS
    ]
    assert answers[1] == expected != answers[0]


def test_a_real_model_answers_as_one_at_a_time():
    model, tokenizer = load_model(device="cpu"), load_tokenizer()
    expected = [answer(model, tokenizer, prompt, max_new_tokens=8) for prompt in PROMPTS[:3]]
    assert generate_answers(model, tokenizer, PROMPTS[:3], max_new_tokens=8) == expected
    assert "Paris" in expected[2]


# --- bad input ------------------------------------------------------------------------------------


def test_rows_that_cannot_be_evaluated(llama):
    rows = make_rows(3)
    first_only = {"input_ids": [1, 2], "labels": [1, IGNORED]}  # nothing predicts a first token
    for data, batch_size in (([], 8), (rows, 0), ([*rows, first_only], 8)):
        with pytest.raises(ValueError, match="have no target"):
            held_out_losses(llama, data, pad_token_id=0, batch_size=batch_size)
    llama.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="diverged"):
        held_out_losses(llama, rows, pad_token_id=0)


def test_intervals_that_cannot_be_given():
    rows = RowLosses(torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([1.0, 2.0, 2.0]).double())
    one = RowLosses(rows.losses[:1], rows.targets[:1])
    for call in (
        one.interval,
        lambda: rows.interval(level=95),
        lambda: rows.interval(resamples=10),
    ):
        with pytest.raises(ValueError, match="give >= 2"):
            call()
    with pytest.raises(ValueError, match="give >= 2"):
        compare(one, one)
    for other in (one, RowLosses(rows.losses, rows.targets.flip(0))):
        with pytest.raises(ValueError, match="give the same rows"):
            compare(rows, other)
    with pytest.raises(ValueError, match="a pilot of 1 rows"):
        estimate_held_out_interval(one, rows=10)
    with pytest.raises(ValueError, match="rows=0"):
        estimate_held_out_interval(rows, rows=0)
    for wrong in (
        {"difference": 0.0},
        {"difference": 0.1, "power": 1.0},
        {"difference": 0.1, "power": 0.3},
    ):
        with pytest.raises(ValueError, match="difference other than 0"):
            rows_needed(rows, **wrong)


def test_text_and_prompts_that_do_not_do(llama):
    tokenizer = ascii_tokenizer()
    for wrong in (
        {"text": "short"},
        {"text": ""},
        {"windows": 0},
        {"context": 1},
        {"windows": 500},
    ):
        with pytest.raises(ValueError, match="give more text"):
            perplexity(
                llama, tokenizer, **({"text": "text " * 100, "context": 32, "windows": 4} | wrong)
            )
    no_question = {"input_ids": [5, 6], "labels": [5, 6]}
    for prompts, wrong in (
        ([], {}),
        ([no_question], {}),
        (["a"], {"max_new_tokens": 0}),
        (["a"], {"batch_size": 0}),
    ):
        with pytest.raises(ValueError, match="give questions"):
            generate_answers(llama, tokenizer, prompts, **wrong)
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="pad_token"):
        generate_answers(llama, tokenizer, ["a"])


@pytest.mark.gpu
def test_on_gpu():
    model, rows, tokenizer = (
        sharpen(model_of_shape("tiny-llama", device="cpu")),
        make_rows(),
        ascii_tokenizer(),
    )
    expected = held_out_losses(model, rows, pad_token_id=0)
    answers = generate_answers(model, tokenizer, PROMPTS, max_new_tokens=8)
    model.cuda()
    torch.testing.assert_close(
        held_out_losses(model, rows, pad_token_id=0).losses, expected.losses, rtol=1e-3, atol=1e-3
    )
    assert generate_answers(model, tokenizer, PROMPTS, max_new_tokens=8) == answers
