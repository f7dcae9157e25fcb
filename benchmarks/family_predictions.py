"""Predicted and measured peaks of one training step, over small models of many families.

python -m benchmarks.family_predictions               all families, some minutes of one core
python -m benchmarks.family_predictions Phi3 Mixtral  these

Each row is a plain step and one with all blocks checkpointed, in fp32 on the CPU: the bytes that
`budget_of` predicts, over those that the account of live tensors finds. It writes
runs/family_predictions.json and prints a table.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.study import save
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.runs import provenance, runs_dir
from recipes_lib.core.model.sizes import weight_bytes
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.memory.activation_checkpointing import (
    apply_activation_checkpointing,
    estimate_activation_checkpointing,
)

FILE = "family_predictions.json"
SHAPE = Shape(batch=2, seq=128)
WINDOW = 32  # below the length of the rows

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOWED = {"sliding_window": WINDOW}
NARROW_HEADS = {"head_dim": 16}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 32,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# What each family's configuration has beside SIZES.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": WINDOWED,
    "Qwen2": {},
    "Qwen3": NARROW_HEADS,
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "Qwen3Next": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "head_dim": 16,
    },
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 8,
    },
    "Llama4Text": {
        "intermediate_size": 96,
        "intermediate_size_mlp": 160,
        "num_local_experts": 4,
        "head_dim": 16,
        "attention_chunk_size": WINDOW,
    },
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": WINDOW},
    "Phi": {},
    "Phi3": {"sliding_window": None},
    "Falcon": {"new_decoder_architecture": False, "multi_query": True},
    "GPTNeoX": {},
    "GPTJ": {"n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8, **NO_DROPOUT},
    "Glm": NARROW_HEADS,
    "Glm4": NARROW_HEADS,
    "Bloom": {"n_layer": 4, "n_head": 4},
    "OPT": {"ffn_dim": 160, "word_embed_proj_dim": 64, "dropout": 0.0},
    "GPT2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 160, **NO_DROPOUT},
    "Gemma": NARROW_HEADS,
    "Gemma2": NARROW_HEADS | WINDOWED,
    "Gemma3Text": NARROW_HEADS | WINDOWED,
    "Cohere": {},
    "Cohere2": WINDOWED,
    "Exaone4": WINDOWED,
    "Granite": {},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmo": {},
    "Olmo2": {},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Starcoder2": {"sliding_window": None},
    "StableLm": {},
    "Nemotron": {},
    "SmolLM3": {},
    "Ministral": NARROW_HEADS | WINDOWED,
    "Mamba": {"state_size": 8},
    "Mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 1,
        "expand": 2,
        "chunk_size": 32,
    },
    "Jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "Lfm2": {},
    "Mpt": {"d_model": 64, "n_heads": 4, "n_layers": 4},
    "Bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "FalconH1": MAMBA | {"mamba_d_ssm": 128, "head_dim": 16},
}


def small_model(family: str) -> Any:
    """A model of the family with random weights, on the CPU."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def measured_peak(model: Any, shape: Shape) -> int:
    """Peak bytes of the second AdamW step, beside what others keep alive."""
    ids = torch.randint(0, SIZES["vocab_size"], (shape.batch, shape.seq))  # [B, S]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    with PeakMemory() as before:
        pass
    for _ in range(2):  # the first step makes the optimizer's states
        with PeakMemory() as memory:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak - before.peak + weight_bytes(model)


def compare(family: str, shape: Shape = SHAPE) -> dict[str, Any]:
    """Predicted and measured bytes of both steps, and where the prediction comes from."""
    model = small_model(family)
    plain = budget_of(model, shape)
    checkpointed = estimate_activation_checkpointing(plain, model, shape)
    row = {
        "family": family,
        "source": plain.source,
        "plain_predicted": plain.peak,
        "plain_measured": measured_peak(model, shape),
        "checkpointed_predicted": checkpointed.peak,
    }
    apply_activation_checkpointing(model)
    row["checkpointed_measured"] = measured_peak(model, shape)
    return row


def error(row: dict[str, Any], step: str) -> float:
    """The prediction over the measurement, less 1; `step` is "plain" or "checkpointed"."""
    return row[f"{step}_predicted"] / row[f"{step}_measured"] - 1


def main(arguments: list[str] | None = None) -> Path:
    """Compare all families, print the table, write the file, and return where it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| family | plain step | checkpointed | predicted |")
    print("| :-- | --: | --: | :-- |")
    rows = []
    for family in options.families or FAMILIES:
        row = compare(family)
        rows.append(row)
        plain = f"{error(row, 'plain'):+.1%}"
        checkpointed = f"{error(row, 'checkpointed'):+.1%}"
        print(f"| {family} | {plain} | {checkpointed} | {row['source']} |", flush=True)
    path = runs_dir() / FILE
    save(path, provenance() | {"rows": rows})
    return path


if __name__ == "__main__":
    main()
