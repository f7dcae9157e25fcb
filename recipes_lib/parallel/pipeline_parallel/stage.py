"""A stage of a pipeline: some blocks of a Hugging Face model in a row, as a module of their own.

Shapes: R rows of a micro-batch, S sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.model.causal_lm import decoder_blocks, trunk, without_adapters

# Families whose model is an embedding, equal blocks, a norm and an output layer, and nothing else.
# Others do something in between, as Gemma, which scales what comes out of the embedding.
FAMILIES_IN_STAGES = ("llama", "mistral", "qwen2", "qwen3")


class Stage(nn.Module):
    """Stage `number` of `stages`. The first has the embedding, the last norm and output layer."""

    def __init__(self, model: Any, number: int, stages: int) -> None:
        """Stage `number` of so many: its blocks, and an end of the model in the first and last."""
        super().__init__()
        causal = without_adapters(model)
        inner = trunk(model)
        blocks = decoder_blocks(model)
        size = len(blocks) // stages
        self.config = causal.config
        self.number = number
        self.rotary = inner.rotary_emb
        self.blocks = nn.ModuleList(blocks[number * size : (number + 1) * size])
        is_last = number == stages - 1
        self.embedding = inner.embed_tokens if number == 0 else None
        self.norm = inner.norm if is_last else None
        self.head = causal.lm_head if is_last else None
        self._whole_names = self._names_in(model)

    def forward(self, hidden: Tensor) -> Tensor:
        """Ids [R, S] in the first stage, hidden [R, S, D] in the others -> hidden, or logits."""
        from transformers.masking_utils import create_masks_for_generate

        # One row for all: the rotation is kept for backward.
        position_ids = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        rotation = self.rotary(hidden, position_ids)
        # What the model itself would give to its blocks: no mask at all where none is needed.
        masks = create_masks_for_generate(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=None,
            past_key_values=None,
            position_ids=position_ids,
        )
        for block in self.blocks:
            mask = masks
            if isinstance(masks, dict):  # the model has blocks with different kinds of attention
                mask = masks[self.config.layer_types[block.self_attn.layer_idx]]
            hidden = block(
                hidden,
                attention_mask=mask,
                position_ids=position_ids,
                position_embeddings=rotation,
                use_cache=False,
            )
        if self.head is not None:
            hidden = self.head(self.norm(hidden))  # [R, S, V]
        return hidden

    def whole_name(self, name: str) -> str:
        """The name in the whole model of this stage's parameter `name`."""
        return self._whole_names[name]

    def _names_in(self, model: Any) -> dict[str, str]:
        """The name in the whole model of each parameter of the stage."""
        modules = {module: name for name, module in model.named_modules()}
        names = {}
        for own, module in self.named_modules():
            for parameter, _ in module.named_parameters(recurse=False):
                names[f"{own}.{parameter}"] = f"{modules[module]}.{parameter}"
        return names


@torch.no_grad()
def drop_all_but(model: Any, stages: Iterable[nn.Module]) -> None:
    """Free the weights of all modules of `model` that are in none of the stages.

    They go to the meta device, which has shapes and no bytes. So a second pipeline, or a forward of
    the whole model, is noticed.
    """
    kept = {module for stage in stages for module in stage.modules()}
    for module in model.modules():
        if module in kept:
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            setattr(module, name, empty)


def require_family(model: Any) -> None:
    """Raise ValueError for a model that does more than its stages, or has no weights."""
    family = without_adapters(model).config.model_type
    if family not in FAMILIES_IN_STAGES:
        raise ValueError(
            f"a model of the family {family!r} cannot be cut into stages here: give one of "
            f"{', '.join(FAMILIES_IN_STAGES)}"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "this model has weights without values: a pipeline has its stages already, or it was "
            "built on the meta device; give a whole model with weights"
        )
