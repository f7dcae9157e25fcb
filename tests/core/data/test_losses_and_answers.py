"""What a model does on rows that it did not train on: losses, perplexity and answers."""

import math

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from recipes_lib.core.data.losses_and_answers import (
    decode_quality,
    evaluate,
    generate_answers,
    row_losses,
    text_windows,
)
from recipes_lib.core.data.tokens_and_labels import IGNORED, tokenize_pair
from recipes_lib.core.model import model_of_shape
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.inference.decode_loop import apply_decode_loop

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


def sharpen(model):
    """Large weights: the next token depends on all before it, and rounding does not decide it."""
    linear = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    for module in model.modules():
        if isinstance(module, linear) and module is not model.lm_head:
            module.weight.data *= 20
    return model


# --- losses -------------------------------------------------------------------------------------


def test_each_row_has_its_own_loss_and_evaluate_is_their_mean(monkeypatch):
    """The mistakes: a mean of means, places mixed up by sorting, a soft cap that is left out."""
    model = sharpen(model_of_shape("tiny-gemma2", device="cpu"))
    model.lm_head.weight.data *= 30  # logits that reach the soft cap
    rows = make_rows()
    losses, targets = row_losses(model, rows, pad_token_id=0, batch_size=3)
    for row, loss, count in zip(rows, losses, targets, strict=True):
        out = model(**{name: torch.tensor([values]) for name, values in row.items()})
        assert count == len(row["labels"]) - 4
        assert loss.item() == pytest.approx(out.loss.item() * count.item(), rel=1e-4)
    assert 15 < out.logits.abs().max() <= model.config.final_logit_softcapping
    silent = {"input_ids": [1, 2], "labels": [IGNORED, IGNORED]}
    mean = evaluate(model, [silent, *rows], pad_token_id=0, batch_size=2)
    assert mean == pytest.approx((losses.sum() / targets.sum()).item(), rel=1e-5)
    # A model may ignore `logits_to_keep` and return all logits.
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda logits_to_keep=0, **inputs: forward(**inputs))
    ignored, _ = row_losses(model, rows, pad_token_id=0)
    torch.testing.assert_close(ignored, losses)


def test_no_dropout_no_gradients_and_every_mode_as_it_was(llama):
    llama.model.layers[0].eval()  # for instance a frozen block
    modes = [module.training for module in llama.modules()]
    during = set()
    llama.model.layers[1].register_forward_hook(
        lambda module, *_: during.add((module.training, torch.is_grad_enabled()))
    )
    evaluate(llama, make_rows(), pad_token_id=0)
    generate_answers(llama, ascii_tokenizer(), ["a"], max_new_tokens=1)
    with pytest.raises(IndexError):  # a token that the model does not have
        row_losses(llama, [{"input_ids": [1, 500], "labels": [1, 500]}], pad_token_id=0)
    assert during == {(False, False)}
    assert [module.training for module in llama.modules()] == modes
    assert torch.is_grad_enabled()


# --- running text -------------------------------------------------------------------------------


def test_windows_are_even_and_do_not_overlap():
    text = "".join(chr(32 + i * i % 91) for i in range(1003))
    rows = text_windows(ascii_tokenizer(), text=text, context=40, windows=5)
    decoded = [ascii_tokenizer().decode(row["input_ids"]) for row in rows]
    assert decoded == [text[start : start + 40] for start in (0, 200, 400, 600, 800)]
    assert all(row["labels"] == row["input_ids"] for row in rows)
    with_bos = text_windows(ascii_tokenizer(bos=True), text=text, context=40, windows=5)
    assert [row["input_ids"] for row in with_bos] == [[127, *row["input_ids"][:39]] for row in rows]
    with pytest.raises(ValueError, match="give more text"):  # it would be another perplexity
        text_windows(ascii_tokenizer(), text=text, context=40, windows=500)


# --- answers ------------------------------------------------------------------------------------


@torch.no_grad()
def plain_answer(model, tokenizer, text, *, steps, eos=None):
    """Greedy search without padding, cache or `generate`."""
    ids = tokenizer(text)["input_ids"]
    start = len(ids)
    for _ in range(steps):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids = [*ids, logits[0, -1].argmax().item()]
        if ids[-1] == eos:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True).strip()


def plain_answers(model, tokenizer, **options):
    """Without a chat template, an empty line ends the question."""
    return [plain_answer(model, tokenizer, f"{prompt}\n\n", **options) for prompt in PROMPTS]


def test_answers_in_batches_equal_plain_greedy_search():
    """GPT-2 has a position for each place: the padding on the left must not take any."""
    model = sharpen(model_of_shape("tiny-gpt2", device="cpu"))
    tokenizer = ascii_tokenizer()
    expected = plain_answers(model, tokenizer, steps=6)
    assert len(set(expected)) == len(PROMPTS)
    found = generate_answers(model, tokenizer, PROMPTS, max_new_tokens=6, batch_size=3)
    assert found == expected
    assert tokenizer.padding_side == "right"


