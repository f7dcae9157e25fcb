"""Predicted and measured peaks of one training step, over small models of many families.

python -m benchmarks.family_predictions               some minutes of one core

Each row is a plain step and one with all blocks checkpointed, in fp32 on the CPU: the same `build`
is predicted, on tensors without data, and then measured. The models are those of `make survey`.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.record import keep
from recipes_lib.core.measure import measure
from recipes_lib.core.predict import Build, predict
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.report.ladders.memory import ReadyStep
from tests.families.configs import VOCABULARY, quiet, tiny_config

BATCH = (2, 128)  # rows, and tokens of each
# By the name of its configuration.
FAMILIES = """
Llama Mistral Qwen2 Qwen3 Qwen3Moe Qwen3Next DeepseekV3 Llama4Text Mixtral GptOss Phi Phi3 Falcon
GPTNeoX GPTJ Glm Glm4 Bloom OPT GPT2 Gemma Gemma2 Gemma3Text Cohere Cohere2 Exaone4 Granite
GraniteMoe Olmo Olmo2 Olmoe Starcoder2 StableLm Nemotron SmolLM3 Ministral Mamba Mamba2 Jamba Lfm2
Mpt Bamba FalconH1
"""


def build_of(family: str, *, checkpointed: bool) -> Build:
    """`build` of `predict`: AdamW on all weights of a small model."""
    ids = torch.randint(0, VOCABULARY, BATCH)  # [B, S]
    name = getattr(transformers, f"{family}Config").model_type

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def build() -> tuple[Any, torch.optim.Optimizer, Any]:
        with quiet():
            config = tiny_config(name)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.train()
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


def main() -> None:
    """Compare all families, print each, and keep them."""
    torch.set_num_threads(1)
    rows = []
    for family in FAMILIES.split():
        rows.append(compare(family))
        print(rows[-1], flush=True)
    rows_and_tokens = {"batch_rows": BATCH[0], "batch_tokens": BATCH[1]}
    print(keep("family_predictions", rows_and_tokens | {"rows": rows}))


if __name__ == "__main__":
    main()
