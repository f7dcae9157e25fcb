import pytest
import torch
from torch import nn

from recipes_lib.core.ranks import rank, world_size
from recipes_lib.fine_tuning.qlora import apply_qlora, quantized_layers
from recipes_lib.parallel.quantized_shards import (
    apply_quantized_shards,
    weight_of_shards,
)
from recipes_lib.parallel.quantized_shards.nf4_linear import (
    nf4_linear_like,
    nf4_linear_of,
)
from recipes_lib.parallel.quantized_shards.predicted_rank import beside_parts, dry_quantized_rank
from tests.parallel.parity import (
    MAX_NORM,
    TOLERANCE,
    largest_difference,
    own_batches,
    sgd,
    tiny_model,
    train_alone,
    train_on_rank,
)

STEPS = 3


def qlora_model(seed=0, tied=False, vocabulary=256):
    """The same 4-bit base and adapters for the same seed. B is not zero: all of it has effect."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = tiny_model(seed, tie_word_embeddings=tied, vocab_size=vocabulary)
        model = apply_qlora(model, rank=4, compute_dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    return model


def trained_alone(tied=False):
    """bitsandbytes' own layers in one process: the reference."""
    return train_alone(steps=STEPS, make=qlora_model, tied=tied)


# --- functions that run on ranks ------------------------------------------------------------------


def train(tied=False, checkpoint=False, **options):
    model = qlora_model(tied=tied)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = apply_quantized_shards(model, **options)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    return train_on_rank(model, optimizer, STEPS, max_norm=MAX_NORM)


def several(runs):
    return {name: train(**options) for name, options in runs.items()}


def idea_by_hand():
    """The weight of codes and scales of all ranks against the dequantized one; the difference."""
    from bitsandbytes import functional

    torch.manual_seed(0)
    weight = torch.randn(16, 128)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    expected = functional.dequantize_4bit(codes, state)
    rows = slice(rank() * 16 // world_size(), (rank() + 1) * 16 // world_size())
    codes = codes.view(16, 64)[rows].contiguous()
    scales = state.absmax.view(16, 2)[rows].contiguous()
    return (weight_of_shards(codes, scales, state.code) - expected).abs().max().item()


def odd_vocabulary():
    """A vocabulary that the ranks do not divide: loss and gradient of an adapter, three ways."""
    found = []
    for cut in (True, False):
        model = apply_quantized_shards(qlora_model(vocabulary=257), cut_vocabulary=cut)
        [batch] = own_batches(0)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        adapter = next(p for p in model.parameters() if p.requires_grad)
        found.append([loss.item(), adapter.grad.full_tensor().norm().item()])
    return found


# --- the same training ----------------------------------------------------------------------------

RUNS = {
    "plain": {},
    "gathered ends": {"cut_vocabulary": False},
    "offload": {"offload": True},
    "checkpoints": {"checkpoint": True},
    "tied": {"tied": True},
}


def test_two_ranks_train_as_one_process_with_bitsandbytes(two_ranks):
    """The mistake: a layer, a scale or an end that is put together in another order."""
    runs = two_ranks.run(several, runs=RUNS)
    for name, run in runs.items():
        reference = trained_alone(tied=RUNS[name].get("tied", False))
        assert largest_difference(run, reference) < TOLERANCE, name


def test_adapters_in_16_bits_stay_near(two_ranks):
    """The mistake: the fp32 scales of scales are rounded to bf16 on the way."""
    run = two_ranks.run(train, adapter_dtype=torch.bfloat16)
    reference = trained_alone()
    assert run.losses == pytest.approx(reference.losses, rel=0.02)
    assert {tensor.dtype for tensor in run.parameters.values()} == {torch.bfloat16}


def test_a_vocabulary_that_ranks_do_not_divide(two_ranks):
    """The mistake: rows of padding get logits."""
    cut, gathered = two_ranks.run(odd_vocabulary)
    assert cut == pytest.approx(gathered, rel=1e-5)


def test_the_idea(two_ranks):
    """The mistake: the two indices of a byte are swapped."""
    assert two_ranks.run(idea_by_hand) < 1e-6


# --- bytes ----------------------------------------------------------------------------------------


def test_parts_of_a_dry_run():
    """The mistake: a part of the base that is whole on every rank, or a table that is gathered."""
    options = {"rows": 1, "seq": 64, "layers": 1}
    two, four = [dry_quantized_rank("llama-3.1-8b", ranks=ranks, **options) for ranks in (2, 4)]
    assert four.kept == pytest.approx(two.kept / 2, rel=0.01)
    # Beside the parts a table of 128,256 words is never whole.
    assert beside_parts(four) == pytest.approx(beside_parts(two), rel=0.01)
    assert beside_parts(two) < 2 * 128_256 * 4096


# --- layers ---------------------------------------------------------------------------------------


def test_a_packed_layer_is_bitsandbytes_to_the_last_bit():
    """The mistake: another rounding, in fp32, or with a product in bf16."""
    model = qlora_model()
    x = torch.randn(2, 3, 64, requires_grad=True)
    for name, layer in quantized_layers(model).items():
        if layer.in_features != 64:
            continue
        ours = nf4_linear_of(name, layer)
        for dtype in (torch.float32, torch.bfloat16):
            layer.compute_dtype = dtype
            ours.compute_dtype = dtype
            expected = layer(x)
            [wanted] = torch.autograd.grad(expected.square().sum(), x)
            got = ours(x)
            [gradient] = torch.autograd.grad(got.square().sum(), x)
            assert torch.equal(got, expected), name
            assert torch.allclose(gradient, wanted, atol=1e-5, rtol=0.02), name


def test_nobody_keeps_the_weight_for_backward():
    """The mistake: autograd saves the 16-bit weight of every layer."""
    layer = nf4_linear_like(nn.Linear(64, 640))
    saved = []

    def see(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        layer(torch.randn(2, 64, requires_grad=True))
    assert {tensor.dtype for tensor in saved} == {torch.uint8}


def test_layers_that_cannot_be_packed():
    """The mistake: a row shares a scale with the next one, which is on another rank."""
    import bitsandbytes as bnb

    def four_bits(width, **options):
        layer = bnb.nn.Linear4bit(width, 8, bias=False, **options)
        return layer.to("cpu")

    with pytest.raises(ValueError, match="no weight in NF4"):
        nf4_linear_of("layer", four_bits(64, quant_type="nf4", compress_statistics=False))
    with pytest.raises(ValueError, match="share a scale"):
        nf4_linear_of("layer", four_bits(96, quant_type="nf4"))