def test_answers_end_at_the_end_mark_whatever_the_generation_config_says(llama):
    """One answer of the batch ends early; sampling and penalties of the model's own are off."""
    model = sharpen(llama)
    tokenizer = ascii_tokenizer()
    free = generate_answers(model, tokenizer, PROMPTS, max_new_tokens=12)
    eos = ord(free[1][3])
    model.generation_config.do_sample = True
    model.generation_config.repetition_penalty = 3.0
    model.generation_config.no_repeat_ngram_size = 1
    model.generation_config.eos_token_id = eos
    expected = plain_answers(model, tokenizer, steps=12, eos=eos)
    assert generate_answers(model, tokenizer, PROMPTS, max_new_tokens=12) == expected
    assert len(set(map(len, expected))) > 1


def test_prompts_are_questions_or_rows_with_and_without_a_template(llama):
    model = apply_lora(sharpen(llama), rank=2)
    tokenizer = ascii_tokenizer()
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    answers = []
    for tokenizer.chat_template in (None, template):
        found = generate_answers(model, tokenizer, PROMPTS, max_new_tokens=8)
        rows = [tokenize_pair(tokenizer, prompt, "an answer") for prompt in PROMPTS]
        assert generate_answers(model, tokenizer, rows, max_new_tokens=8) == found
        for alone in (PROMPTS[1], rows[1]):  # one prompt, and not its letters or its keys
            assert generate_answers(model, tokenizer, alone, max_new_tokens=8) == found[1:2]
        answers.append(found)
    expected = [
        plain_answer(model, tokenizer, f"<user>{prompt}<assistant>", steps=8) for prompt in PROMPTS
    ]
    assert answers[1] == expected != answers[0]


# --- other weights or kernels ---------------------------------------------------------------------

DOCUMENTS = [[3, 1, 4, 1, 5, 9, 2, 6], torch.tensor([2, 7, 1])]


def quality_by_hand(model):
    losses, predictions = [], []
    for document in DOCUMENTS:
        row = torch.as_tensor(document)[None]
        with torch.no_grad():
            logits = model.eval()(row).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none"))
        predictions.append(logits.argmax(-1))
    return math.exp(torch.cat(losses).mean()), torch.cat(predictions)


def test_quality_of_a_model_and_of_its_decoder():
    """The mistake: a mean of means, which would weigh the short document more."""
    model = model_of_shape("tiny-qwen3", device="cpu")
    perplexity, predictions = quality_by_hand(model)
    decoder = apply_decode_loop(model)
    found = [decode_quality(model.train(), DOCUMENTS), decode_quality(decoder, DOCUMENTS)]
    found.append(decode_quality(decoder, DOCUMENTS, token_by_token=True))
    for quality in found:
        assert quality.perplexity == pytest.approx(perplexity, rel=1e-5)
        assert torch.equal(quality.predictions, predictions)
        assert (quality.tokens, quality.agreement) == (9, None)
    assert model.training
    reference = predictions.clone()
    reference[:3] += 1
    assert decode_quality(model, DOCUMENTS, reference=reference).agreement == 6 / 9


def test_a_quality_that_would_be_another_one_is_refused(llama):
    """The mistake: all tokens at once in place of one by one, and a NaN that compares as equal."""
    with pytest.raises(ValueError, match="is no decoder"):
        decode_quality(llama, DOCUMENTS, token_by_token=True)
    with pytest.raises(ValueError, match=r"documents\[0\] has 2049 tokens, .* 2048 positions"):
        decode_quality(llama, [[1] * 2049])
    llama.lm_head.weight.data[5] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        decode_quality(llama, DOCUMENTS)


# --- bad input ----------------------------------------------------------------------------------


def test_a_prompt_without_a_question_is_refused(llama):
    """The mistake: an answer to padding alone."""
    row = {"input_ids": [5, 6], "labels": [5, 6]}
    with pytest.raises(ValueError, match=r"prompts \[1\] are empty"):
        generate_answers(llama, ascii_tokenizer(), ["a", row])


def test_rows_that_cannot_be_evaluated(llama):
    rows = make_rows(3)
    with pytest.raises(ValueError, match="rows=0"):
        row_losses(llama, [], pad_token_id=0)
    first_only = {"input_ids": [1, 2], "labels": [1, IGNORED]}  # nothing predicts a first token
    with pytest.raises(ValueError, match=r"rows \[3\] have no target"):
        row_losses(llama, [*rows, first_only], pad_token_id=0)
    with pytest.raises(ValueError, match="no row has a target"):
        evaluate(llama, [first_only], pad_token_id=0)
    llama.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="diverged"):
        row_losses(llama, rows, pad_token_id=0)
