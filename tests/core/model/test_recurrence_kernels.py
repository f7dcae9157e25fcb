"""Which kernels a hybrid model lacks, and who says so."""

import warnings

import pytest

from recipes_lib.core.model import load_model, recurrence_kernels
from recipes_lib.core.model.recurrence_kernels import recurrence_packages
from tests.families.configs import tiny_model

WANTED = {
    "qwen3_5_text": ["causal_conv1d", "fla"],
    "mamba2": ["causal_conv1d", "mamba_ssm"],
    "llama": [],
}


@pytest.mark.parametrize("family", WANTED)
def test_the_packages_of_a_family(family):
    """The mistake: transformers names its kernels in another way, and no model lacks any."""
    assert recurrence_packages(tiny_model(family)) == WANTED[family]


def test_loading_says_it(tmp_path, monkeypatch):
    """The mistake: a training of hours in a loop in fp32, of which nobody knows."""
    monkeypatch.setattr(recurrence_kernels, "find_spec", lambda name: None)
    tiny_model("lfm2").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="pip install causal-conv1d"):
        load_model(str(tmp_path), device="cpu")
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_model(str(tmp_path / "llama"), device="cpu")
