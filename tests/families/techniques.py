"""Every technique beside an independent reference, as a function of a family.

Windows, blocks and documents are compared with the unmodified eager model under a dense mask,
packed rows with each document alone, adapters with the merged weights, quantized layers with
rounded weights. The name of a function is the technique's column in docs/families.md.
"""

from __future__ import annotations

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from recipes_lib.architecture.grouped_query_attention import apply_grouped_query_attention
from recipes_lib.architecture.mixture_of_experts import apply_grouped_experts
from recipes_lib.architecture.rms_norm import apply_rms_norm
from recipes_lib.architecture.rope import apply_rope_scaling
from recipes_lib.architecture.swiglu import SwiGLU, apply_swiglu
from recipes_lib.architecture.tied_embeddings import apply_tied_embeddings, untie_embeddings
from recipes_lib.attention.block_sparse import apply_block_sparse
from recipes_lib.attention.flash import apply_flash_attention
from recipes_lib.attention.head_groups import apply_head_groups
from recipes_lib.attention.sliding_window import apply_sliding_window
from recipes_lib.compression.distillation import apply_distillation
from recipes_lib.compression.pruning import apply_pruning
from recipes_lib.compression.student import make_student
from recipes_lib.core.model.causal_lm import decoder_blocks, without_adapters
from recipes_lib.core.model.decoding import greedy
from recipes_lib.fine_tuning.lora import apply_lora, merge_lora
from recipes_lib.fine_tuning.qlora import (
    apply_qlora,
    block_size_of,
    plain_nf4,
    quantize_nf4,
    quantized_layers,
)
from recipes_lib.inference.batching import generate_batch
from recipes_lib.inference.decode_loop import apply_decode_loop
from recipes_lib.inference.speculative import prompt_lookup_generate
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.optimizer_offload import offload_optimizer
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.precision.awq import apply_awq
from recipes_lib.precision.int4 import apply_int4, plain_int4
from recipes_lib.precision.int8 import apply_int8, plain_quantize
from recipes_lib.precision.quantization_aware import (
    apply_quantization_aware,
    plain_fake_quantize,
)
from recipes_lib.precision.sixteen_bit_weights import apply_sixteen_bit_weights
from recipes_lib.training.gradient_accumulation import accumulate_gradients
from recipes_lib.training.muon import muon_adamw
from recipes_lib.training.sequence_packing import (
    check_document_mask,
    collate_packed,
    pack_sequences,
)
from tests.families.parity import (
    Family,
    Wrong,
    apply,
    full_batch,
    gradients,
    padded_batch,
    reference,
    require_same,
    step,
)

LOWEST = torch.finfo(torch.float32).min

# --- memory ---------------------------------------------------------------------------------------


def chunked_cross_entropy(family: Family) -> None:
    model = apply(apply_chunked_cross_entropy, family.model(), chunk_size=7)
    require_same(step(model, padded_batch()), family.reference())


def checkpointing(family: Family) -> None:
    model = apply(apply_activation_checkpointing, family.model())
    require_same(step(model, padded_batch()), family.reference())


def selective_checkpointing(family: Family) -> None:
    model = apply(apply_activation_checkpointing, family.model(), mode="selective")
    require_same(step(model, padded_batch()), family.reference())


def nested_checkpointing(family: Family) -> None:
    model = apply(apply_nested_checkpointing, family.model(), group=2)
    require_same(step(model, padded_batch()), family.reference())


def activation_offload(family: Family) -> None:
    model = family.model()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        offload = apply(offload_activations, model, to="disk", min_bytes=1, directory=directory)
        with offload:
            got = step(model, padded_batch())
    require_same(got, family.reference())


def tiled_mlp(family: Family) -> None:
    model = apply(apply_tiled_mlp, family.model(), tile_size=5)
    require_same(step(model, padded_batch()), family.reference())


def head_groups(family: Family) -> None:
    model = apply(apply_head_groups, family.model())
    require_same(step(model, padded_batch()), family.reference())


