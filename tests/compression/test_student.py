"""Students computed beside their teachers, whose other parts are silent."""

import pytest
import torch
import transformers

from recipes_lib.compression.student import (
    block_influence,
    choose_blocks,
    make_student,
    plain_influence,
    plain_student,
)
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.precision.int8 import apply_int8
from tests.small_models import as_if_trained, small_model

WINDOWS = {"head_dim": 8, "sliding_window": 4, "attn_implementation": "eager"}
FAMILIES = {
    "Llama": {"tie_word_embeddings": True},
    "Gemma2": WINDOWS,  # every second block has a window
    "GPT2": {},
}
IDS = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(1))
KEPT = [0, 1, 3, 5]


def teacher_of(family, **options):
    torch.manual_seed(0)
    settings = {"num_hidden_layers": 6} | FAMILIES.get(family, {}) | options
    return as_if_trained(small_model(family, **settings))


@torch.no_grad()
def logits_of(model, ids=IDS):
    return model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def logits_without(model, blocks):
    """Of the teacher, whose other blocks return what they get. Nothing is rebuilt for it."""

    def skip(block, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handles = []
    for number, block in enumerate(decoder_blocks(model)):
        if number not in blocks:
            handles.append(block.register_forward_hook(skip, with_kwargs=True))
    logits = logits_of(model)
    for handle in handles:
        handle.remove()
    return logits


# --- the student ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_is_its_teacher_without_the_parts(family, tmp_path):
    """The mistakes: windows at other blocks, and a file that loads as another model."""
    teacher = teacher_of(family)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    student = make_student(teacher, blocks=KEPT)
    expected = logits_without(teacher, KEPT)
    torch.testing.assert_close(logits_of(student), expected, atol=1e-5, rtol=1e-5)

    student.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(loaded), expected, atol=1e-5, rtol=1e-5)
    student.train()(input_ids=IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_a_student_generates_with_its_cache_as_without():
    """The mistake: blocks with the teacher's numbers look for their keys in the wrong place."""
    student = make_student(teacher_of("Llama"), blocks=[2, 3, 5])
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    cached = student.generate(IDS[:1], use_cache=True, **options)
    torch.testing.assert_close(cached, student.generate(IDS[:1], use_cache=False, **options))


def test_the_idea_is_the_technique():
    """The mistake: the plain lines in the notebook make another model."""
    teacher = teacher_of("Llama")
    plain = plain_student(teacher, KEPT)
    student = make_student(teacher, blocks=KEPT)
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    torch.testing.assert_close(logits_of(plain), logits_of(student))
    assert torch.equal(plain.generate(IDS, **options), student.generate(IDS, **options))
    assert len(teacher.model.layers) == teacher.config.num_hidden_layers == 6


def test_a_student_is_like_its_teacher():
    """The mistakes: another dtype, mode or attention; a random stream that has moved."""
    teacher = teacher_of("Llama").bfloat16().train()
    teacher.set_attn_implementation("eager")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    student = make_student(teacher, blocks=range(6))
    assert torch.equal(torch.rand(3), expected)
    assert student.training
    assert student.config._attn_implementation == "eager"
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight
    assert student.dtype == torch.bfloat16
    weights = teacher.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in student.state_dict().items())


# --- what is measured -----------------------------------------------------------------------------


def test_influence_is_that_of_the_formula():
    """The mistake: the last block is measured behind the final norm."""
    teacher = teacher_of("Llama")
    states = [teacher.get_input_embeddings()(IDS)]
    with torch.no_grad():
        for block in decoder_blocks(teacher):
            block.register_forward_hook(lambda _m, _i, out: states.append(out))
        teacher(IDS)
    expected = plain_influence(states)
    batches = [{"input_ids": IDS}, {"input_ids": IDS.flip(0)}]
    assert block_influence(teacher, batches) == pytest.approx(expected, abs=1e-6)


def test_blocks_are_chosen():
    """The mistake: numbers that are not in rising order."""
    assert choose_blocks([0.9, 0.2, 0.1, 0.3, 0.1, 0.2, 0.05, 0.4], keep=3) == [0, 3, 7]


# --- what is refused ------------------------------------------------------------------------------


def test_refuses_blocks_that_depend_on_their_number():
    """GPT-2 may divide its scores by the number of the block: moved blocks would compute otherwise,
    without a word. Blocks that stay where they are, are fine."""
    teacher = teacher_of("GPT2", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(ValueError, match=r"block 3 of GPT2LMHeadModel.*scaling"):
        make_student(teacher, blocks=[0, 1, 3])
    make_student(teacher, blocks=[0, 1, 2])


def test_refuses_what_transformers_cannot_make():
    """The mistake: a student whose weights are whole numbers."""
    with pytest.raises(ValueError, match="makes no such student"):
        make_student(apply_int8(teacher_of("Llama")), blocks=KEPT)
    teacher = teacher_of("Llama")
    teacher.config.num_kv_shared_layers = 2
    with pytest.raises(ValueError, match="share keys and values"):
        make_student(teacher, blocks=KEPT)
