"""Saved adapters give the same logits on their own base, and are refused by every other."""

import copy
import json
import os
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape
from recipes_lib.core.model.kept_in_fp32 import kept_in_fp32
from recipes_lib.fine_tuning.adapter_files import (
    base_fingerprint,
    check_merged,
    load_adapter,
    load_trained_tensors,
    predicted_adapter_bytes,
    save_adapter,
    save_merged,
    save_trained_tensors,
)
from recipes_lib.fine_tuning.lora import apply_lora, merge_lora
from recipes_lib.fine_tuning.qlora import apply_qlora, merge_qlora
from tests.families.configs import quiet, tiny_model

IDS = torch.arange(1, 20)[None]


def base(shape="tiny-llama", seed=0):
    torch.manual_seed(seed)
    return model_of_shape(shape, device="cpu")


def adapted(model, apply=apply_lora):
    """With adapters as after training: the second matrix of each starts at zero."""
    model = apply(model, rank=4)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS, use_cache=False).logits.float()


# --- saved and loaded ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-gpt2"])  # linear layers, and Conv1D
def test_saved_adapters_on_a_fresh_base_give_the_same_logits(shape, tmp_path):
    fingerprint = base_fingerprint(base(shape))
    model = adapted(base(shape))
    size = save_adapter(model, tmp_path / "a", base=fingerprint)
    again = load_adapter(base(shape), tmp_path / "a")
    assert torch.equal(logits(again), logits(model))
    assert (logits(model) - logits(base(shape))).abs().max() > 1e-2
    assert 0 <= size - predicted_adapter_bytes(model) < 20_000


def test_a_dictionary_of_the_trained_tensors_is_the_same_adapter(tmp_path):
    """The idea by hand and the folder give the same model; no weight of the base is saved."""
    model = adapted(base())
    save_adapter(model, tmp_path / "a", base=base_fingerprint(base()))
    save_trained_tensors(model, tmp_path / "trained.pt")
    by_hand = apply_lora(base(), rank=4)
    load_trained_tensors(by_hand, tmp_path / "trained.pt")
    assert torch.equal(logits(by_hand), logits(load_adapter(base(), tmp_path / "a")))
    names = torch.load(tmp_path / "trained.pt")
    assert names
    assert all("lora_" in name for name in names)


def test_training_goes_on_from_a_loaded_adapter(tmp_path):
    save_adapter(adapted(base()), tmp_path / "a", base=base_fingerprint(base()))
    frozen = load_adapter(base(), tmp_path / "a")
    assert not [name for name, p in frozen.named_parameters() if p.requires_grad]
    model = load_adapter(base(), tmp_path / "a", trainable=True)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    assert trained
    assert all("lora_" in name for name in trained)


# --- the base -----------------------------------------------------------------------------------


def test_fingerprint_is_of_the_model_not_of_its_dtype():
    assert base_fingerprint(base()) == base_fingerprint(base().to(torch.bfloat16))
    others = [base(), base(seed=1), base("tiny-mistral"), base("tiny-qwen3")]
    assert len({base_fingerprint(model) for model in others}) == 4
    for apply in (apply_lora, apply_qlora):
        with pytest.raises(ValueError, match="hide the base"):
            base_fingerprint(adapted(base(), apply))


def test_an_adapter_of_another_base_is_refused(tmp_path):
    save_adapter(adapted(base()), tmp_path / "a", base=base_fingerprint(base()))
    other = base(seed=1)  # the same shapes: peft loads it without a word
    before = logits(other)
    with pytest.raises(ValueError, match="trained on another base"):
        load_adapter(other, tmp_path / "a")
    assert torch.equal(logits(other), before)
    assert not hasattr(other, "peft_config")


