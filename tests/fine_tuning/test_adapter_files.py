import copy
import json
import os
from pathlib import Path

import pytest
import torch

from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape
from recipes_lib.fine_tuning.adapter_files import (
    base_fingerprint,
    check_merged,
    estimate_adapter_bytes,
    load_adapter,
    save_adapter,
    save_merged,
)
from recipes_lib.fine_tuning.lora import apply_lora, merge_lora
from recipes_lib.fine_tuning.qlora import apply_qlora, merge_qlora

IDS = torch.arange(1, 20)[None]


def base(shape="tiny-llama", seed=0):
    torch.manual_seed(seed)
    return model_of_shape(shape, device="cpu")


def adapted(model, adapt=apply_lora):
    model = adapt(model, rank=4)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # as after training: it starts at zero
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS, use_cache=False).logits.float()


@pytest.mark.parametrize(
    "shape", ["tiny-llama", "tiny-qwen3", "tiny-mistral", "tiny-gemma2", "tiny-gpt2"]
)
def test_saved_adapters_on_a_fresh_base_give_the_same_logits(shape, tmp_path):
    fingerprint = base_fingerprint(base(shape))
    model = adapted(base(shape))
    size = save_adapter(model, tmp_path / "a", base=fingerprint)
    again = load_adapter(base(shape), tmp_path / "a")
    assert torch.equal(logits(again), logits(model))
    assert (logits(model) - logits(base(shape))).abs().max() > 1e-2
    assert 0 <= size - estimate_adapter_bytes(model) < 20_000


@pytest.mark.parametrize("adapt", [apply_lora, apply_qlora])
def test_merged_into_16_bits_and_loaded_in_a_fresh_process(adapt, tmp_path):
    model = adapted(base(), adapt)
    if adapt is apply_qlora:
        for layer in model.modules():
            if hasattr(layer, "compute_dtype"):
                layer.compute_dtype = torch.float32
    expected = logits(model)
    merged = (merge_qlora if adapt is apply_qlora else merge_lora)(model)
    assert (
        logits(merged) - expected
    ).abs().max() < 1e-4  # the merge itself is exact up to rounding
    full, folder = copy.deepcopy(merged), tmp_path / "merged"
    save_merged(merged, folder, tokenizer=load_tokenizer())
    assert 0 < check_merged(folder, full, IDS) < 0.03  # bf16 keeps two to three digits
    again = load_model(str(folder), device="cpu", dtype=torch.bfloat16)
    if adapt is apply_lora:  # every look is a process
        assert check_merged(folder, base(seed=3), IDS) > 0.5 and again.training
    assert torch.equal(logits(merged), logits(again)), "the rotary frequencies keep fp32"
    with pytest.raises(ValueError, match="is there already"):
        save_merged(merged, folder, tokenizer=load_tokenizer())


def test_fingerprint_is_of_the_model_not_of_its_dtype():
    assert base_fingerprint(base()) == base_fingerprint(base().to(torch.bfloat16))
    others = {
        base_fingerprint(m)
        for m in (base(), base(seed=1), base("tiny-mistral"), base("tiny-qwen3"))
    }
    assert len(others) == 4
    for hidden in (adapted(base()), adapted(base(), apply_qlora)):
        with pytest.raises(ValueError, match="hide the base"):
            base_fingerprint(hidden)


def test_an_adapter_of_another_base_is_refused(tmp_path):
    save_adapter(adapted(base()), tmp_path / "a", base=base_fingerprint(base()))
    other = base(seed=1)  # the same shapes: peft loads it without a word
    before = logits(other)
    with pytest.raises(ValueError, match="trained on another base"):
        load_adapter(other, tmp_path / "a")
    assert torch.equal(logits(other), before) and not hasattr(other, "peft_config")
    (tmp_path / "a" / "base_model.json").unlink()  # written by someone else: shapes decide
    for wrong in (model_of_shape("smollm2-135m", layers=1, device="cpu"), base("tiny-gpt2")):
        with pytest.raises(ValueError, match="trained on another base: its"):
            load_adapter(wrong, tmp_path / "a")
        assert not hasattr(wrong, "peft_config")
    load_adapter(other, tmp_path / "a")


def test_nothing_is_overwritten_unless_asked(tmp_path):
    fingerprint = base_fingerprint(base())
    save_adapter(adapted(base()), tmp_path / "a", base=fingerprint)
    (tmp_path / "a" / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        save_adapter(adapted(base()), tmp_path / "a", base=fingerprint)
    assert (tmp_path / "a" / "note.txt").exists()
    save_adapter(adapted(base()), tmp_path / "a", base=fingerprint, overwrite=True)
    assert json.loads((tmp_path / "a" / "base_model.json").read_text()) == {
        "fingerprint": fingerprint
    }
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_replacement_that_fails_leaves_the_old_adapter(tmp_path, monkeypatch):
    save_adapter(adapted(base()), tmp_path / "a", base="old")
    replace = os.replace

    def failing(source, target):
        if Path(source).name.startswith(".a-") and not Path(source).name.endswith("-replaced"):
            raise OSError("the disk went away")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="went away"):
        save_adapter(adapted(base()), tmp_path / "a", base="new", overwrite=True)
    assert json.loads((tmp_path / "a" / "base_model.json").read_text()) == {"fingerprint": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_training_goes_on_from_a_loaded_adapter(tmp_path):
    save_adapter(adapted(base()), tmp_path / "a", base=base_fingerprint(base()))
    frozen = load_adapter(base(), tmp_path / "a")
    assert not [n for n, p in frozen.named_parameters() if p.requires_grad]
    model = load_adapter(base(), tmp_path / "a", trainable=True)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert all("lora_" in n for n, p in model.named_parameters() if p.grad is not None)
    assert [n for n, p in model.named_parameters() if p.grad is not None]


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="does not load in a fresh process"):
        check_merged(tmp_path, base(), IDS)
    with pytest.raises(ValueError, match="still has adapters"):
        save_merged(adapted(base()), tmp_path / "m", tokenizer=None)
    with pytest.raises(ValueError, match="holds no adapter"):
        load_adapter(base(), tmp_path)
    with pytest.raises(ValueError, match="has no adapters to save"):
        save_adapter(base(), tmp_path / "a", base="x")
    save_adapter(adapted(base()), tmp_path / "a", base=base_fingerprint(base()))
    with pytest.raises(ValueError, match="has adapters already"):
        load_adapter(adapted(base()), tmp_path / "a")