def optimizer_in_backward(family: Family) -> None:
    """The weights after a step, against those of the same optimizer after backward."""
    model = family.model()
    optimizer = apply(apply_optimizer_in_backward, model, optimizer_class=torch.optim.SGD, lr=0.1)
    model(**padded_batch(), use_cache=False).loss.backward()
    optimizer.step()
    require_same(weights(model), stepped(family, torch.optim.SGD, lr=0.1))


def optimizer_offload(family: Family) -> None:
    model = family.model()
    # With a small eps the first step of AdamW is the sign of a gradient, even where that is noise.
    options = {"lr": 0.1, "weight_decay": 0.01, "eps": 1.0}
    optimizer = apply(offload_optimizer, model, allow_cpu=True, **options)
    model(**padded_batch(), use_cache=False).loss.backward()
    optimizer.step()
    require_same(weights(model), stepped(family, torch.optim.AdamW, **options))


def muon(family: Family) -> None:
    """Every linear layer in a block by PyTorch's Muon, and what is left by its AdamW."""
    rates = {"lr": 0.02, "weight_decay": 0.1}
    betas = (0.9, 0.95)
    model = family.model()
    step(model, padded_batch())
    optimizer = apply(muon_adamw, model, betas=betas, **rates)
    optimizer.param_groups[-1]["eps"] = 1.0  # else Adam's first step is the sign of rounding noise
    optimizer.step()
    with reference():
        plain = family.eager()
        step(plain, padded_batch())
        matrices = {}
        for block in decoder_blocks(plain):
            for module in block.modules():
                if isinstance(module, nn.Linear | Conv1D):
                    matrices[id(module.weight)] = module.weight
        rest = [weight for weight in plain.parameters() if id(weight) not in matrices]
        muon = torch.optim.Muon([*matrices.values()], adjust_lr_fn="match_rms_adamw", **rates)
        muon.step()
        torch.optim.AdamW(rest, betas=betas, eps=1.0, **rates).step()
    # Its products are in bf16, in which the last digits of two gradients are far apart.
    require_same(weights(model), weights(plain), tolerance=2e-3)


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stepped(family: Family, kind: type[torch.optim.Optimizer], **options: Any) -> dict[str, Tensor]:
    """The weights of the eager model after one step."""
    with reference():
        model = family.eager()
        step(model, padded_batch())
        kind(model.parameters(), **options).step()
    return weights(model)


# --- training -------------------------------------------------------------------------------------


def gradient_accumulation(family: Family) -> None:
    model = family.model()
    loss = accumulate_gradients(model, padded_batch(), micro_batches=2)
    require_same({"loss": loss} | gradients(model), family.reference())


DOCUMENTS = (9, 6, 7)


def sequence_packing(family: Family) -> None:
    """Three documents in a row, against each of them alone."""
    rows = documents()
    packed = pack_sequences(rows, length=LENGTH_OF_PACK)
    batch = collate_packed(packed, pad_token_id=3, length=LENGTH_OF_PACK)
    model = family.model()
    check_document_mask(model, batch)
    require_same(step(model, batch), each_document_alone(family, rows))


LENGTH_OF_PACK = 24


def documents() -> list[dict[str, list[int]]]:
    tokens = full_batch()["input_ids"][0].tolist()
    rows = []
    for length in DOCUMENTS:
        rows.append({"input_ids": tokens[:length], "labels": tokens[:length]})
        tokens = tokens[length:]
    return rows


