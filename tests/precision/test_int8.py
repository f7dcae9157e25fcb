"""Int8 layers compute what the formula says, for any shape, and refuse what they cannot do."""

import copy
import io
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from recipes_lib.core.data.quality import decode_quality
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.decoding import greedy
from recipes_lib.core.model.linears import bytes_per_token, linear_layers, output_layer_name
from recipes_lib.inference.decode_loop import apply_decode_loop
from recipes_lib.precision.int8 import (
    KINDS,
    Int8Linear,
    apply_int8,
    int8_linear,
    plain_dynamic,
    plain_quantize,
    plain_two_halves,
    plain_weight_only,
    predicted_int8_bytes,
    quantize_rows,
    stored_bytes,
)
from recipes_lib.precision.int8 import kernels as int8_kernels
from recipes_lib.precision.int8 import packed as int8_packed
from recipes_lib.precision.int8.sensitivity import (
    Sensitivity,
    groups_by_block,
    groups_by_place,
    sensitive_layers,
    sensitivity,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def distance(got, expected):
    """In the Euclidean norm, relative to what is expected."""
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


def linear(inputs, outputs, *, bias=False):
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


def documents(count=2, tokens=40, vocabulary=128):
    return torch.randint(0, vocabulary, (count, tokens)).tolist()


# --- the idea -------------------------------------------------------------------------------------


def test_rows_are_quantized_as_in_the_idea():
    """A scale that is rounded after it has divided would be another one than that of the kernel."""
    weight = torch.randn(50, 30)
    weight[3] = 0
    whole, scale = quantize_rows(weight)
    expected, expected_scale = plain_quantize(weight[torch.arange(50) != 3])
    rest = torch.arange(50) != 3
    assert torch.equal(whole[rest].float(), expected)
    assert torch.equal(scale[rest].float(), expected_scale)
    assert not whole[3].any() and scale.isfinite().all()  # no division by zero
    back = whole.float() * scale.float()[:, None]
    assert ((back - weight).abs() <= 0.51 * scale.float()[:, None]).all()


def test_the_kernel_for_few_rows_is_for_widths_of_16():
    """With others it reads beyond each row: wrong numbers, or the end of this process."""
    fits = int8_kernels.few_rows_kernel_fits
    assert fits(torch.empty(1, 64), torch.empty(10, 64))
    assert not fits(torch.empty(1, 24), torch.empty(10, 24))
    assert not fits(torch.empty(1, 50), torch.empty(10, 50))


# Rows: for the kernel of few rows and for the matrix product. Widths: with and without a remainder.
@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 33), (24, 10), (50, 7), (7, 1)])
def test_equals_the_plain_products(inputs, outputs, rows, vnni, monkeypatch):
    if not vnni:
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    layer = linear(inputs, outputs)
    x = torch.randn(rows, inputs)
    weight_only = int8_linear(layer, kind="weight_only")(x)
    assert distance(weight_only, plain_weight_only(x, layer.weight)) < 0.01  # 16-bit activations
    if not vnni:
        return  # the other kinds have 7 bits then, which has a test of its own
    dynamic = int8_linear(layer, kind="dynamic")(x)
    assert distance(dynamic, plain_dynamic(x, layer.weight)) < 0.003
    per_token = int8_linear(layer, kind="per_token")(x)
    assert distance(per_token, plain_weight_only(x, layer.weight)) < 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (3,), (1, 1), (2, 3, 4), (2, 0)])
def test_any_leading_shape_and_dtype(kind, dtype, lead):
    layer = linear(32, 20, bias=True)
    x = torch.randn(*lead, 32)
    y = int8_linear(layer, kind=kind)(x.to(dtype))
    assert y.dtype is dtype and y.shape == (*lead, 20)
    if y.numel():
        assert distance(y, layer(x)) < 0.03


def test_parts_of_other_tensors():
    """A view in one piece may begin anywhere: the kernel reads from multiples of 32 bytes."""
    layer = linear(64, 40)
    rows = torch.randn(3 * 64 + 1).bfloat16()[1:].view(3, 64)
    turned = torch.randn(64, 3).bfloat16().t()
    assert rows.is_contiguous() and rows.data_ptr() % 32 and not turned.is_contiguous()
    for kind in KINDS:
        quantized = int8_linear(layer, kind=kind)
        for x in (rows, turned):
            assert distance(quantized(x), layer(x.float())) < 0.03


# --- the silent traps -----------------------------------------------------------------------------


