"""Recipes and families for tests of predictions: each pair is a `build` of `predict`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers

from recipes_lib.attention.block_sparse import apply_block_sparse
from recipes_lib.attention.flash import apply_flash_attention
from recipes_lib.attention.head_groups import apply_head_groups
from recipes_lib.attention.sliding_window import apply_sliding_window
from recipes_lib.core.data.tokens_and_labels import IGNORED
from recipes_lib.core.predict import Build
from recipes_lib.fine_tuning.completion_only_loss import completion_only_loss
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.layer_streaming import apply_layer_streaming
from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.optimizer_offload import offload_optimizer
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.mixed_precision import mixed_precision
from recipes_lib.precision.pure_bf16 import bf16_adamw
from recipes_lib.precision.sixteen_bit_adam import sixteen_bit_adamw
from recipes_lib.training.gradient_accumulation import accumulate_gradients
from recipes_lib.training.muon import muon_adamw

ROWS, TOKENS = 2, 64

# --- families -------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": 256},
    "gemma2": {},
    "gemma3_text": {"sliding_window": 32},  # fewer than tokens
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    "bamba": {
        "attn_layer_indices": [1, 3],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
    },
    "mistral": {"sliding_window": 32},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "phi3": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
}


def model_of(family: str, dtype: torch.dtype, **sizes: Any) -> Any:
    """A small model of a family in train mode, always with the same weights."""
    torch.manual_seed(0)
    options = SIZES | FAMILIES[family] | sizes
    config = transformers.AutoConfig.for_model(family, **options)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


# --- steps ----------------------------------------------------------------------------------------

Step = Callable[[Any, Any], Any]
Batch = dict[str, torch.Tensor]


def batch_of(rows: int = ROWS, tokens: int = TOKENS) -> Batch:
    ids = torch.randint(3, 512, (rows, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def plain_step(batch: Batch, *, clip: bool = False, **inputs: torch.Tensor) -> Step:
    def step(model: Any, optimizer: Any) -> float:
        loss = model(**batch, **inputs, use_cache=False).loss
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def packed_step(batch: Batch) -> Step:
    """Two documents in each row."""
    rows, tokens = batch["input_ids"].shape
    positions = torch.arange(tokens // 2).repeat(2).expand(rows, -1).contiguous()
    return plain_step(batch, position_ids=positions)


def accumulated_step(batch: Batch) -> Step:
    def step(model: Any, optimizer: Any) -> float:
        loss = accumulate_gradients(model, batch, micro_batches=2)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def answers_step(batch: Batch) -> Step:
    """The second half of each row carries loss."""
    labels = batch["labels"].clone()
    labels[:, : labels.shape[1] // 2] = IGNORED
    answers = {"input_ids": batch["input_ids"], "labels": labels}

    def step(model: Any, optimizer: Any) -> float:
        loss = completion_only_loss(model, answers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def offloaded_step(batch: Batch, *, to: str) -> Step:
    plain = plain_step(batch)

    def step(model: Any, optimizer: Any) -> float:
        with offload_activations(model, to=to):
            return plain(model, optimizer)

    return step


def mixed_step(batch: Batch, *, dtype: torch.dtype = torch.bfloat16) -> Step:
    precision = mixed_precision(dtype=dtype)

    def step(model: Any, optimizer: Any) -> float:
        with precision.autocast():
            loss = model(**batch, use_cache=False).loss
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        return loss.item()

    return step


# --- recipes --------------------------------------------------------------------------------------


def adamw(model: Any, **options: Any) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=2e-5, **options)


fused_adamw = partial(adamw, fused=True)


@dataclass(frozen=True)
class Recipe:
    """What changes the model, in this order; its optimizer; and a step for a batch."""

    changes: tuple[Callable[[Any], Any], ...] = ()
    optimizer: Callable[[Any], Any] = fused_adamw
    step: Callable[[Batch], Step] = plain_step
    dtype: torch.dtype = torch.float32


def build_of(family: str, recipe: Recipe, **sizes: Any) -> Build:
    """`build` of `predict`; `sizes` are those of the configuration."""
    batch = batch_of()  # outside, as data are: a step without data knows the values of its tokens

    def build() -> tuple[Any, Any, Step]:
        model = model_of(family, recipe.dtype, **sizes)
        for change in recipe.changes:
            model = change(model)
        return model, recipe.optimizer(model), recipe.step(batch)

    return build


def with_eager_attention(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


def checkpointed_by_hugging_face(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


checkpointed = apply_activation_checkpointing
lora = partial(apply_lora, rank=4, alpha=8)
qlora = partial(apply_qlora, rank=4, alpha=8)
chunked = partial(apply_chunked_cross_entropy, chunk_size=16)
tiled = partial(apply_tiled_mlp, tile_size=16)  # eight: a dry step makes one of the middle ones
tiled_norms = partial(tiled, norms=True)
nested = partial(apply_nested_checkpointing, group=2)
sparse = partial(apply_block_sparse, block_size=16, local=3, global_blocks=1)
in_backward = partial(apply_optimizer_in_backward, lr=2e-5, fused=True)
eight_bits = partial(eight_bit_adamw, lr=2e-5)
pure = partial(bf16_adamw, lr=2e-5)

RECIPES = {
    "baseline": Recipe(),
    "for-loop AdamW, clipped": Recipe(
        optimizer=partial(adamw, foreach=False), step=partial(plain_step, clip=True)
    ),
    "gradient accumulation": Recipe(step=accumulated_step),
    "foreach AdamW": Recipe(optimizer=partial(adamw, foreach=True)),
    "accumulation, checkpointed": Recipe((checkpointed,), step=accumulated_step),
    "checkpointing": Recipe((checkpointed,)),
    "every second block checkpointed": Recipe((partial(checkpointed, every=2),)),
    "checkpointing by Hugging Face": Recipe((checkpointed_by_hugging_face,)),
    "checkpointing, chunked loss": Recipe((checkpointed, chunked)),
    "selective checkpointing": Recipe((partial(checkpointed, mode="selective"),)),
    "nested checkpointing": Recipe((nested,)),
    "activations on disk": Recipe(step=partial(offloaded_step, to="disk")),
    "bf16 autocast": Recipe(step=mixed_step),
    "bf16 autocast, checkpointed": Recipe((checkpointed,), step=mixed_step),
    "bf16 weights": Recipe(dtype=torch.bfloat16),
    "fp16 autocast": Recipe(step=partial(mixed_step, dtype=torch.float16)),
    "optimizer in backward": Recipe(optimizer=in_backward),
    "in backward, checkpointed": Recipe((checkpointed,), in_backward),
    "optimizer offload": Recipe(optimizer=partial(offload_optimizer, lr=2e-5, allow_cpu=True)),
    "16-bit AdamW": Recipe((checkpointed,), partial(sixteen_bit_adamw, lr=2e-5)),
    "8-bit AdamW": Recipe((checkpointed,), eight_bits),
    "Muon": Recipe((checkpointed,), partial(muon_adamw, lr=2e-5)),
    "bf16, stochastic rounding": Recipe(
        optimizer=partial(pure, rounding="stochastic"), dtype=torch.bfloat16
    ),
    "bf16, master weights": Recipe(
        optimizer=partial(pure, rounding="master"), dtype=torch.bfloat16
    ),
    "LoRA": Recipe((lora,)),
    "LoRA, checkpointed": Recipe((lora, checkpointed)),
    "LoRA, chunked loss, bf16": Recipe((lora, chunked), step=mixed_step),
    "QLoRA": Recipe((qlora,)),
    "QLoRA, checkpointed": Recipe((qlora, checkpointed)),
    "QLoRA, streamed": Recipe((qlora, chunked, partial(apply_layer_streaming, to="disk"))),
    "loss of answers": Recipe(step=answers_step),
    "chunked loss": Recipe((chunked,)),
    "tiled MLP": Recipe((tiled,)),
    "tiled MLP and norms": Recipe((tiled_norms,)),
    "head groups": Recipe((apply_head_groups,)),
    "sliding window": Recipe((partial(apply_sliding_window, window=32, sinks=4),)),
    "block sparse": Recipe((sparse,)),
    "flash attention": Recipe((apply_flash_attention,)),
    "eager attention": Recipe((with_eager_attention,)),
    "packing": Recipe(step=packed_step),
    "QLoRA, all of it": Recipe((qlora, checkpointed, chunked), eight_bits, mixed_step),
    "long texts": Recipe((chunked, tiled_norms, nested), in_backward),
}