def test_a_flipped_bit_of_an_adapter_is_found(tmp_path):
    """safetensors has no checksums: another adapter was loaded without a word."""
    save_adapter(adapted(base()), tmp_path / "a", base=base_fingerprint(base()))
    file = tmp_path / "a" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is damaged"):
        load_adapter(base(), tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_model.safetensors", b""),
        ("adapter_model.safetensors", None),  # cut in the middle
        ("adapter_config.json", b'{"r": 4, '),
        ("base_model.json", b""),
        ("base_model.json", b"[]"),
    ],
)
def test_a_damaged_adapter_is_named(name, content, tmp_path):
    """The mistake: errors of three libraries, of which none says which file is cut off."""
    save_adapter(adapted(base()), tmp_path / "a", base=base_fingerprint(base()))
    file = tmp_path / "a" / name
    if name.endswith(".safetensors"):  # as others write a folder, without a checksum
        (tmp_path / "a" / "base_model.json").unlink()
    if content is None:
        content = file.read_bytes()[: file.stat().st_size // 2]
    file.write_bytes(content)
    model = base()
    with pytest.raises(ValueError, match=f"{name} is damaged or not complete"):
        load_adapter(model, tmp_path / "a")
    assert not hasattr(model, "peft_config")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError):
        load_adapter(model, tmp_path / "a")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"peft_type": None}, "has the peft_type None, which the installed peft does not know"),
        ({"peft_type": "MAGIC"}, "has the peft_type 'MAGIC'"),
        ({"r": None}, "adapter_config.json is damaged"),
        ({"r": 3}, "has rank 4, and adapter_config.json says r=3"),
        ({"target_modules": None}, "name different adapters"),  # peft then takes two layers of all
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_at_once(changes, error, tmp_path):
    """The mistake: KeyError or RuntimeError of peft, which then leaves adapters on the model."""
    save_adapter(adapted(base()), tmp_path / "a", base=base_fingerprint(base()))
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    model = base()
    with pytest.raises(ValueError, match=error):
        load_adapter(model, tmp_path / "a")
    assert not hasattr(model, "peft_config")


def test_a_file_with_some_of_the_weights_is_refused(tmp_path):
    """peft warns, and the rest stays as it was drawn: another model, without an error."""
    save_adapter(adapted(base()), tmp_path / "a", base=base_fingerprint(base()))
    (tmp_path / "a" / "base_model.json").unlink()  # as others write it, without a checksum
    file = tmp_path / "a" / "adapter_model.safetensors"
    weights = load_file(file)
    lost = sorted(weights)[0]
    save_file({name: weight for name, weight in weights.items() if name != lost}, file)
    model = base()
    before = logits(model)
    model.train()
    with pytest.raises(ValueError, match=f"different adapters, 1 of them, such as {lost}"):
        load_adapter(model, tmp_path / "a")
    assert all(parameter.requires_grad for parameter in model.parameters()), "peft froze it"
    assert all(module.training for module in model.modules())
    assert torch.equal(logits(model), before)
    save_file(weights, file)
    load_adapter(model, tmp_path / "a")  # nothing is left of the attempt


def test_an_adapter_without_a_fingerprint_is_compared_by_its_shapes(tmp_path):
    """Written by someone else. peft itself would stop halfway, with adapters on the model."""
    save_adapter(adapted(base()), tmp_path / "a", base="unknown")
    (tmp_path / "a" / "base_model.json").unlink()
    wider = model_of_shape("smollm2-135m", layers=1, device="cpu")
    for wrong in (wider, base("tiny-gpt2")):
        with pytest.raises(ValueError, match="trained on another base: its"):
            load_adapter(wrong, tmp_path / "a")
        assert not hasattr(wrong, "peft_config")
    load_adapter(base(seed=1), tmp_path / "a")


MIXTURE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 2,
}


def mixture():
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTURE))


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (base, peft.LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True)),  # bias [out]
        # One pair holds those of all experts.
        (mixture, peft.LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj"])),
        # Adapters on layers that the base has not yet.
        (base, peft.LoraConfig(target_modules=["q_proj"], layer_replication=[[0, 2], [1, 2]])),
        (base, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
        (base, peft.PromptTuningConfig(num_virtual_tokens=2)),
    ],
    ids=["bias", "experts", "replication", "ia3", "prompt"],
)
def test_every_kind_that_is_saved_is_loaded(make, config, tmp_path):
    """The mistake: checks of LoRA's plain pairs, which refused what save_adapter had written."""
    config.task_type = "CAUSAL_LM"
    fingerprint = base_fingerprint(make())
    model = peft.get_peft_model(make(), config)
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    save_adapter(model, tmp_path / "a", base=fingerprint)
    loaded = load_adapter(make(), tmp_path / "a")
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(ValueError, match="trained on another base"):
        load_adapter(base(seed=1), tmp_path / "a")


# --- the folder ---------------------------------------------------------------------------------


def fingerprint_in(folder):
    return json.loads((folder / "base_model.json").read_text())["fingerprint"]


