"""Saved adapters give the same logits on their own base, and are refused by every other."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape
from recipes_lib.core.model.loading import kept_in_fp32
from recipes_lib.core.model.vocabulary import grow_vocabulary, stop_at, stops_of
from recipes_lib.fine_tuning.adapter_files import (
    base_fingerprint,
    check_merged,
    load_adapter,
    load_trained_tensors,
    save_adapter,
    save_merged,
    save_trained_tensors,
)
from recipes_lib.fine_tuning.lora import apply_lora, merge_lora
from tests.families.configs import quiet, tiny_model
from tests.small_models import train_a_little

WEIGHTS = "adapter_model.safetensors"
IDS = torch.arange(1, 20)[None]


def base(shape="tiny-llama", seed=0):
    torch.manual_seed(seed)
    return model_of_shape(shape, device="cpu")


def adapted(model, apply=apply_lora):
    """With adapters as after training."""
    model = apply(model, rank=4)
    torch.manual_seed(5)
    return train_a_little(model, std=0.2)


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS, use_cache=False).logits.float()


def test_saved_adapters_on_a_fresh_base_are_those_that_were_saved_by_hand(tmp_path):
    """The mistake: an adapter that is saved before its last step, or loaded onto other layers."""
    model = adapted(base())
    size = save_adapter(model, tmp_path / "a", base=base_fingerprint(base()))
    save_trained_tensors(model, tmp_path / "trained.pt")
    by_hand = apply_lora(base(), rank=4)
    load_trained_tensors(by_hand, tmp_path / "trained.pt")
    again = load_adapter(base(), tmp_path / "a")
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(logits(by_hand), logits(model))
    adapters = sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name)
    assert adapters <= size < adapters + 20_000, "no weight of the base is saved"


def test_training_goes_on_from_a_loaded_adapter(tmp_path):
    """The mistake: the base trains as well, or nothing does."""
    save_adapter(adapted(base()), tmp_path / "a", base=base_fingerprint(base()))
    frozen = load_adapter(base(), tmp_path / "a")
    assert not [name for name, p in frozen.named_parameters() if p.requires_grad]
    model = load_adapter(base(), tmp_path / "a", trainable=True)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)


def test_fingerprint_is_of_the_model_not_of_its_dtype():
    """The mistake: an adapter that was trained in bf16 is refused by its own base in fp32."""
    assert base_fingerprint(base()) == base_fingerprint(base().to(torch.bfloat16))
    others = [base(), base(seed=1), base("tiny-mistral"), base("tiny-qwen3")]
    assert len({base_fingerprint(model) for model in others}) == 4
    with pytest.raises(ValueError, match="hide the base"):
        base_fingerprint(adapted(base()))


def test_an_adapter_of_another_base_is_refused(tmp_path):
    """The mistake: the same shapes, which peft loads without a word."""
    save_adapter(adapted(base()), tmp_path / "a", base=base_fingerprint(base()))
    other = base(seed=1)
    with pytest.raises(ValueError, match="trained on another base"):
        load_adapter(other, tmp_path / "a")
    assert not hasattr(other, "peft_config")


def test_a_file_with_some_of_the_weights_is_refused(tmp_path):
    """The mistake: peft warns, and the rest stays as it was drawn: another model."""
    save_adapter(adapted(base()), tmp_path / "a", base=base_fingerprint(base()))
    file = tmp_path / "a" / "adapter_model.safetensors"
    weights = load_file(file)
    lost = sorted(weights)[0]
    save_file({name: weight for name, weight in weights.items() if name != lost}, file)
    model = base().train()
    with pytest.raises(ValueError, match=r"is as it was: .*missing adapter keys"):
        load_adapter(model, tmp_path / "a")
    assert all(parameter.requires_grad for parameter in model.parameters()), "peft froze it"
    save_file(weights, file)
    load_adapter(model, tmp_path / "a")  # nothing is left of the attempt


def test_added_tokens_and_the_end_mark_are_found_again_on_a_fresh_base(tmp_path):
    """The mistakes: the rows of new tokens stay as they were drawn, or the whole table is saved;
    and the merged model writes on behind the end mark that it has learnt.
    """
    model = base()
    fingerprint = base_fingerprint(model)
    tokenizer = load_tokenizer()
    grow_vocabulary(model, {"<a>": 129})
    stop_at(model, tokenizer, [17])
    model = adapted(model)
    rows = [p for name, p in model.named_parameters() if "trainable_tokens_delta" in name]
    assert rows and all(p.requires_grad and len(p) == 1 for p in rows)
    with torch.no_grad():
        for parameter in rows:
            parameter.normal_()
    save_adapter(model, tmp_path / "a", base=fingerprint, tokenizer=tokenizer)
    assert not any("embed_tokens.weight" in name for name in load_file(tmp_path / "a" / WEIGHTS))

    again = load_adapter(base(), tmp_path / "a")
    ids = torch.tensor([[3, 129, 5]])
    assert torch.equal(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    merged = merge_lora(again)
    save_merged(merged, tmp_path / "m", tokenizer=load_tokenizer(), dtype=torch.float32)
    assert check_merged(tmp_path / "m", merged, ids) < 1e-6
    assert stops_of(load_model(str(tmp_path / "m"), device="cpu"))[0] == 17
    assert load_tokenizer(str(tmp_path / "m")).eos_token_id == 17


def test_nothing_is_overwritten_unless_asked(tmp_path):
    """The mistake: a second run deletes the adapter of the first; or files of both are mixed."""
    model = adapted(base())
    save_adapter(model, tmp_path / "a", base="old")
    (tmp_path / "a" / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        save_adapter(model, tmp_path / "a", base="new")
    assert (tmp_path / "a" / "note.txt").exists()
    save_adapter(model, tmp_path / "a", base="new", overwrite=True)
    assert not (tmp_path / "a" / "note.txt").exists()
    assert json.loads((tmp_path / "a" / "base_model.json").read_text())["fingerprint"] == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"], "nothing is left beside it"


# --- merged -------------------------------------------------------------------------------------


def test_merged_into_16_bits_and_loaded_again(tmp_path):
    """The mistake: rotary frequencies are rounded with the weights; or a file of another model."""
    full = merge_lora(adapted(base()))
    assert all(parameter.requires_grad for parameter in full.parameters())
    cast = copy.deepcopy(full)
    folder = tmp_path / "merged"
    save_merged(cast, folder, tokenizer=load_tokenizer())
    assert 0 < check_merged(folder, full, IDS) < 0.03  # bf16 keeps two to three digits
    assert check_merged(folder, base(seed=3), IDS) > 0.5
    again = load_model(str(folder), device="cpu", dtype=torch.bfloat16)
    assert torch.equal(logits(cast), logits(again))
    with pytest.raises(ValueError, match="still has adapters"):
        save_merged(adapted(base()), tmp_path / "m", tokenizer=load_tokenizer())


def test_what_a_family_keeps_in_fp32_is_saved_so(tmp_path):
    """The mistake: a model that was cast as a whole leaves its routers in bf16 in the file."""
    with quiet():
        model = tiny_model("hy_v4").to(torch.bfloat16)
        save_merged(model, tmp_path / "m", tokenizer=load_tokenizer())
    saved = load_file(tmp_path / "m" / "model.safetensors")
    # A few are renamed in the file.
    in_fp32 = [name for name in kept_in_fp32(model, torch.bfloat16) if name in saved]
    assert in_fp32
    assert all(saved[name].dtype is torch.float32 for name in in_fp32)
