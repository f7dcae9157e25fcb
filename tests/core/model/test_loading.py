"""Models and tokenizers load, and what cannot be loaded is said in one sentence."""

import json

import pytest
import torch

from recipes_lib.core.model import default_model as module
from recipes_lib.core.model import load_config, load_model, load_tokenizer, loading
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
