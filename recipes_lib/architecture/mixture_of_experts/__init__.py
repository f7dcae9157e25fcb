"""Mixture of experts: many feed-forward layers per block, of which each token goes through a few.

Problem    A feed-forward layer of twice the weights takes twice the time for each token.
Idea       A router picks k of E feed-forward layers for each token, and how much each counts:

               token -> router [E, D] -> softmax -> the k largest
               y = sum over the k of  weight * expert(x)

           A loop over experts makes 3 E small products. Sorted by expert, the rows of one expert
           lie next to each other, and one grouped product does the work of E:

               rows of   e0 e0 e0 | e1 | e3 e3 e3 e3     end of each group: 3 4 4 8
Saves      Time: a token costs what k experts cost, while all E have weights that learn.
Costs      Memory: weights, gradients and states of all E experts. And a third loss: without one
           that rewards balance the router soon picks the same few experts.
Use when   Training is limited by operations, and memory is there, or ranks that share the experts:
           apply_expert_parallel gives each rank E/N of them.
Not when   The model has to fit one card, or a batch is a few tokens: then most experts are read
           for one token each, and the reading takes the time.
In production   transformers does the grouped product by itself (`experts_implementation=
           "grouped_mm"`), and shares experts with `DistributedConfig(ep_size=N)`; Megatron-LM
           `--num-experts 128 --expert-model-parallel-size 8 --moe-grouped-gemm`.
Source     Shazeer et al., "Outrageously Large Neural Networks" (arXiv 1701.06538); Fedus et al.,
           "Switch Transformers" (arXiv 2101.03961); "Qwen3 Technical Report" (arXiv 2505.09388).

Shapes: T tokens, D hidden, E experts, k experts per token, F width of an expert, N ranks.

parallel  experts shared by ranks: tokens travel to them and back
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.mixins import mix_in
from recipes_lib.core.model.probe import proves

SPECIAL = ("has_bias", "is_transposed", "has_post_expert_norm")  # what transformers calls it
ALIGNMENT = 16  # bytes, of which the rows of a grouped product have to be a multiple

# --- the idea: what a learner can copy ------------------------------------------------------------


def looped_experts(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """x [T, D], chosen and shares [T, k], gate_up [E, 2F, D], down [E, D, F] -> [T, D]."""
    y = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)  # who has chosen this expert
        gate, up = (x[tokens] @ gate_up[expert].T).chunk(2, dim=-1)
        out = (nn.functional.silu(gate) * up) @ down[expert].T
        y = y.index_add(0, tokens, out * shares[tokens, places, None])
    return y


# --- the technique --------------------------------------------------------------------------------


@proves("exact")
def apply_grouped_experts(model: Any) -> Any:
    """Let all experts of a block compute in two grouped products, in place; returns `model`.

    Under autocast they compute in its dtype, which transformers' own grouped product does not.
    Where PyTorch has no grouped product for the device or the sizes, a loop over the sorted rows
    takes its place.
    """
    modules = experts_of(model)
    require_plain_experts(modules)
    for module in modules:
        mix_in(module, Grouped)
    return model


class Grouped:
    """What is mixed into the experts of a block."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """All experts at once: [T, D], k experts of each token [T, k] and shares -> [T, D]."""
        return grouped_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            gate=self._apply_gate,
        )


def grouped_experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate: Callable[[Tensor], Tensor],
) -> Tensor:
    """What `looped_experts` computes, with two products for all experts together."""
    count = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)  # rows of one expert next to each other
    rows = torch.bincount(chosen.flatten(), minlength=len(gate_up))
    ends = rows.cumsum(0).to(torch.int32)
    middle = gate(grouped_product(x[order // count], gate_up, ends))  # [T k, F]
    out = grouped_product(middle, down, ends) * shares.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return out[back].unflatten(0, chosen.shape).sum(dim=1).to(x.dtype)


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """x [R, I], weights of all experts [E, O, I] -> [R, O]: each group of rows meets one expert."""
    if torch.is_autocast_enabled(x.device.type):
        # A linear layer is cast by autocast, a grouped product is not.
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        weights = weights.to(dtype)
    if not _has_grouped_product(x, weights):
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        groups = zip(x.split(sizes), weights.unbind(), strict=True)
        return torch.cat([group @ weight.T for group, weight in groups])
    return nn.functional.grouped_mm(x, weights.transpose(-2, -1), offs=ends)


def _has_grouped_product(x: Tensor, weights: Tensor) -> bool:
    """Whether PyTorch has a grouped product of experts here: since 2.10, for aligned rows."""
    if not hasattr(nn.functional, "grouped_mm") or len(x) == 0:
        return False
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    widths = weights.shape[1:]
    return all(width * weights.element_size() % ALIGNMENT == 0 for width in widths)


def small_mixture(
    *,
    hidden: int = 64,
    expert_width: int = 32,
    experts: int = 8,
    active: int = 2,
    layers: int = 2,
    vocabulary: int = 128,
    seed: int = 0,
) -> Any:
    """A model of Qwen3-MoE's shape with random weights, in fp32 on the CPU, in training mode."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    heads = 4
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=expert_width * active,  # of blocks without experts; here are none
        moe_intermediate_size=expert_width,
        num_experts=experts,
        num_experts_per_tok=active,
        norm_topk_prob=True,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        tie_word_embeddings=False,
        # The loss of the model stays that of the tokens when it is asked for router logits.
        router_aux_loss_coef=0.0,
    )
    with torch.random.fork_rng(devices=[]):  # the weights are drawn on the CPU
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).train()


