"""Models and tokenizers load, and what cannot be loaded is said in one sentence."""

import json

import pytest
import torch

from recipes_lib.core.model import default_model as module
from recipes_lib.core.model import (
    load_config,
    load_model,
    load_tokenizer,
    loading,
    model_without_weights,
)
from tests.families.configs import quiet, tiny_model


def test_loads_in_the_dtype_asked_for_without_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a cached model must not touch the network")

    monkeypatch.setattr(module.socket, "create_connection", refuse)
    monkeypatch.setattr(module.subprocess, "run", refuse)
    assert load_model(dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "tests"])
def test_unknown_model(name, monkeypatch):
    monkeypatch.setattr(loading, "offline", lambda where: True)
    with pytest.raises(ValueError, match="give 'smollm2', a local folder"):
        load_model(name)


@pytest.mark.parametrize("load", [load_model, load_config, load_tokenizer])
def test_nobody_is_asked_whether_to_run_the_code_of_a_folder(monkeypatch, tmp_path, load):
    """transformers would ask in the terminal, and run it after a "y"."""
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    names["AutoTokenizer"] = ["code.Tokenizer", None]
    config = {"model_type": "strange", "auto_map": names}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    asked = []
    monkeypatch.setattr("builtins.input", asked.append)
    with pytest.raises(ValueError, match="cannot load"):
        load(str(tmp_path))
    assert asked == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_stays_in_fp32_is_what_transformers_leaves(dtype, tmp_path):
    """The mistake: a router in bf16 sends tokens to other experts, and no error tells."""
    with quiet():
        model = tiny_model("hy_v4")
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    in_fp32 = {name for name, p in loaded.named_parameters() if p.dtype is torch.float32}
    assert loading.kept_in_fp32(model, dtype) == in_fp32 != set()


def small(**others):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16}
    return sizes | {"num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 128} | others


def test_a_model_with_images_has_sizes_too(tmp_path):
    """The mistakes: Qwen3-VL-MoE, whose text is no model by itself, is refused; of Gemma 3, whose
    text is one, the images count."""
    from transformers import Gemma3Config, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    eyes = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    eyes |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3VLMoeConfig(text_config=small(**experts), vision_config=eyes)
    config.save_pretrained(tmp_path / "qwen")
    found = model_without_weights(str(tmp_path / "qwen"), dtype=torch.bfloat16)
    assert isinstance(found, Qwen3VLMoeForConditionalGeneration)
    assert all(p.is_meta and p.dtype is torch.bfloat16 for p in found.parameters())
    assert found.training

    Gemma3Config(text_config=small()).save_pretrained(tmp_path / "gemma")
    of_text = model_without_weights(str(tmp_path / "gemma"))
    assert not any("vision" in name for name, _ in of_text.named_parameters())


def test_sizes_of_what_writes_no_text_are_refused(tmp_path):
    """The mistake: the traceback of a library's table of classes."""
    from transformers import CLIPConfig

    CLIPConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of a clip, which is no causal language model"):
        model_without_weights(str(tmp_path))
