import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.decoding import greedy
from recipes_lib.inference.batching import (
    generate_batch,
)
from recipes_lib.inference.decode_loop import apply_decode_loop

LENGTHS = [7, 1, 13, 4, 13]


def ragged_prompts():
    return [torch.randint(0, 128, (length,)).tolist() for length in LENGTHS]


# --- equal to single runs -------------------------------------------------------------------------


def test_rows_end_early_and_the_others_go_on():
    """The mistake: the answer of a row depends on when another one ends."""
    decoder = apply_decode_loop(model_of_shape("tiny-llama", device="cpu"))
    prompts = ragged_prompts()
    whole = [greedy(decoder, prompt, new_tokens=24) for prompt in prompts]
    stop = {whole[0][2], whole[3][9]}
    single = [greedy(decoder, prompt, new_tokens=24, stop=stop) for prompt in prompts]
    assert len({len(answer) for answer in single}) > 1
    assert generate_batch(decoder, prompts, new_tokens=24, stop=stop) == single


def test_prompts_of_one_length_need_no_mask():
    """The mistake: a mask that hides nothing, and takes the fast kernels away."""
    decoder = apply_decode_loop(model_of_shape("tiny-llama", device="cpu"))
    caches = []
    decoder.register_forward_hook(lambda _, args, __: caches.append(args[1]))
    prompts = [[1, 2, 3], torch.tensor([[4, 5, 6]])]
    single = [greedy(decoder, prompt, new_tokens=5) for prompt in prompts]
    assert generate_batch(decoder, prompts, new_tokens=5) == single
    assert caches[-1].batch == 2 and caches[-1].starts is None


# --- the numbers ----------------------------------------------------------------------------------