def test_nothing_is_overwritten_unless_asked(tmp_path):
    model = adapted(base())
    save_adapter(model, tmp_path / "a", base="old")
    (tmp_path / "a" / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        save_adapter(model, tmp_path / "a", base="new")
    assert (tmp_path / "a" / "note.txt").exists()
    save_adapter(model, tmp_path / "a", base="new", overwrite=True)
    assert not (tmp_path / "a" / "note.txt").exists()
    assert fingerprint_in(tmp_path / "a") == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"], "nothing is left beside it"


def test_a_replacement_that_fails_leaves_the_old_adapter(tmp_path, monkeypatch):
    model = adapted(base())
    save_adapter(model, tmp_path / "a", base="old")
    replace = os.replace

    def failing(source, target):
        name = Path(source).name
        if name.startswith(".a-") and not name.endswith("-replaced"):
            raise OSError("the disk went away")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="went away"):
        save_adapter(model, tmp_path / "a", base="new", overwrite=True)
    assert fingerprint_in(tmp_path / "a") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# --- merged -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def merged_lora(tmp_path_factory):
    """A folder with a merged model in 16 bits, the model before the cast, and after it."""
    folder = tmp_path_factory.mktemp("merged") / "model"
    full = merge_lora(adapted(base()))
    cast = copy.deepcopy(full)
    save_merged(cast, folder, tokenizer=load_tokenizer())
    return folder, full, cast


def test_merged_into_16_bits_and_loaded_in_a_fresh_process(merged_lora):
    folder, full, cast = merged_lora
    assert (logits(full) - logits(adapted(base()))).abs().max() < 1e-4
    full.train()
    assert 0 < check_merged(folder, full, IDS) < 0.03  # bf16 keeps two to three digits
    assert full.training
    again = load_model(str(folder), device="cpu", dtype=torch.bfloat16)
    assert torch.equal(logits(cast), logits(again)), "the rotary frequencies keep fp32"
    assert (folder / "tokenizer.json").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_family_keeps_in_fp32_is_saved_so(dtype, tmp_path):
    """The mistake: a model that was cast as a whole left its routers in bf16 in the file."""
    with quiet():
        model = tiny_model("hy_v4").to(torch.bfloat16)
        save_merged(model, tmp_path / "m", tokenizer=load_tokenizer(), dtype=dtype)
    saved = load_file(tmp_path / "m" / "model.safetensors")
    # A few are renamed in the file.
    in_fp32 = [name for name in kept_in_fp32(model, dtype) if name in saved]
    assert in_fp32
    assert all(saved[name].dtype is torch.float32 for name in in_fp32)


def fresh_process_that(monkeypatch, tmp_path, body):
    """A program in the place of Python; it has folder, rows and file as "$3" to "$5"."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def test_another_model_in_the_folder_is_far_away(monkeypatch, tmp_path):
    torch.save(logits(base(seed=3)), tmp_path / "logits")
    fresh_process_that(monkeypatch, tmp_path, f'cp "{tmp_path}/logits" "$5"')
    assert check_merged(tmp_path, base(), IDS) > 0.5
    assert check_merged(tmp_path, base(seed=3), IDS) == 0


def test_merged_from_4_bits(tmp_path):
    model = adapted(base(), apply_qlora)
    for layer in model.modules():
        if hasattr(layer, "compute_dtype"):
            layer.compute_dtype = torch.float32
    expected = logits(model)
    merged = merge_qlora(model)
    assert (logits(merged) - expected).abs().max() < 1e-4
    save_merged(merged, tmp_path / "merged", tokenizer=load_tokenizer())
    again = load_model(str(tmp_path / "merged"), device="cpu", dtype=torch.bfloat16)
    assert torch.equal(logits(again), logits(merged)), "a plain model, without a quantized layer"


# --- bad input ----------------------------------------------------------------------------------


def test_a_folder_that_does_not_load(tmp_path, monkeypatch):
    fresh_process_that(monkeypatch, tmp_path, "echo Traceback >&2\necho no weights >&2\nexit 1")
    with pytest.raises(ValueError, match="does not load in a fresh process: no weights"):
        check_merged(tmp_path, base(), IDS)
    fresh_process_that(monkeypatch, tmp_path, "exit 9")
    with pytest.raises(ValueError, match="it ended with 9"):
        check_merged(tmp_path, base(), IDS)


def test_bad_input(tmp_path, merged_lora):
    folder, _, cast = merged_lora
    with pytest.raises(ValueError, match="is there already"):
        save_merged(cast, folder, tokenizer=None)
    whole = base()  # fp32, which the save would round
    with pytest.raises(ValueError, match="tokenizer=None: give the one of the base model"):
        save_merged(whole, tmp_path / "m", tokenizer=None)
    assert whole.dtype == torch.float32
    with pytest.raises(ValueError, match="still has adapters"):
        save_merged(adapted(base()), tmp_path / "m", tokenizer=None)
    with pytest.raises(ValueError, match="holds no adapter"):
        load_adapter(base(), tmp_path)
    with pytest.raises(ValueError, match="has no adapters to save"):
        save_adapter(base(), tmp_path / "a", base="x")
    save_adapter(adapted(base()), tmp_path / "a", base=base_fingerprint(base()))
    with pytest.raises(ValueError, match="has adapters already"):
        load_adapter(adapted(base()), tmp_path / "a")