@pytest.mark.skipif(not int8_packed.has_packed_kernel(torch.device("cpu")), reason="no FBGEMM")
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_two_halves_are_those_of_the_idea(rows):
    """A half that is rounded a second time would be as coarse as 8 bits, and nobody would see it.

    A row of zeros, a tiny and a large one beside it must not matter.
    """
    layer = linear(50, 33)
    x = torch.randn(rows, 50)
    quantized = int8_linear(layer, kind="weight_only")
    assert distance(quantized(x), plain_weight_only(plain_two_halves(x), layer.weight)) < 1e-5
    assert distance(plain_two_halves(x), x) < 1e-4
    others = torch.cat([torch.zeros(1, 50), 1e-7 * x, 1e4 * x, x])
    together = quantized(others)
    assert not together[0].any()
    assert torch.equal(together[-rows:], quantized(x))  # to the last bit
    assert distance(together[1 : 1 + rows], 1e-7 * quantized(x)) < 1e-4


def test_a_row_alone_is_as_among_others():
    """One token has a path of its own. Drafts are exact only if it rounds as that of several."""
    layer = int8_linear(linear(160, 64), kind="weight_only")
    if layer._packed is None:
        pytest.skip("this machine has no VNNI: kernels for few rows round otherwise")
    rows = torch.randn(300, 160)
    together = layer(rows)
    alone = torch.cat([layer(row) for row in rows.split(1)])
    assert torch.equal(alone, together)  # to the last bit


@pytest.mark.skipif(not int8_packed.has_packed_kernel(torch.device("cpu")), reason="no FBGEMM")
def test_rows_that_are_kept_belong_to_one_call_at_a_time():
    """Two threads that wrote into the same rows would get each other's numbers.

    Rows made in inference mode could not be written to outside of it.
    """
    layer = int8_linear(linear(640, 64), kind="weight_only")
    inputs = [torch.randn(1, 640) for _ in range(8)]
    with torch.inference_mode():
        expected = [layer(x).clone() for x in inputs]

    def many_times(index):
        outputs = [layer(inputs[index]) for _ in range(200)]
        return all(torch.equal(output, expected[index]) for output in outputs)

    with ThreadPoolExecutor(max_workers=8) as pool:
        assert all(pool.map(many_times, range(8)))


@pytest.fixture
def without_vnni(monkeypatch):
    """As on older processors, where two halves of 7 bits would be coarser than bf16."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)


@pytest.mark.usefixtures("without_vnni")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_only_kernel_gets_bf16(dtype, monkeypatch):
    """With another dtype it is right, and takes several times as long: only a clock would tell."""
    given = []
    kernel = torch.ops.aten._weight_int8pack_mm

    def recorded(x, weight, scale):
        given.append((x.dtype, scale.dtype))
        return kernel(x, weight, scale)

    monkeypatch.setattr(torch.ops.aten, "_weight_int8pack_mm", recorded)
    quantized = int8_linear(linear(64, 40)).to(dtype)
    quantized(torch.randn(2, 64).to(dtype))
    assert given == [(torch.bfloat16, torch.bfloat16)]


@pytest.mark.usefixtures("without_vnni")
def test_a_prompt_takes_the_matrix_product(monkeypatch):
    """The kernel for few rows takes as many times as long as there are rows."""
    monkeypatch.delattr(torch.ops.aten, "_weight_int8pack_mm", raising=False)
    monkeypatch.setattr(int8_kernels, "few_rows_kernel_fits", few_rows_only)
    layer = linear(64, 40)
    x = torch.randn(int8_kernels.GEMM_FROM_ROWS, 64)
    assert distance(int8_linear(layer)(x), layer(x)) < 0.02


def few_rows_only(x, weight):
    assert len(x) >= int8_kernels.GEMM_FROM_ROWS
    return False


@pytest.mark.parametrize("kind", ["dynamic", "per_token"])
@pytest.mark.parametrize("size", [1e-4, 1e-7, 1e4])
def test_tiny_and_large_activations(kind, size):
    """Left to itself, the operator has no step below 6.1e-5: activations of 1e-7 become zeros."""
    if kind == "dynamic" and size == 1e-7:
        size = 1e-6
    layer = linear(64, 40)
    x = size * torch.randn(3, 64)
    assert distance(int8_linear(layer, kind=kind)(x), layer(x)) < 0.02


def test_what_is_no_number_stays_none():
    """With a scale per token. FBGEMM by itself may make a finite number of it."""
    x = torch.randn(2, 64)
    x[0, 3] = torch.nan
    for kind in ("weight_only", "per_token"):
        y = int8_linear(linear(64, 40), kind=kind)(x)
        assert y[0].isnan().all() and y[1].isfinite().all()


def test_one_scale_per_call_and_one_per_token():
    """Beside a large token, a small one is lost with "dynamic". "per_token" does not see it."""
    layer = linear(64, 40)
    x = torch.randn(4, 64)
    x[1] *= 1000
    errors = {}
    for kind in ("dynamic", "per_token"):
        quantized = int8_linear(layer, kind=kind)
        errors[kind] = distance(quantized(x)[0], layer(x)[0])
        if kind == "per_token":
            assert torch.equal(quantized(x)[:1], quantized(x[:1]))  # to the last bit
    assert errors["dynamic"] > 0.5 and errors["per_token"] < 0.02


def test_activations_have_7_bits_without_vnni(monkeypatch):
    """Sums of two products of 8 bits do not fit into 16: such processors cut them off."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    model = model_of_shape("tiny-llama", device="cpu")
    with pytest.warns(UserWarning, match="7 bits"):
        apply_int8(model, kind="dynamic")
    layer = linear(64, 40)
    x = torch.randn(3, 64)
    coarse = distance(int8_linear(layer, kind="dynamic")(x), plain_weight_only(x, layer.weight))
    monkeypatch.undo()
    fine = distance(int8_linear(layer, kind="dynamic")(x), plain_weight_only(x, layer.weight))
    assert coarse == pytest.approx(2 * fine, rel=0.3)