# --- Hugging Face glue and guards -----------------------------------------------------------------


def experts_of(model: Any) -> list[nn.Module]:
    """The experts of each block that has some."""
    found = []
    for block in decoder_blocks(model):
        for module in block.modules():
            weights = dict(module.named_parameters(recurse=False))
            if {"gate_up_proj", "down_proj"} <= weights.keys():
                found.append(module)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts that transformers keeps as one tensor: give a "
            f"mixture of experts, such as Qwen3-MoE, Mixtral or OLMoE"
        )
    return found


def require_plain_experts(modules: list[nn.Module]) -> None:
    """Raise ValueError for experts with biases, or whose weights are laid out otherwise.

    New biases are zeros, so no tokens would show that they are left out.
    """
    for module in modules:
        special = [name for name in SPECIAL if getattr(module, name, False)]
        if special or not hasattr(module, "_apply_gate"):
            raise ValueError(
                f"{type(module).__name__} is built otherwise ({', '.join(special)}): only experts "
                f"without biases, with weights [E, 2F, D] and [E, D, F], are known here"
            )


# --- the arithmetic -------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixtureParameters:
    """How many weights a mixture has: all of them take memory, the active ones time."""

    total: int
    active: int  # that one token meets
    experts: int  # of the total, those in experts


def predicted_parameters(model: Any) -> MixtureParameters:
    """Weights of a mixture. A token meets k / E of those in experts, and all others."""
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(parameter.numel() for parameter in _expert_weights(model))
    count = experts_of(model)[0].gate_up_proj.shape[0]
    met = experts * model.config.get_text_config().num_experts_per_tok // count
    return MixtureParameters(total=total, active=total - experts + met, experts=experts)


def predicted_bytes(model: Any, *, ranks: int = 1) -> dict[str, int]:
    """Bytes of one rank's weights, gradients and AdamW states, of all of its experts."""
    everything = sum(parameter.nbytes for parameter in model.parameters())
    experts = sum(parameter.nbytes for parameter in _expert_weights(model))
    weights = everything - experts + experts // ranks
    return {"weights": weights, "gradients": weights, "states": 2 * weights}


def _expert_weights(model: Any) -> list[Tensor]:
    weights = []
    for module in experts_of(model):
        weights += [module.gate_up_proj, module.down_proj]
    return weights
