"""What stays in fp32 beside 16 bits, against what `from_pretrained` loads."""

import peft
import pytest
import torch

from recipes_lib.core.model.kept_in_fp32 import buffers_made_in, kept_in_fp32
from tests.families.configs import quiet, tiny_model


# Routers and recurrences; a table of positions in a buffer; nothing but rotary frequencies.
@pytest.mark.parametrize("family", ["hy_v4", "openai-gpt", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_as_transformers_loads_it(family, dtype, tmp_path):
    """The mistake: a router in bf16 sends tokens to other experts, and no error tells."""
    with quiet():
        model = tiny_model(family)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    in_fp32 = {name for name, p in loaded.named_parameters() if p.dtype is torch.float32}
    assert kept_in_fp32(model, dtype) == in_fp32
    assert bool(in_fp32) == (family == "hy_v4")
    made = {name for name, b in loaded.named_buffers() if b.dtype is dtype}
    assert buffers_made_in(model, dtype) == made
    assert bool(made) == (family == "openai-gpt")


@pytest.mark.parametrize("wrapper", ["peft", "compile"])
def test_inside_of_a_wrapper(wrapper):
    """The mistake: a wrapper passes on the model's functions, and its class does not."""
    with quiet():
        model = tiny_model("openai-gpt")
        expected = buffers_made_in(model, torch.bfloat16)
    if wrapper == "peft":
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"]))
    else:
        wrapped = torch.compile(model)
    found = buffers_made_in(wrapped, torch.bfloat16)
    assert len(found) == len(expected) > 0
    assert found <= {name for name, _ in wrapped.named_buffers()}


def test_no_model_of_transformers():
    assert kept_in_fp32(torch.nn.Linear(2, 2), torch.bfloat16) == set()
    assert buffers_made_in(torch.nn.BatchNorm1d(2), torch.bfloat16) == set()