def test_without_fbgemm_the_slower_path_is_right(monkeypatch):
    monkeypatch.setattr(int8_packed, "has_packed_kernel", lambda device: False)
    monkeypatch.setattr("recipes_lib.precision.int8.has_packed_kernel", lambda device: False)
    model = model_of_shape("tiny-llama", device="cpu")
    with pytest.warns(UserWarning, match="FBGEMM"):
        apply_int8(model, kind="dynamic")
    layer = linear(50, 33, bias=True)
    x = torch.randn(2, 5, 50)
    assert distance(int8_linear(layer, kind="dynamic")(x), layer(x)) < 0.02


def test_packing_leaves_engine_and_warnings_alone():
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "qnnpack"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer = linear(64, 40)
            quantized = int8_linear(layer, kind="dynamic")
            assert torch.backends.quantized.engine == "qnnpack"
            x = torch.randn(2, 64)
            assert distance(quantized(x), layer(x)) < 0.02
            quantized.dequantized()
    finally:
        torch.backends.quantized.engine = before


# --- the module -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_saved_loaded_copied_and_cast(kind):
    """A file does not depend on the kind; scales in fp16 would lose digits, and say nothing."""
    small = linear(64, 40, bias=True)
    small.weight *= 1e-5
    quantized = int8_linear(small, kind=kind)
    x = torch.randn(3, 64)
    expected = quantized(x)
    weight = quantized.dequantized()
    assert distance(weight, small.weight) < 0.01

    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        "bias": torch.float32,
        "scale": torch.bfloat16,
        "weight": torch.int8,
    }
    for other_kind in KINDS:
        other = int8_linear(linear(64, 40, bias=True), kind=other_kind)
        other.load_state_dict(state)
        assert torch.equal(other.dequantized(), weight)
        state["weight"].zero_()  # what was loaded is the layer's own
        assert torch.equal(other.dequantized(), weight)
        state["weight"] = quantized.whole_numbers().clone()
    twin = copy.deepcopy(quantized)
    assert torch.equal(twin(x), expected)
    assert torch.equal(twin.half().dequantized(), weight)


def test_a_file_in_full_precision_is_not_loaded():
    quantized = int8_linear(linear(64, 40), kind="dynamic")
    with pytest.raises(RuntimeError, match=r"torch.float32 \[40, 64\]: give int8"):
        quantized.load_state_dict(linear(64, 40).state_dict() | {"scale": torch.ones(40)})
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
        quantized.load_state_dict({"scale": torch.ones(40)})


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["tiny-llama", "tiny-qwen2", "tiny-gemma2"])
def test_a_model_of_each_family(family, kind):
    model = model_of_shape(family, device="cpu")
    rows = documents()
    full = decode_quality(model, rows)
    apply_int8(model, kind=kind)
    quantized = decode_quality(model, rows, reference=full.predictions)
    assert quantized.perplexity == pytest.approx(full.perplexity, rel=0.01)
    assert quantized.agreement > 0.9
    assert [*linear_layers(model)] == [output_layer_name(model)]


