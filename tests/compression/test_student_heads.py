"""Attention heads that go: the rest computes the same, in every family whose heads are known."""

import copy

import pytest
import torch
import transformers

from recipes_lib.compression.student import make_student, predicted_parameters
from recipes_lib.compression.student.heads import (
    attention_of,
    choose_heads,
    head_importance,
    plain_head_importance,
)
from recipes_lib.core.model.causal_lm import decoder_blocks
from tests.families.configs import tiny_model
from tests.small_models import IDS, as_if_trained, small_model

# Four groups of two heads of queries, eight features each.
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 4}
FAMILIES = {
    "Llama": GROUPED | {"attention_bias": True},
    "Qwen2": GROUPED,  # biases of queries, keys and values
    "Qwen3": GROUPED | {"head_dim": 8},  # norms of queries and keys
    "Gemma2": GROUPED | {"head_dim": 8, "sliding_window": 4, "attn_implementation": "eager"},
    "Phi3": GROUPED,  # queries, keys and values in one layer
    "Phi": {"num_attention_heads": 4, "num_key_value_heads": 4},  # no groups
}


def teacher_of(family, **options):
    torch.manual_seed(0)
    model = small_model(family, **FAMILIES.get(family, {}) | options)
    return as_if_trained(model)


@torch.no_grad()
def logits_of(model, ids=IDS):
    return model(input_ids=ids, use_cache=False).logits


def reader_of(block):
    """The layer that reads the outputs of all heads."""
    return getattr(block.self_attn, "o_proj", None) or block.self_attn.dense


@torch.no_grad()
def without_heads(model, kept, *, groups=4):
    """The model whose other heads add nothing: what reads them has zeros as weights."""
    silent = copy.deepcopy(model)
    for block, groups_kept in zip(decoder_blocks(silent), kept):
        weight = reader_of(block).weight
        width = weight.shape[1] // groups
        for group in set(range(groups)) - set(groups_kept.tolist()):
            weight[:, group * width : (group + 1) * width] = 0
    return silent


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_is_its_teacher_without_heads(family, tmp_path):
    """Catches keys of another group, biases left over, heads that get wider, and a file that loads
    as another model."""
    teacher = teacher_of(family)
    kept = [torch.tensor([0, 3]), torch.tensor([1, 2])]
    student = make_student(teacher, heads=kept)
    expected = logits_of(without_heads(teacher, kept))
    assert not torch.allclose(expected, logits_of(teacher), atol=1e-3)
    torch.testing.assert_close(logits_of(student), expected, atol=1e-5, rtol=1e-5)
    assert student.num_parameters() == predicted_parameters(teacher, heads=2)
    cache = student(input_ids=IDS, use_cache=True).past_key_values
    assert cache.layers[0].keys.shape[1] == 2, "half of the keys are kept"

    student.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(loaded), expected, atol=1e-5, rtol=1e-5)


def test_blocks_channels_and_heads_at_once():
    """The groups of a block go with the block, and not with its new number."""
    teacher = teacher_of("Llama", num_hidden_layers=3)
    kept = [torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([0, 3])]
    channels = [torch.arange(40)] * 3
    student = make_student(teacher, blocks=[0, 2], channels=channels, heads=kept)
    both = make_student(without_heads(teacher, kept), blocks=[0, 2], channels=channels)
    torch.testing.assert_close(logits_of(student), logits_of(both), atol=1e-5, rtol=1e-5)
    predicted = predicted_parameters(teacher, blocks=2, channels=40, heads=2)
    assert student.num_parameters() == predicted


