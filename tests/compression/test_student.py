import copy
import math

import pytest
import torch
import transformers

from recipes_lib.attention.sliding_window import apply_sliding_window
from recipes_lib.compression.student import (
    block_influence,
    channel_importance,
    choose_blocks,
    choose_channels,
    make_student,
    pairs_of_blocks,
    plain_influence,
    plain_student,
    predicted_parameters,
)
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.precision.int4 import apply_int4
from recipes_lib.precision.int8 import apply_int8

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "sdpa",
}
WINDOWS = {"sliding_window": 4, "num_key_value_heads": 2, "head_dim": 8}
WINDOWS["attn_implementation"] = "eager"
# Blocks that differ by their number, MLPs of every known form, tied and untied.
FAMILIES = {
    "Llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "Gemma2": WINDOWS,
    "SmolLM3": {"num_key_value_heads": 2, "no_rope_layer_interval": 2},
    "GPT2": {"n_inner": 48},
    "GPTNeoX": {},
    "Phi": {},
    "Phi3": {"num_key_value_heads": 2},
}


def teacher_of(family, *, dtype=torch.float32, **options):
    torch.manual_seed(0)
    settings = SMALL | FAMILIES[family] | options
    config = getattr(transformers, f"{family}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():  # at their first values, biases and norms hide mistakes
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(params=FAMILIES)
def teacher(request):
    return teacher_of(request.param)


def ids_of(rows=2, length=12):
    return torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model, ids=None):
    return model(input_ids=ids_of() if ids is None else ids, use_cache=False).logits


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


@torch.no_grad()
def silence(model, channels):
    """Let all channels but these be zero: the layers that read them get zeros as weights."""
    silent = copy.deepcopy(model)
    for block, kept in zip(decoder_blocks(silent), channels):
        names = ("down_proj", "c_proj", "dense_4h_to_h", "fc2")
        out = [m for n, m in block.named_modules() if n.endswith(names) and "attn" not in n][-1]
        gone = torch.ones(48, dtype=torch.bool)
        gone[kept] = False
        weight = out.weight.data
        if out.__class__.__name__ == "Conv1D":
            weight[gone] = 0
        else:
            weight[:, gone] = 0
    return silent


# --- the student ----------------------------------------------------------------------------------

KEPT = [0, 1, 3, 5]


def test_a_student_is_its_teacher_without_blocks_and_channels(teacher, tmp_path):
    """In every family: it computes what the teacher does whose other blocks are skipped and whose
    other channels are silent. It saves, loads, generates, and the teacher stays as it is."""
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    config = copy.deepcopy(teacher.config.to_dict())
    channels = [torch.randperm(48)[:20].sort().values for _ in range(6)]
    student = make_student(teacher, blocks=KEPT, channels=channels)
    expected = logits_without(silence(teacher, channels), KEPT)
    torch.testing.assert_close(logits_of(student), expected, atol=1e-5, rtol=1e-5)
    assert student.num_parameters() == predicted_parameters(teacher, blocks=4, channels=20)

    student.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(teacher)
    torch.testing.assert_close(logits_of(loaded), expected, atol=1e-5, rtol=1e-5)

    student.train()
    student(input_ids=ids_of(), labels=ids_of()).loss.backward()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    assert teacher.config.to_dict() == config
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2"])
def test_a_student_generates_with_its_cache_as_without(family):
    """Blocks with the teacher's numbers would look for their keys in the wrong place."""
    student = make_student(teacher_of(family), blocks=[2, 3, 5])
    ids = ids_of(rows=1)
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    cached = student.generate(ids, use_cache=True, **options)
    torch.testing.assert_close(cached, student.generate(ids, use_cache=False, **options))


def test_the_idea_is_the_technique():
    teacher = teacher_of("Llama")
    plain = plain_student(teacher, KEPT)
    torch.testing.assert_close(logits_of(plain), logits_of(make_student(teacher, blocks=KEPT)))
    assert len(teacher.model.layers) == teacher.config.num_hidden_layers == 6
    ids = ids_of(rows=1)
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    assert torch.equal(
        plain.generate(ids, **options), make_student(teacher, blocks=KEPT).generate(ids, **options)
    )


def test_a_student_is_like_its_teacher():
    """Its dtype, its mode, its attention; all blocks make the teacher again; the random stream
    goes on as if nothing had been drawn."""
    teacher = teacher_of("Llama", dtype=torch.bfloat16).train()
    teacher.set_attn_implementation("eager")
    apply_activation_checkpointing(teacher)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    student = make_student(teacher)
    assert torch.equal(torch.rand(3), expected)
    assert student.training
    assert student.dtype == torch.bfloat16
    assert student.config._attn_implementation == "eager"
    assert torch.equal(logits_of(student), logits_of(teacher))
    tied = student.get_output_embeddings().weight is student.get_input_embeddings().weight
    assert tied