def test_a_decoder_in_8_bits_reads_a_quarter():
    decoder = apply_decode_loop(model_of_shape("tiny-llama", device="cpu"))
    rows = documents()
    full = decode_quality(decoder, rows, token_by_token=True)
    before = bytes_per_token(decoder)
    apply_int8(decoder, kind="dynamic")
    apply_int8(decoder, kind="weight_only", names=["head"])  # a hybrid
    quantized = decode_quality(decoder, rows, token_by_token=True)
    assert quantized.perplexity == pytest.approx(full.perplexity, rel=0.01)
    assert bytes_per_token(decoder) == pytest.approx(before / 4, rel=0.03)
    assert decoder.embedding.weight.dtype is torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_as_predicted(kind):
    """The weights exist once, also where a kernel packs them. A tied embedding stays."""
    for names in (None, ["lm_head"]):
        model = model_of_shape("tiny-llama", device="cpu")
        predicted = predicted_int8_bytes(model, names=names)
        apply_int8(model, kind=kind, names=names)
        assert stored_bytes(model) == predicted
        assert model.get_input_embeddings().weight.dtype is torch.float32


# --- which layers suffer --------------------------------------------------------------------------


def test_the_scan_finds_the_layer_with_an_outlier():
    """One huge weight takes all steps of its row. The model is as it was afterwards."""
    model = model_of_shape("tiny-llama", device="cpu")
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        mlp.down_proj.weight.mul_(300)
        # The huge weights meet zeros only, and change nothing themselves.
        mlp.down_proj.weight[:, 5] = 10_000
        mlp.up_proj.weight[5] = 0
    # Its own answers: whatever changes the model makes them less likely.
    rows = [[start, *greedy(apply_decode_loop(model), [start], new_tokens=40)] for start in (3, 4)]
    before = decode_quality(model, rows)
    scan = sensitivity(model, rows, kind="weight_only", groups=groups_by_place(model))
    assert scan[0].group == "down_proj" and len(scan) == 8
    assert decode_quality(model, rows).perplexity == before.perplexity
    blocks = groups_by_block(model)
    assert [*blocks] == ["block 0", "block 1", "lm_head"]
    assert sensitivity(model, rows, kind="weight_only", groups=blocks)[0].group == "block 1"


def test_the_worst_groups_stay_until_the_rest_is_small_enough():
    """By the damage per weight: a large group may do most and still not be worth its bytes."""
    scan = [
        Sensitivity("large", ("a", "b"), 0.03, 0.9, 1000),
        Sensitivity("small", ("c",), 0.02, 0.9, 10),
        Sensitivity("fine", ("d",), 0.004, 0.9, 100),
    ]
    assert sensitive_layers(scan, most_divergence=0.06) == []
    assert sensitive_layers(scan, most_divergence=0.04) == ["c"]
    assert sensitive_layers(scan, most_divergence=0.0) == ["c", "d", "a", "b"]
    with pytest.raises(ValueError, match="most_divergence=-1"):
        sensitive_layers(scan, most_divergence=-1)


# --- guards ---------------------------------------------------------------------------------------


def test_training_is_refused():
    model = model_of_shape("tiny-llama", device="cpu")
    apply_int8(model, kind="dynamic")
    ids = torch.randint(0, 128, (1, 5))
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    model(input_ids=ids)
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        model.train()(input_ids=ids)
    model.eval().get_input_embeddings().requires_grad_(True)
    with pytest.raises(ValueError, match="no backward"):
        model(input_ids=ids)


