import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.decoding import greedy
from recipes_lib.inference.batching import (
    generate_batch,
    left_padded,
    predicted_padding,
    predicted_tokens_per_second,
    throughput_table,
)
from recipes_lib.inference.decode_loop import apply_decode_loop

FAMILIES = ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"]
LENGTHS = [7, 1, 13, 4, 13]


def ragged_prompts():
    return [torch.randint(0, 128, (length,)).tolist() for length in LENGTHS]


# --- equal to single runs -------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_prompts_equal_single_runs(family):
    """Would catch positions that count the padding, and attention that sees it."""
    decoder = apply_decode_loop(model_of_shape(family, device="cpu"))
    prompts = ragged_prompts()
    single = [greedy(decoder, prompt, new_tokens=24) for prompt in prompts]
    assert generate_batch(decoder, prompts, new_tokens=24) == single


def test_equals_generate_of_transformers():
    model = model_of_shape("tiny-llama", device="cpu").eval()
    decoder = apply_decode_loop(model)
    prompts = ragged_prompts()
    tokens, starts = left_padded(prompts)
    mask = (torch.arange(tokens.shape[1]) >= starts[:, None]).long()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    out = model.generate(tokens, attention_mask=mask, **options)  # [B, S + 12]
    expected = out[:, tokens.shape[1] :].tolist()
    assert generate_batch(decoder, prompts, new_tokens=12) == expected


def test_rows_end_early_and_the_others_go_on():
    """The answer of a row must not depend on when another one ends."""
    decoder = apply_decode_loop(model_of_shape("tiny-llama", device="cpu"))
    prompts = ragged_prompts()
    whole = [greedy(decoder, prompt, new_tokens=24) for prompt in prompts]
    stop = {whole[0][2], whole[3][9]}
    single = [greedy(decoder, prompt, new_tokens=24, stop=stop) for prompt in prompts]
    assert len({len(answer) for answer in single}) > 1
    assert generate_batch(decoder, prompts, new_tokens=24, stop=stop) == single


def test_the_batch_ends_with_its_last_row():
    """Steps after that would be computed for nobody."""
    decoder = apply_decode_loop(model_of_shape("tiny-llama", device="cpu"))
    calls = []
    decoder.register_forward_hook(lambda *_: calls.append(1))
    prompts = ragged_prompts()
    everything = range(128)
    assert [len(row) for row in generate_batch(decoder, prompts, new_tokens=9, stop=everything)]
    assert len(calls) == 1


def test_prompts_of_one_length_need_no_mask():
    decoder = apply_decode_loop(model_of_shape("tiny-llama", device="cpu"))
    caches = []
    decoder.register_forward_hook(lambda _, args, __: caches.append(args[1]))
    prompts = [[1, 2, 3], torch.tensor([[4, 5, 6]])]
    single = [greedy(decoder, prompt, new_tokens=5) for prompt in prompts]
    assert generate_batch(decoder, prompts, new_tokens=5) == single
    assert caches[-1].batch == 2 and caches[-1].starts is None


# --- the numbers ----------------------------------------------------------------------------------


def test_throughput_table():
    decoder = apply_decode_loop(model_of_shape("tiny-llama", device="cpu"))
    table = throughput_table(decoder, [1, 4], prompt=[1, 2, 3], steps=2, rounds=3)
    assert [row.batch for row in table] == [1, 4]
    for row in table:
        assert 0 < row.seconds_low <= row.seconds_per_step <= row.seconds_high
        assert row.tokens_per_second == row.batch / row.seconds_per_step


def test_predictions_by_hand():
    """1 GB at 10 GB/s is 0.1 s a step; 2 GFLOP a token at 50 GFLOP/s fill it at 2.5 rows."""
    limits = {"weight_bytes": 1e9, "flops_per_token": 2e9, "bandwidth": 1e10, "rate": 5e10}
    speeds = [predicted_tokens_per_second(batch, **limits) for batch in (1, 2, 4, 8)]
    assert speeds == pytest.approx([10, 20, 25, 25])
    # A cache of 0.5 GB per row is read, too.
    with_cache = predicted_tokens_per_second(2, **limits, cache_bytes_per_row=5e8)
    assert with_cache == pytest.approx(10)
    assert predicted_padding([4, 4]) == 0.0
    assert predicted_padding([1, 2, 9]) == pytest.approx(15 / 27)


def test_bad_input():
    decoder = apply_decode_loop(model_of_shape("tiny-llama", device="cpu"))
    with pytest.raises(ValueError, match="no prompts: give at least one"):
        generate_batch(decoder, [], new_tokens=3)
    with pytest.raises(ValueError, match=r"prompts\[0\] is a single number"):
        generate_batch(decoder, [1, 2, 3], new_tokens=3)
    with pytest.raises(ValueError, match=r"prompts\[1\] holds the id 128"):
        generate_batch(decoder, [[1], [128]], new_tokens=3)
    with pytest.raises(ValueError, match="stop=5: give a collection"):
        generate_batch(decoder, [[1]], new_tokens=3, stop=5)
    with pytest.raises(ValueError, match="NoneType is no decoder"):
        throughput_table(None, [1], prompt=[1])
    with pytest.raises(ValueError, match="sizes=4: give a list"):
        throughput_table(decoder, 4, prompt=[1])
    with pytest.raises(ValueError, match="sizes is empty"):
        throughput_table(decoder, [], prompt=[1])
    with pytest.raises(ValueError, match="at least one token"):
        generate_batch(decoder, [[1], []], new_tokens=3)
    with pytest.raises(ValueError, match="new_tokens=0"):
        generate_batch(decoder, [[1]], new_tokens=0)
    with pytest.raises(ValueError, match="size=0"):
        throughput_table(decoder, [1, 0], prompt=[1])
    with pytest.raises(ValueError, match="at least one prompt"):
        predicted_padding([])


@pytest.mark.gpu
def test_on_gpu():
    decoder = apply_decode_loop(model_of_shape("tiny-llama"))
    prompts = ragged_prompts()
    single = [greedy(decoder, prompt, new_tokens=24) for prompt in prompts]
    assert generate_batch(decoder, prompts, new_tokens=24) == single
