import copy

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch._dynamo.utils import counters

from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.mixins import take_out
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import (
    Checkpointed,
    apply_activation_checkpointing,
)
from recipes_lib.training import compiled_blocks
from recipes_lib.training.compiled_blocks import (
    Compiled,
    apply_compiled_blocks,
    break_even_steps,
    can_compile,
    compile_seconds,
    compiled_by_hand,
)
from tests.conftest import assert_equal, assert_near, make_batch, run
from tests.small_models import train_a_little

BATCH, SEQ = 4, 24
IN_FP32 = 1e-5  # relative, in the Euclidean norm: sums in another order
IN_BF16 = 0.03  # a product that is not rounded to bf16 in between is another number


def batch_of(rows=BATCH, seq=SEQ):
    """Whole rows, no padding. Compiling takes seconds, so most tests use one shape."""
    ids = torch.randint(1, 128, (rows, seq))
    return {"input_ids": ids, "labels": ids}


def graphs():
    """How many graphs were compiled so far."""
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def graphs_only(monkeypatch):
    """Graphs are made and run as they are: enough to count them."""
    compiled_blocks._compile_once.cache_clear()
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    yield
    compiled_blocks._compile_once.cache_clear()


def record_compiled(model):
    """A list of the blocks that run compiled code, from here on."""
    runs = []
    for block in decoder_blocks(model):
        compiled = block.compiled_forward

        def recorded(block, *args, compiled=compiled, **kwargs):
            runs.append(block)
            return compiled(block, *args, **kwargs)

        block.compiled_forward = recorded
    return runs


# --- the same training ----------------------------------------------------------------------------


def test_near_the_plain_model_in_one_graph():
    """The mistake: a block that is skipped or runs another one's weights, or a graph per block."""
    model = model_of_shape("tiny-llama", device="cpu")
    by_hand = copy.deepcopy(model)
    batch = batch_of()
    expected = run(model, batch)
    before = graphs()
    seconds = compile_seconds()
    apply_compiled_blocks(model)
    got = run(model, batch)
    assert graphs() == before + 1, "all blocks share one graph"
    after = compile_seconds()
    assert after > seconds
    assert_near(got, expected, IN_FP32)
    assert any(not torch.equal(got[name], expected[name]) for name in got), "it did compile"
    assert_equal(run(model, batch), got)
    assert compile_seconds() == after, "the seconds of compiling alone"
    assert_equal(run(apply_activation_checkpointing(model), batch), got)  # repeats its code
    take_out(model, Checkpointed)
    assert_equal(run(take_out(model, Compiled), batch), expected)
    assert_equal(run(compiled_by_hand(by_hand), batch), got)


def test_adapters_in_one_graph(graphs_only):
    """The mistake: the first block's input needs no gradient, and costs a second graph."""
    model = apply_lora(model_of_shape("tiny-llama", layers=3, device="cpu"), rank=4)
    train_a_little(model, std=0.1)
    batch = batch_of()
    expected = run(model, batch)
    before = graphs()
    got = run(apply_compiled_blocks(model), batch)
    assert graphs() == before + 1
    assert_near(got, expected, IN_FP32)


@pytest.mark.parametrize(("family", "padded"), [("tiny-gemma2", False), ("tiny-gpt2", True)])
def test_masks_and_positions_of_each_family(graphs_only, family, padded):
    """The mistake: one graph for layers of two kinds, or a mask by position that is dropped."""
    tiny = model_of_shape(family, device="cpu")
    batch = make_batch() if padded else batch_of()
    expected = run(tiny, batch)
    assert_near(run(apply_compiled_blocks(tiny), batch), expected, IN_FP32)


def test_each_block_unpacks_its_own_four_bits(graphs_only):
    """The mistake: scales are constants of the graph, those of block 0."""
    pytest.importorskip("bitsandbytes")
    model = model_of_shape("tiny-llama", layers=3, device="cpu")
    with torch.no_grad():
        for number, parameter in enumerate(decoder_blocks(model).parameters(), 1):
            parameter.mul_(1 + number / 10)
    model = apply_qlora(model, rank=4, compute_dtype=torch.float32)
    train_a_little(model, std=0.1)
    batch = batch_of()
    expected = run(model, batch)
    # Sums of unpacked weights differ by more; scales of another block by a tenth and more.
    assert_near(run(apply_compiled_blocks(model), batch), expected, 10 * IN_FP32)