def test_a_teacher_with_another_attention_or_without_values():
    """The mistake: the student was tried out with the teacher's attention, which was not yet on it,
    and with weights that have no values."""
    teacher = apply_sliding_window(teacher_of("Llama"), window=4)
    student = make_student(teacher, blocks=KEPT)
    with pytest.raises(ValueError, match="and no window: call apply_sliding_window"):
        logits_of(student)
    apply_sliding_window(student, window=4)
    torch.testing.assert_close(logits_of(student), logits_without(teacher, KEPT))
    outline = make_student(teacher_of("Llama").to("meta"), blocks=KEPT)
    assert outline.num_parameters() == student.num_parameters()
    assert outline.device.type == "meta"


# --- what is measured -----------------------------------------------------------------------------


def test_influence_is_that_of_the_formula():
    """Of all blocks: that of the last one, from what it returns, and not from behind the norm."""
    teacher = teacher_of("Llama")
    batches = [{"input_ids": ids_of()}, {"input_ids": ids_of().flip(0)}]
    got = block_influence(teacher, batches)
    states = []
    for batch in batches:
        seen = []
        handles = [
            block.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out))
            for block in decoder_blocks(teacher)
        ]
        with torch.no_grad():
            teacher(**batch)
        for handle in handles:
            handle.remove()
        states.append([teacher.get_input_embeddings()(batch["input_ids"]), *seen])
    together = [torch.cat(each) for each in zip(*states)]
    assert got == pytest.approx(plain_influence(together), abs=1e-6)


def test_padding_is_not_measured():
    teacher = teacher_of("Llama")
    ids = ids_of()
    padded = torch.cat([ids, torch.zeros(2, 5, dtype=torch.long)], 1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros(2, 5, dtype=torch.long)], 1)
    batch = {"input_ids": padded, "attention_mask": mask, "labels": padded}
    plain = {"input_ids": ids}
    got = block_influence(teacher, [batch])
    assert got == pytest.approx(block_influence(teacher, [plain]), abs=1e-6)
    of_padded = channel_importance(teacher, [batch])
    for ours, expected in zip(of_padded, channel_importance(teacher, [plain])):
        torch.testing.assert_close(ours, expected)


def test_importance_is_what_a_channel_adds(teacher):
    """The mean square of what the MLP's output loses without the channel."""
    batch = {"input_ids": ids_of()}
    importance = channel_importance(teacher, [batch])
    assert not any(module._forward_hooks for module in teacher.modules())
    block = decoder_blocks(teacher)[2]
    names = ("down_proj", "c_proj", "dense_4h_to_h", "fc2")
    out = [m for n, m in block.named_modules() if n.endswith(names) and "attn" not in n][-1]
    outputs = []
    handle = out.register_forward_hook(lambda _m, _i, output: outputs.append(output))
    logits_of(teacher, batch["input_ids"])
    weight = out.weight.data
    channel = weight[7] if out.__class__.__name__ == "Conv1D" else weight[:, 7]
    channel.zero_()
    logits_of(teacher, batch["input_ids"])
    handle.remove()
    lost = (outputs[0] - outputs[1]).square().sum(-1).mean()
    torch.testing.assert_close(importance[2][7], lost, rtol=1e-3, atol=1e-7)


def test_blocks_and_channels_are_chosen():
    influence = [0.9, 0.2, 0.1, 0.3, 0.1, 0.2, 0.05, 0.4]
    assert choose_blocks(influence, keep=5) == [0, 1, 3, 5, 7]
    assert choose_blocks(influence, keep=4) == [0, 3, 5, 7]
    assert choose_blocks(influence, keep=3) == [0, 3, 7]  # three neighbours are gone
    assert choose_blocks(influence, keep=3, longest_gap=2) == [0, 3, 5]
    assert choose_blocks(influence, keep=4, longest_gap=1) == [1, 3, 5, 7]  # every second
    assert choose_blocks(influence, keep=8) == list(range(8))
    assert choose_blocks(influence, keep=1) == [0]
    kept = choose_channels([torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])], keep=2)
    assert [each.tolist() for each in kept] == [[0, 2], [1, 2]]


def test_a_kept_block_stands_for_those_that_follow():
    """The output of block 0 belongs where block 3 expects it: behind block 2."""
    assert pairs_of_blocks([0, 3, 4], of=6) == [(0, 2), (1, 3), (2, 5)]


def test_choosing_by_measurement_is_better_than_the_opposite():
    """On a model whose blocks were made unequal: those that do little go."""
    teacher = teacher_of("Llama")
    with torch.no_grad():
        for number in (1, 4):
            block = teacher.model.layers[number]
            block.self_attn.o_proj.weight.mul_(0.01)
            block.mlp.down_proj.weight.mul_(0.01)
    influence = block_influence(teacher, [{"input_ids": ids_of()}])
    blocks = choose_blocks(influence, keep=4)
    assert blocks == [0, 2, 3, 5]
    near = (logits_of(make_student(teacher, blocks=blocks)) - logits_of(teacher)).norm()
    far = (logits_of(make_student(teacher, blocks=[0, 1, 4, 5])) - logits_of(teacher)).norm()
    assert near < far / 3