def each_document_alone(family: Family, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    targets = sum(len(row["input_ids"]) - 1 for row in rows)
    with reference():
        model = family.eager()
        total = torch.zeros(())
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            part = loss * (ids.shape[1] - 1) / targets
            part.backward()
            total += part.detach()
    return {"loss": total} | gradients(model)


# --- attention ------------------------------------------------------------------------------------


def flash_attention(family: Family) -> None:
    model = apply(apply_flash_attention, family.model())
    require_same(step(model, padded_batch()), family.reference())


def sliding_window(family: Family) -> None:
    model = apply(apply_sliding_window, family.model(), window=5)
    i, j = positions()
    require_same(step(model, full_batch()), under_a_mask(family, (j <= i) & (j > i - 5)))


def block_sparse(family: Family) -> None:
    model = apply(apply_block_sparse, family.model(), **PATTERN)
    require_same(step(model, full_batch()), under_a_mask(family, reads()))


PATTERN = {"block_size": 4, "local": 2, "global_blocks": 1, "stride": 3}


def positions() -> tuple[Tensor, Tensor]:
    S = full_batch()["input_ids"].shape[1]
    return torch.arange(S)[:, None], torch.arange(S)  # [S, 1], [S]


def reads() -> Tensor:
    """Which keys a query reads, pair by pair, from the words of the technique: [S, S]."""
    i, j = positions()
    distance = i // 4 - j // 4
    return (j <= i) & ((distance < 2) | (j // 4 < 1) | (distance % 3 == 0))


def under_a_mask(family: Family, allowed: Tensor) -> dict[str, Tensor]:
    """The unmodified eager model under a dense mask [S, S]."""
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, LOWEST)  # [S, S]
    batch = full_batch()
    mask = mask.expand(len(batch["input_ids"]), 1, -1, -1)  # [B, 1, S, S]
    with reference():
        return step(family.eager(), batch | {"attention_mask": mask})


# --- architecture ---------------------------------------------------------------------------------


def rope_scaling(family: Family) -> None:
    """What transformers builds from the scaled configuration, and loads from its file."""
    plain = family.model().eval()
    model = apply(apply_rope_scaling, family.model().eval(), kind="yarn", factor=2.0)
    got = logits(model)
    if torch.equal(got["logits"], logits(plain)["logits"]):
        raise Wrong("scaled, and the model computes the same as before")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    require_same(got, logits(loaded))


def logits(model: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"logits": model(full_batch()["input_ids"], use_cache=False).logits.float()}


def rms_norm(family: Family) -> None:
    plain = family.model().eval()
    logits(plain)  # RWKV scales its weights in its first forward in eval mode
    model = apply(apply_rms_norm, plain)
    with reference():
        expected = logits(family.eager().eval())
    require_same(logits(model), expected)


def tied_embeddings(family: Family) -> None:
    """The table of the embedding in both places, or out of them."""
    model = family.model()
    output = model.get_output_embeddings()
    if output.weight is model.get_input_embeddings().weight:
        model = apply(untie_embeddings, model)
        got = step(model, padded_batch())
        expected = dict(family.reference())
        name = name_of(model, model.get_input_embeddings().weight)
        output = name_of(model, model.get_output_embeddings().weight)
        got[name] = got[name] + got.pop(output)
        require_same(got, expected)
        return
    model = apply(apply_tied_embeddings, model, keep="embedding")
    with reference():
        plain = family.eager()
        plain.get_output_embeddings().weight.data.copy_(plain.get_input_embeddings().weight)
        expected = step(plain, padded_batch())
        kept = name_of(plain, plain.get_input_embeddings().weight)
        expected[kept] = expected[kept] + expected.pop(
            name_of(plain, plain.get_output_embeddings().weight)
        )
    require_same(step(model, padded_batch()), expected)


def name_of(model: Any, parameter: Tensor) -> str:
    [name] = [name for name, value in model.named_parameters() if value is parameter]
    return name


def grouped_experts(family: Family) -> None:
    model = apply(apply_grouped_experts, family.model())
    require_same(step(model, padded_batch()), family.reference())


def grouped_queries(family: Family) -> None:
    """One head of keys and values per block, against the mean of the heads in place of each."""
    model = apply(apply_grouped_query_attention, family.model(), kv_heads=1)
    got = step(model, padded_batch())
    pooled = {name: p.shape for name, p in model.named_parameters()}
    with reference():
        plain = family.eager()
        for name, weight in plain.named_parameters():
            if weight.shape != pooled[name]:
                heads = weight.data.unflatten(0, (-1, pooled[name][0]))  # [KV, E, …]
                weight.data = heads.mean(0, keepdim=True).expand_as(heads).flatten(0, 1).clone()
        expected = step(plain, padded_batch())
    for name, gradient in expected.items():
        if name in pooled and gradient.shape != pooled[name]:
            expected[name] = gradient.unflatten(0, (-1, pooled[name][0])).sum(0)
    require_same(got, expected)


def swiglu(family: Family) -> None:
    """The formula by hand, in place of the MLP of the eager model."""
    model = apply(apply_swiglu, family.model())
    got = step(model, padded_batch())
    with reference():
        plain = family.eager()
        for name, module in model.named_modules():
            if isinstance(module, SwiGLU):
                plain.set_submodule(name, SwiGLUByHand(module))
        expected = step(plain, padded_batch())
    require_same(got, expected)


class SwiGLUByHand(nn.Module):
    """With the parameters of the technique's layer, under the same names."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            copy.deepcopy(part) for part in (layer.gate_proj, layer.up_proj, layer.down_proj)
        )

    def forward(self, x: Tensor) -> Tensor:
        gate = x @ self.gate_proj.weight.T  # [B, S, F]
        up = x @ self.up_proj.weight.T
        if self.gate_proj.bias is not None:
            gate = gate + self.gate_proj.bias
            up = up + self.up_proj.bias
        y = (gate * gate.sigmoid() * up) @ self.down_proj.weight.T
        if self.down_proj.bias is not None:
            y = y + self.down_proj.bias
        return y


# --- adapters and quantized weights ---------------------------------------------------------------


def lora(family: Family) -> None:
    model = apply(apply_lora, family.model(), rank=2, alpha=8)
    against_the_merged_model(model, family, lambda name, weight: weight)
    adapted = logits(model.eval())
    require_same(logits(merge_lora(model).eval()), adapted)


def qlora(family: Family) -> None:
    model = apply(quantize_nf4, family.model(), compute_dtype=torch.float32, double_quant=False)
    plain = family.model()

    stored = {name: unpacked(layer) for name, layer in quantized_layers(model).items()}

    def rounded(name: str, weight: Tensor) -> Tensor:
        nearest = plain_nf4(weight, block_size=block_size_of(name, plain.get_submodule(name)))
        # A weight in the middle between two levels may go to either.
        further = (stored[name] - weight).abs() - (nearest - weight).abs()
        if not further.max() <= 1e-6:
            raise Wrong(f"{name} is not rounded to the nearest level")
        return stored[name]

    model = apply_qlora(model, rank=2, alpha=8, compute_dtype=torch.float32)
    against_the_merged_model(model, family, rounded)


def unpacked(layer: Any) -> Tensor:
    """The weight of a 4-bit layer, by bitsandbytes."""
    return bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def against_the_merged_model(
    model: Any, family: Family, base_weight: Callable[[str, Tensor], Tensor]
) -> None:
    """Loss, and the adapters' gradients: that of the merged weight times the other factor."""
    scale = 8 / 2
    generator = torch.Generator().manual_seed(5)
    adapters = {}
    for name, module in without_adapters(model).named_modules():
        if hasattr(module, "lora_B") and len(module.lora_B):
            b = module.lora_B["default"].weight
            b.data.normal_(0, 0.05, generator=generator)
            adapters[name] = (module.lora_A["default"].weight, b)
    got = {"loss": step(model, padded_batch())["loss"]}
    with reference():
        merged = family.eager()
    for name, (a, b) in adapters.items():
        linear = merged.get_submodule(name)
        weight = base_weight(name, linear.weight.detach())
        delta = scale * (b @ a).detach()
        if isinstance(linear, Conv1D):  # GPT-2 stores its weights transposed
            delta = delta.T
        linear.weight.data = weight + delta
    with reference():
        expected = {"loss": step(merged, padded_batch())["loss"]}
    for name, (a, b) in adapters.items():
        linear = merged.get_submodule(name)
        gradient = linear.weight.grad
        if gradient is None:  # a layer that no token reached
            continue
        if isinstance(linear, Conv1D):
            gradient = gradient.T
        zero = torch.zeros(())
        got |= {f"{name}.a": zero + a.grad, f"{name}.b": zero + b.grad}
        expected |= {f"{name}.a": scale * b.detach().T @ gradient}
        expected |= {f"{name}.b": scale * gradient @ a.detach().T}
    require_same(got, expected)


def int8(family: Family) -> None:
    def rounded(weight: Tensor) -> Tensor:
        levels, scale = plain_quantize(weight)
        return levels.float() * scale.bfloat16().float()[:, None]

    model = apply(apply_int8, family.model().eval())
    against_rounded_weights(model, family, rounded, tolerance=2e-3)


def int4(family: Family) -> None:
    model = apply(apply_int4, family.model().eval())
    against_rounded_weights(model, family, plain_int4, tolerance=2e-3, in_16_bits=True)


def against_rounded_weights(
    model: Any,
    family: Family,
    rounded: Callable[[Tensor], Tensor],
    *,
    tolerance: float,
    in_16_bits: bool = False,
) -> None:
    """With `in_16_bits`, products of the reference take and give bf16, as those of a kernel do."""
    with reference():
        plain = family.eager().eval()
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear) and not isinstance(model.get_submodule(name), nn.Linear):
            module.weight.data = rounded(module.weight.detach()).to(module.weight.dtype)
            if in_16_bits:
                module.forward = functools.partial(linear_in_16_bits, module)
    with reference():
        expected = logits(plain)
    require_same(logits(model), expected, tolerance=tolerance)


def linear_in_16_bits(module: nn.Linear, x: Tensor) -> Tensor:
    """Its input and its product in bf16, the sum with its bias in fp32."""
    y = F.linear(x.bfloat16().float(), module.weight).bfloat16().float()
    if module.bias is not None:
        y = y + module.bias
    return y


def awq(family: Family) -> None:
    """Before it is rounded, a model with other scales computes the same."""
    batches = [{"input_ids": full_batch()["input_ids"]}]
    model = family.model().eval()
    logits(model)  # RWKV scales its weights in its first forward in eval mode
    model = apply(apply_awq, model, batches, group=32)
    with reference():
        plain = family.eager().eval()
        expected = logits(plain)
    changed = [
        name
        for name, weight in plain.named_parameters()
        if not torch.equal(weight, model.get_parameter(name))
    ]
    if not changed:
        raise Wrong("no weight has changed")
    require_same(logits(model), expected)


def quantization_aware(family: Family) -> None:
    """Rounded weights whose gradients go straight through, in the linear layers of the blocks."""
    options = {"activation_bits": None, "output_bits": None, "embedding_bits": None}
    model = apply(apply_quantization_aware, family.model(), weight_bits=4, group=8, **options)
    got = step(model, padded_batch())
    with reference():
        plain = family.eager()
        rounded = {}
        for name, module in model.named_modules():
            if getattr(module, "weight_bits", None) is not None:
                weight = plain.get_parameter(f"{name}.weight")
                rounded[f"{name}.weight"] = plain_fake_quantize(weight, bits=4, group=8)
        batch = padded_batch() | {"use_cache": False}
        loss = torch.func.functional_call(plain, rounded, kwargs=batch).loss
        loss.backward()
    require_same(got, {"loss": loss.detach()} | gradients(plain))


def sixteen_bit_weights(family: Family) -> None:
    """What transformers loads in bf16: a layer with other numbers would be further off."""
    with reference(), tempfile.TemporaryDirectory() as folder:
        # Not eager: scores in another order would send some tokens to other experts.
        plain = family.model()
        plain.save_pretrained(folder)
        loaded = type(plain).from_pretrained(folder, dtype=torch.bfloat16).eval()
        expected = logits(loaded)
    model = apply(apply_sixteen_bit_weights, family.model().eval(), dtype=torch.bfloat16)
    require_same(logits(model), expected, tolerance=2e-2)


def pruning(family: Family) -> None:
    model = apply(apply_pruning, family.model(), share=0.5, scope="layer")
    with reference():
        plain = family.eager()
        for name, module in model.named_modules():
            if hasattr(module, "parametrizations"):
                plain.get_submodule(name).weight.data = module.weight.detach().clone()
        expected = step(plain, padded_batch())["loss"]
    require_same({"loss": step(model, padded_batch())["loss"]}, {"loss": expected})


# --- compression ----------------------------------------------------------------------------------


def distillation(family: Family) -> None:
    teacher = family.model()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.1)
    model = apply(
        apply_distillation,
        family.model(),
        teacher,
        temperature=2.0,
        teacher_share=0.7,
    )
    batch = padded_batch()
    with reference():
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        plain = family.eager()
        targets = batch["labels"][:, 1:].flatten()
        learnt = targets != -100
        student = plain(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)[learnt]
        with torch.no_grad():
            teacher = teacher.eval()(**inputs, use_cache=False).logits[:, :-1]
        teacher = teacher.flatten(0, 1)[learnt]
        log_p = (teacher / 2.0).log_softmax(-1)
        log_q = (student / 2.0).log_softmax(-1)
        divergence = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
        loss = 0.7 * 4 * divergence + 0.3 * F.cross_entropy(student, targets[learnt])
        loss.backward()
    require_same(step(model, batch), {"loss": loss.detach()} | gradients(plain))


