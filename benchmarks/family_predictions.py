"""Predicted and measured peaks of one training step, over small models of many families.

python -m benchmarks.family_predictions               all families, some minutes of one core
python -m benchmarks.family_predictions Phi3 Mixtral  these

Each row is a plain step and one with all blocks checkpointed, in fp32 on the CPU: the same `build`
is predicted, on tensors without data, and then measured. All of them together are kept in the
results.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.record import keep
from recipes_lib.core.measure import measure
from recipes_lib.core.predict import Build, predict
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.report.ladders.memory import ReadyStep

BATCH = (2, 128)  # rows, and tokens of each
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


def build_of(family: str, *, checkpointed: bool) -> Build:
    """`build` of `predict`: AdamW on all weights of a small model."""
    ids = torch.randint(0, SIZES["vocab_size"], BATCH)  # [B, S]

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def build() -> tuple[Any, torch.optim.Optimizer, Any]:
        model = small_model(family)
        if checkpointed:
            apply_activation_checkpointing(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), step

    return build


def measured_peak(build: Build) -> int:
    """Bytes of a step that has its states, without what others keep alive."""
    ready = ReadyStep(build)
    of_model = {"model": ready.model, "optimizer": ready.optimizer}
    measured = measure(ready.step, warmup=0, repeats=0, **of_model)
    return measured.peak_bytes - ready.alive_before


def compare(family: str) -> dict[str, Any]:
    """Predicted and measured bytes of both steps; or why there is no prediction."""
    row: dict[str, Any] = {"name": family}
    for way in ("plain", "checkpointed"):
        build = build_of(family, checkpointed=way == "checkpointed")
        row[f"{way}_measured_bytes"] = measured_peak(build)
        try:
            row[f"{way}_predicted_bytes"] = predict(build).peak
        except ValueError as error:
            row["refused"] = str(error)
    return row


def main(arguments: list[str] | None = None) -> None:
    """Compare all families, and print each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for family in options.families or FAMILIES:
        row = compare(family)
        rows.append(row)
        print(row, flush=True)
    if not options.families:
        rows_and_tokens = {"batch_rows": BATCH[0], "batch_tokens": BATCH[1]}
        print(keep("family_predictions", rows_and_tokens | {"rows": rows}))


if __name__ == "__main__":
    main()