def test_other_shapes_take_one_more_graph(graphs_only):
    """The mistake: a graph for each length, so that a run compiles all the time."""
    model = apply_compiled_blocks(model_of_shape("tiny-gpt2", device="cpu"))
    plain = take_out(copy.deepcopy(model), Compiled)
    before = graphs()
    for seq in (16, 23, 31, 40):
        batch = batch_of(seq=seq)
        assert_near(run(model, batch), run(plain, batch), IN_FP32)
    assert graphs() <= before + 2


def test_beyond_the_limit_of_graphs_is_an_error(monkeypatch, graphs_only, llama):
    """The mistake: PyTorch runs what needs another graph as it is, and logs a line."""
    monkeypatch.setattr(compiled_blocks, "MOST_GRAPHS", 1)
    apply_compiled_blocks(llama, dynamic=False)
    run(llama, batch_of())
    with pytest.raises(FailOnRecompileLimitHit):
        run(llama, batch_of(seq=5))


def test_the_checkpoints_of_hugging_face_are_around_the_graph(graphs_only, llama):
    """The mistake: a checkpoint inside of the graph, which is compiled away."""
    batch = batch_of()
    expected = run(llama, batch)
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    apply_compiled_blocks(llama)
    runs = record_compiled(llama)
    assert_near(run(llama, batch), expected, IN_FP32)
    first, second = decoder_blocks(llama)
    assert runs == [first, second, second, first]


# --- where it stays out of the way ----------------------------------------------------------------


def test_what_does_not_train_is_not_compiled(llama):
    """The mistake: a graph for each length of a text that is generated."""
    batch = batch_of()
    plain = copy.deepcopy(llama)
    apply_compiled_blocks(llama)
    runs = record_compiled(llama)
    with torch.no_grad():
        assert llama(**batch).loss == plain(**batch).loss
    assert_equal(run(llama.eval(), batch), run(plain.eval(), batch))
    ids = batch["input_ids"][:1, :5]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(llama.generate(ids, **options), plain.generate(ids, **options))
    assert runs == []


def test_a_cache_in_training_is_filled_and_said_so(llama):
    """The mistake: dropped in silence, and the next forward does not know the tokens before."""
    apply_compiled_blocks(llama)
    runs = record_compiled(llama)
    compiled_blocks._warn_of_cache.cache_clear()
    with pytest.warns(UserWarning, match="use_cache=False"):
        cache = llama(**batch_of(), use_cache=True).past_key_values
    assert cache.get_seq_length() == SEQ and runs == []


# --- what it refuses ------------------------------------------------------------------------------


def test_the_order_of_recipes(llama):
    """The mistake: a checkpoint that is compiled away."""
    apply_activation_checkpointing(llama)
    with pytest.raises(ValueError, match="compile the blocks, then"):
        apply_compiled_blocks(llama)


def test_without_a_compiler_nothing_changes(monkeypatch, llama):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none_found():
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    assert not can_compile("cpu")
    block_class = type(decoder_blocks(llama)[0])
    with pytest.raises(ValueError, match=r"apt install g\+\+"):
        apply_compiled_blocks(llama)
    assert type(decoder_blocks(llama)[0]) is block_class


def test_a_block_that_is_not_one_graph_is_an_error(monkeypatch, graphs_only, llama):
    """The mistake: PyTorch runs it in pieces, or as it is, and says nothing."""
    mlp = type(decoder_blocks(llama)[0].mlp)
    plain = mlp.forward

    def looks_at_a_value(self, hidden):
        scale = 1
        if hidden.sum() > 0:
            scale = 2
        return scale * plain(self, hidden)

    monkeypatch.setattr(mlp, "forward", looks_at_a_value)
    apply_compiled_blocks(llama)
    with pytest.raises(Unsupported):
        run(llama, batch_of())


# --- the arithmetic -------------------------------------------------------------------------------


def test_break_even():
    assert break_even_steps(compile_seconds=8, plain_step=2.0, compiled_step=1.5) == 16
    assert break_even_steps(compile_seconds=8, plain_step=2.0, compiled_step=2.0) is None


@pytest.mark.gpu
def test_near_the_plain_model_on_gpu():
    model = model_of_shape("tiny-llama", layers=3, device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch(16, 64).items()}
    with torch.autocast("cuda", machine().compute_dtype):
        expected = run(model, batch)
        compiled = run(apply_compiled_blocks(model), batch)
        again = run(apply_activation_checkpointing(model), batch)
    assert_near(compiled, expected, IN_BF16)
    assert_near(again, expected, IN_BF16)