def student(family: Family) -> None:
    """Without the last block, against the model whose last block hands its input on."""
    model = family.model()
    blocks = len(decoder_blocks(model))
    smaller = make_student(model, blocks=range(blocks - 1))
    with reference():
        plain = family.eager()
        last = decoder_blocks(plain)[-1]
        inputs = []
        names = list(inspect.signature(last.forward).parameters)

        def before(_: Any, args: tuple, kwargs: dict) -> None:
            inputs.append(args[0] if args else kwargs[names[0]])

        def after(_: Any, __: Any, output: Any) -> Any:
            hidden = inputs.pop()
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        last.register_forward_pre_hook(before, with_kwargs=True)
        last.register_forward_hook(after)
        expected = step(plain, padded_batch())["loss"]
    require_same({"loss": step(smaller, padded_batch())["loss"]}, {"loss": expected})


# --- inference ------------------------------------------------------------------------------------


def decode_loop(family: Family) -> None:
    """Greedy text of the loop, of a batch and of drafts, against a model without a cache."""
    prompts = [[5, 9, 11, 5, 9], [7, 3, 8]]
    decoder = apply(apply_decode_loop, family.model().eval())
    with reference():
        expected = [plain_greedy(family, prompt) for prompt in prompts]
    for prompt, answer in zip(prompts, expected):
        if greedy(decoder, prompt, new_tokens=6) != answer:
            raise Wrong("another text than the model without a cache")
        if list(prompt_lookup_generate(decoder, prompt, new_tokens=6).tokens) != answer:
            raise Wrong("drafts change the text")
    if generate_batch(decoder, prompts, new_tokens=6) != expected:
        raise Wrong("a batch changes the text")


@torch.no_grad()
def plain_greedy(family: Family, prompt: list[int]) -> list[int]:
    model = family.eager().eval()
    tokens = torch.tensor([prompt])
    for _ in range(6):
        new = model(tokens, use_cache=False).logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens[0, len(prompt) :].tolist()


TECHNIQUES: dict[str, Callable[[Family], None]] = {
    function.__name__: function
    for function in (
        chunked_cross_entropy,
        checkpointing,
        selective_checkpointing,
        nested_checkpointing,
        activation_offload,
        tiled_mlp,
        head_groups,
        optimizer_in_backward,
        optimizer_offload,
        muon,
        gradient_accumulation,
        sequence_packing,
        flash_attention,
        sliding_window,
        block_sparse,
        rope_scaling,
        rms_norm,
        tied_embeddings,
        grouped_experts,
        grouped_queries,
        swiglu,
        lora,
        qlora,
        sixteen_bit_weights,
        int8,
        int4,
        awq,
        quantization_aware,
        pruning,
        distillation,
        student,
        decode_loop,
    )
}