# --- what is refused ------------------------------------------------------------------------------


def test_refuses_what_is_not_there():
    teacher = teacher_of("Llama")
    for blocks in ([], [0, 6], [1, 1], [2, 1], [-1, 2], ["a"], [0.5]):
        with pytest.raises(ValueError, match="from 0 to 5 in rising order"):
            make_student(teacher, blocks=blocks)
    with pytest.raises(ValueError, match="equally many"):
        make_student(teacher, channels=[torch.arange(4)] * 5)
    with pytest.raises(ValueError, match="from 0 to 47"):
        make_student(teacher, channels=[torch.arange(47, 50)] * 6)
    with pytest.raises(ValueError, match="keep=7"):
        choose_blocks([0.1] * 6, keep=7)
    with pytest.raises(ValueError, match="longest_gap=1 leaves 3 of 6 blocks"):
        choose_blocks([0.1] * 6, keep=2, longest_gap=1)
    with pytest.raises(ValueError, match="keep=0"):
        choose_channels([torch.ones(4)], keep=0)
    with pytest.raises(ValueError, match="blocks=3: give a list"):
        make_student(teacher, blocks=3)
    with pytest.raises(ValueError, match=r"influence\[1\]=nan: give a finite number"):
        choose_blocks([0.1, math.nan], keep=1)
    with pytest.raises(ValueError, match="give what channel_importance"):
        choose_channels([1, 2], keep=1)
    with pytest.raises(ValueError, match="no text"):
        block_influence(teacher, [])
    for measure in (block_influence, channel_importance):
        with pytest.raises(ValueError, match="batches is of type dict: give a list"):
            measure(teacher, {"input_ids": ids_of().repeat(4, 4)})
        with pytest.raises(ValueError, match=r"batch 0 .* without input_ids"):
            measure(teacher, [ids_of()])
    with pytest.raises(ValueError, match="channels=49"):
        predicted_parameters(teacher, channels=49)
    with pytest.raises(ValueError, match="no Hugging Face model"):
        make_student(torch.nn.Linear(2, 2))


def test_refuses_blocks_that_depend_on_their_number():
    """GPT-2 may divide its scores by the number of the block: moved blocks would compute otherwise,
    without a word. Blocks that stay where they are, are fine."""
    teacher = teacher_of("GPT2", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(ValueError, match=r"block 3 of GPT2LMHeadModel.*scaling"):
        make_student(teacher, blocks=[0, 1, 3])
    make_student(teacher, blocks=[0, 1, 2])


def test_refuses_a_mixture_of_experts():
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1
    )
    teacher = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="none of the known forms"):
        channel_importance(teacher, [{"input_ids": ids_of()}])
    student = make_student(teacher, blocks=[0, 2])
    torch.testing.assert_close(logits_of(student), logits_without(teacher, [0, 2]))


def test_refuses_adapters_and_few_bits():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        model_of_shape("tiny-llama", device="cpu"), peft.LoraConfig(target_modules=["q_proj"])
    )
    with pytest.raises(ValueError, match="merge_and_unload"):
        make_student(adapted)
    teacher = model_of_shape("tiny-llama", device="cpu")
    weight = teacher.model.layers[0].mlp.up_proj
    weight.weight = torch.nn.Parameter(weight.weight.data.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="quantized"):
        make_student(teacher)
    for apply in (apply_int8, apply_int4):
        quantized = apply(model_of_shape("tiny-llama", device="cpu"))
        with pytest.raises(ValueError, match=f"with {apply.__name__}: make the student of the"):
            make_student(quantized)


@pytest.mark.gpu
def test_measured_and_made_on_gpu():
    """Text and masks come from the CPU. A student whose weights stay there cannot be taught."""
    teacher = model_of_shape("tiny-llama", layers=3, device="cuda").eval()
    on_cpu = copy.deepcopy(teacher).cpu()
    batch = {"input_ids": torch.arange(1, 25).view(2, 12)}
    batch["attention_mask"] = (torch.arange(12) < torch.tensor([[12], [7]])).long()
    assert block_influence(teacher, [batch]) == pytest.approx(
        block_influence(on_cpu, [batch]), rel=0.01, abs=1e-5
    )
    expected = channel_importance(on_cpu, [batch])
    for there, here in zip(channel_importance(teacher, [batch]), expected, strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=0.01, atol=1e-8)
    channels = choose_channels(expected, keep=40)
    random_before = torch.cuda.get_rng_state()
    student = make_student(teacher, blocks=[0, 2], channels=channels)
    assert torch.equal(torch.cuda.get_rng_state(), random_before)
    assert {parameter.device.type for parameter in student.parameters()} == {"cuda"}
    twin = make_student(on_cpu, blocks=[0, 2], channels=channels)
    ids = batch["input_ids"]
    with torch.no_grad():
        got = student(ids.cuda(), use_cache=False).logits.cpu()
        assert (got - twin(ids, use_cache=False).logits).norm() < 1e-3 * got.norm()