def test_importance_is_what_a_group_adds():
    """Catches the importance of single heads of queries, and that of padding."""
    teacher = teacher_of("Qwen2")
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    batch["attention_mask"][1, 9:] = 0
    importance = head_importance(teacher, [batch])
    shown = batch["attention_mask"].bool()

    reader = reader_of(decoder_blocks(teacher)[1])
    seen = []
    handle = reader.register_forward_hook(lambda _m, args, out: seen.append((args[0], out)))
    with torch.no_grad():
        teacher(**batch, use_cache=False)
        reader.weight[:, 16:32] = 0  # of group 1
        teacher(**batch, use_cache=False)
    handle.remove()
    lost = (seen[0][1] - seen[1][1])[shown].square().sum(-1).mean()
    torch.testing.assert_close(importance[1][1], lost, rtol=1e-3, atol=1e-8)

    plain = plain_head_importance(seen[0][0][shown].view(-1, 4, 16), reader.weight)
    torch.testing.assert_close(importance[1][2:], plain[2:].detach(), rtol=1e-3, atol=1e-8)


def test_the_groups_that_do_most_stay():
    teacher = teacher_of("Llama")
    with torch.no_grad():
        for block in decoder_blocks(teacher):
            reader_of(block).weight[:, :16] *= 0.01  # of group 0
            reader_of(block).weight[:, 48:] *= 0.01  # of group 3
    kept = choose_heads(head_importance(teacher, [{"input_ids": IDS}]), keep=2)
    assert [groups.tolist() for groups in kept] == [[1, 2], [1, 2]]


def test_families_whose_heads_cannot_go():
    """Without the guard: a norm over other heads, or heads as wide as the hidden size allows."""
    kept = [torch.tensor([0, 3])] * 2
    for family in ("GPT2", "GPTNeoX"):
        with pytest.raises(ValueError, match="none of the known forms"):
            make_student(small_model(family, num_attention_heads=4), heads=kept)
        with pytest.raises(ValueError, match="none of the known forms"):
            head_importance(small_model(family), [{"input_ids": IDS}])
    mamba = small_model("Mamba", state_size=4)
    del mamba.config.num_attention_heads  # which small_model gives to all
    with pytest.raises(ValueError, match="MambaBlock has no heads of attention"):
        head_importance(mamba, [{"input_ids": IDS}])
    assert make_student(mamba, blocks=[1]).config.num_hidden_layers == 1
    one_norm = small_model("Olmo2", **GROUPED)
    with pytest.raises(ValueError, match=r"q_norm.weight of Olmo2ForCausalLM would be \[32\]"):
        make_student(one_norm, heads=kept)


def test_bad_input():
    teacher = teacher_of("Llama")
    with pytest.raises(ValueError, match=r"heads\[0\]=\[0, 4\]: give whole numbers from 0 to 3"):
        make_student(teacher, heads=[torch.tensor([0, 4])] * 2)
    with pytest.raises(ValueError, match=r"heads are .* equally many"):
        make_student(teacher, heads=[torch.tensor([0])])
    with pytest.raises(ValueError, match="does not allow 6 heads"):
        make_student(teacher, heads=[torch.arange(3)] * 2)
    with pytest.raises(ValueError, match="head_importance"):
        choose_heads([1, 2], keep=1)
    with pytest.raises(ValueError, match="keep=5"):
        choose_heads([torch.ones(4)] * 2, keep=5)
    with pytest.raises(ValueError, match="heads=5"):
        predicted_parameters(teacher, heads=5)
    with pytest.raises(ValueError, match="no Hugging Face model"):
        head_importance(torch.nn.Linear(2, 2), [{"input_ids": IDS}])


# What the student could not compute, and a sentence says before it is handed out.
REFUSED = {
    "olmoe": "OlmoeForCausalLM in this way .RuntimeError: The size of tensor a",  # a wide norm
    "diffllama": "DiffLlamaForCausalLM in this way .ValueError: DiffLlama requires",
    "gemma4_text": "wider in some layers than in others",
}


@pytest.mark.parametrize("family", REFUSED)
def test_heads_that_cannot_go(family):
    """The mistake: a student that fails in its first step, inside of transformers."""
    teacher = tiny_model(family)
    with pytest.raises(ValueError, match=REFUSED[family]):
        groups = [attention_of(each, teacher.config).groups for each in decoder_blocks(teacher)]
        make_student(teacher, heads=[torch.arange(count // 2) for count in groups])