def test_bad_input():
    model = model_of_shape("tiny-llama", device="cpu")
    with pytest.raises(ValueError, match="kind='int8': choose one of weight_only"):
        apply_int8(model, kind="int8")
    with pytest.raises(ValueError, match=r"no linear layer model.embed_tokens: give names"):
        apply_int8(model, names=["model.embed_tokens"])
    for function in (apply_int8, predicted_int8_bytes):
        with pytest.raises(ValueError, match=r"such as \['lm_head'\]"):
            function(model, names="lm_head")
    with pytest.raises(ValueError, match="no weights yet"):
        apply_int8(model_of_shape("tiny-llama", device="meta"))
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        int8_linear(model)
    with pytest.raises(ValueError, match="kind='int8'"):
        int8_linear(linear(32, 32), kind="int8")
    with pytest.raises(ValueError, match=r"weight \[5\]: give the weight \[N, K\]"):
        quantize_rows(torch.ones(5))
    with pytest.raises(ValueError, match="NoneType is no model"):
        stored_bytes(None)
    with pytest.raises(ValueError, match="Conv1D"):
        apply_int8(model_of_shape("tiny-gpt2", device="cpu"))
    with pytest.raises(ValueError, match="no Hugging Face model"):
        apply_int8(nn.Linear(3, 3))
    adapted = model_of_shape("tiny-llama", device="cpu")
    adapted.peft_config = {}
    with pytest.raises(ValueError, match="merge_and_unload"):
        apply_int8(adapted)

    broken = copy.deepcopy(model)
    broken.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="down_proj has weights that are not finite"):
        apply_int8(broken)
    assert not any(isinstance(module, Int8Linear) for module in broken.modules())

    apply_int8(model, names=["lm_head"])
    for names in (["lm_head"], None):
        with pytest.raises(ValueError, match="lm_head is quantized already, with apply_int8"):
            apply_int8(model, names=names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": {}}, "no groups"),
        ({"groups": ["lm_head"]}, "no groups by name"),
        ({"groups": {"head": "lm_head"}}, r"such as \['lm_head'\]"),
        ({"groups": {"head": ["nothing"]}}, "no linear layer nothing"),
        ({"groups": {"head": None}}, "group 'head' has no names"),
        ({"documents": [[1, 500]]}, "holds the id 500"),
        ({"documents": []}, "no documents"),
        ({"token_by_token": True}, "give a decoder"),
    ],
)
def test_a_scan_is_refused_before_it_begins(options, message):
    """A wrong name in the last group would be found after minutes of reading."""
    model = model_of_shape("tiny-llama", device="cpu")
    given = {"documents": documents(), "groups": {"head": ["lm_head"]}} | options
    with pytest.raises(ValueError, match=message):
        sensitivity(model, given.pop("documents"), kind="dynamic", **given)


def test_a_quantized_model_is_not_scanned():
    model = apply_int8(model_of_shape("tiny-llama", device="cpu"))
    groups = {"up": ["model.layers.0.mlp.up_proj"]}
    with pytest.raises(ValueError, match="with apply_int8: measure the model in full precision"):
        sensitivity(model, documents(), kind="dynamic", groups=groups)
    with pytest.raises(ValueError, match="give what sensitivity returns"):
        sensitive_layers({"up": 0.1}, most_divergence=0.1)


# --- on a GPU -------------------------------------------------------------------------------------


def test_fp16_ends_at_65504():
    """A sum of whole numbers up to 127 passes it where the result is far below."""
    layer = linear(2048, 3)
    layer.weight.data.fill_(0.01)
    quantized = int8_linear(layer, kind="weight_only")
    x = torch.full((2, 2048), 8.0)
    got = int8_kernels.fp16_product(x.half(), quantized.whole_numbers(), quantized.scale)
    assert got.dtype is torch.float16
    assert distance(got.float(), layer(x)) < 0.01


def test_widths_that_fit_are_not_copied():
    """`pad` copies where it adds nothing: all weights, for each token."""
    weight = torch.zeros(48, 64, dtype=torch.int8)
    assert int8_kernels._padded(weight, 48, 64) is weight
    assert int8_kernels._padded(weight, 49, 72).shape == (49, 72)


@pytest.mark.gpu
def test_fp16_sums_do_not_overflow_on_gpu():
    """A T4 computes in fp16, and the layer has to choose the product for it."""
    layer = linear(2048, 8)
    layer.weight.data.fill_(0.01)
    x = torch.full((2, 2048), 8.0)
    quantized = int8_linear(layer, kind="weight_only").cuda()
    assert distance(quantized(x.cuda().half()).cpu(), layer(x)) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 17, 40])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (50, 33)])
def test_on_gpu(kind, rows, inputs, outputs):
    """cuBLAS refuses few rows and odd widths; a move to the GPU unpacks the weights."""
    layer = linear(inputs, outputs, bias=True)
    x = torch.randn(rows, inputs)
    expected = layer(x)
    quantized = int8_linear(layer, kind=kind).to("cuda")
    for dtype in DTYPES:
        assert distance(quantized(x.to("cuda", dtype)).cpu(), expected) < 0.03
    assert distance(quantized.cpu()(x), expected) < 0.03
