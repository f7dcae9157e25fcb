"""Decode loop: one token per step through fused weights and a cache that is allocated once.

Problem    `model.generate` spends milliseconds per token beside the matrix products: it builds
           masks and output objects, appends to a growing cache, copies keys and values for each
           query head, and calls seven projections per block.
Idea       Write the step out, for one family of models, with as few operators as it needs:

               qkv       one product for queries, keys and values       3 -> 1
               gate_up   one product for both halves of the MLP         2 -> 1
               cache     [B, Hkv, capacity, E] allocated once; its first T places are a view
               RoPE      pairs of dimensions as complex numbers: one multiplication turns them
               groups    G query heads share one head of keys: they are G rows of one product

           `core.model.decoding.greedy` is the loop around it. The first call reads the prompt:

               cache = decoder.new_cache(max_tokens=…)
               while True:
                   logits = decoder(tokens, cache, last_only=True)
                   tokens = logits.argmax(-1)

           With a model of transformers the line in the loop is
           `out = model(tokens, past_key_values=cache)`, and `cache = out.past_key_values`.

Saves      Time per token, the same number of seconds at any precision. So it counts little in fp32,
           where reading the weights takes most of a step, and much at 8 and 4 bits.
Costs      The fused weights are copies: as long as the model is alive beside its decoder, they
           take memory twice. Hooks, adapters and output options of the model are left behind.
Use when   The answer is greedy or sampled by your own loop, and the family is Llama-like: Llama,
           Mistral, Qwen2, Qwen3, SmolLM2.
Not when   You need beam search or constrained decoding, or serve many users at once: a server such
           as vLLM schedules them.
In production   vLLM and TensorRT-LLM fuse the same weights (`QKVParallelLinear`); gpt-fast is this
           loop for GPUs; `model.generate(cache_implementation="static")` has the static cache.
Source     Shazeer, "Fast Transformer Decoding" (arXiv 1911.02150); Ainslie et al., "GQA" (arXiv
           2305.13245); "Accelerating Generative AI with PyTorch II: GPT, Fast", PyTorch blog,
           November 2023.

Shapes: B batch, K new tokens, T tokens in the cache, D hidden, F feed-forward, Hq and Hkv heads, G
query heads per head of keys, E head dimension, V vocabulary.

from_transformers  its Hugging Face glue: reading the weights, and comparing logits
norms  its norms, with few operators
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes_lib.core.model.causal_lm import (
    decoder_blocks,
    require_causal_lm,
    trunk,
    without_adapters,
)
from recipes_lib.core.model.decoding import KeyValueCache
from recipes_lib.core.model.kernels_for_grouped_heads import without_grouped_heads
from recipes_lib.inference.decode_loop.from_transformers import (
    Sizes,
    activation_of,
    decoder_with_equal_logits,
    head_norm,
    in_pairs,
    linear_on_same_memory,
    norm_like,
    require_the_same_at_any_length,
    sizes_of,
    stacked,
)

# --- the idea: what a learner can copy ------------------------------------------------------------


def step_by_hand(
    block: DecoderBlock, x: Tensor, turn: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """The decode loop by hand: one token x [D] through a block; `turn` [E/2] are its angles.

    keys and values [Hkv, T, E] have room for it in their last place.
    """
    kv_heads, _, head_dim = keys.shape
    # The weight of `qkv` is torch.cat of those of q, k and v.
    heads = block.qkv(block.attention_norm(x)).view(-1, head_dim)  # [Hq + 2 Hkv, E]
    q, k, v = heads.split([len(heads) - 2 * kv_heads, kv_heads, kv_heads])
    keys[:, -1] = rotate(k, turn)
    values[:, -1] = v
    q = rotate(q, turn).view(kv_heads, -1, head_dim)  # [Hkv, G, E]: G rows look at the same keys
    scores = q @ keys.mT / math.sqrt(head_dim)  # [Hkv, G, T]
    x = x + block.output((scores.softmax(-1) @ values).flatten())
    gate, up = block.gate_up(block.mlp_norm(x)).chunk(2)
    return x + block.down(block.activation(gate) * up)


# --- the technique --------------------------------------------------------------------------------


def apply_decode_loop(model: Any) -> Decoder:
    """Make a decoder from a Hugging Face causal LM, which stays as it is.

    The decoder shares the memory of the embedding, the output layer and the projections that are
    not fused. Those that are (queries, keys and values; gate and up) are copies: drop the model,
    and its own are freed. The decoder's parameters are objects of their own, without gradients.
    Changing its dtype or replacing its layers does not change the model; writing into a shared
    weight would.

    What is read has to give the model's logits on a few tokens.
    """
    require_causal_lm(model)
    require_the_same_at_any_length(without_adapters(model))
    return decoder_with_equal_logits(without_adapters(model), Decoder)


class Decoder(nn.Module):
    """A Llama-like model for decoding; it follows `core.model.decoding.CausalDecoder`.

        embedding    nn.Embedding [V, D]; its dtype is that of the hidden states
        blocks       each with qkv, output, gate_up, down (nn.Linear) and two norms
        norm, head   RootMeanSquareNorm and nn.Linear; a tied head shares the embedding's parameter

    Any of the linear layers may be replaced by another module with the same shapes.
    """

    # What `new_cache` makes. A technique may put another kind of cache here.
    cache_class: type[KeyValueCache] = KeyValueCache

    def __init__(self, model: Any) -> None:
        """Fuse the weights of a Hugging Face causal LM for the decode loop."""
        super().__init__()
        inside = trunk(model)
        self.sizes = sizes_of(model)
        self.embedding = nn.Embedding.from_pretrained(inside.embed_tokens.weight.detach())
        blocks = enumerate(decoder_blocks(model))
        self.blocks = nn.ModuleList(
            DecoderBlock(index, block, self.sizes) for index, block in blocks
        )
        self.norm = norm_like(inside.norm)
        self.head = linear_on_same_memory(model.get_output_embeddings())
        if model.get_output_embeddings().weight is inside.embed_tokens.weight:
            self.head.weight = self.embedding.weight  # what changes its dtype changes both
        self.vocabulary = self.embedding.num_embeddings
        # No buffers: `decoder.to(torch.float16)` would round the angles.
        self._frequencies = inside.rotary_emb.inv_freq.detach().float().cpu()  # [E/2], per position
        # Cosine and sine, [positions, E/2, 2].
        self._table = torch.empty(0, len(self._frequencies), 2)
        self.eval()

    def new_cache(self, *, batch: int = 1, max_tokens: int) -> KeyValueCache:
        """An empty cache for a decode loop of `batch` rows and up to `max_tokens` tokens."""
        self._require_trained_length(max_tokens)
        weight = self.embedding.weight
        self._grow_table(max_tokens, weight.device)
        # On a CPU attention is fp32, whatever the weights are: its 16-bit kernels are slower there.
        on_cpu = weight.device.type == "cpu"
        return self.cache_class(
            layers=len(self.blocks),
            kv_heads=self.sizes.kv_heads,
            head_dim=self.sizes.head_dim,
            capacity=max_tokens,
            batch=batch,
            dtype=torch.float32 if on_cpu else weight.dtype,
            device=weight.device,
        )

    def forward(
        self,
        tokens: Tensor,
        cache: KeyValueCache,
        *,
        last_only: bool = False,
        row_by_row: bool = False,
    ) -> Tensor:
        """One turn of the decode loop: append `tokens` [B, K]; logits [B, K, V], or of the last.

        Args:
            row_by_row: attention of the K tokens one after the other, without a mask, as in K calls
                of one token each (for speculative decoding: the same result as alone).
        """
        with _without_gradients():
            count = tokens.shape[1]
            cache.reserve(count)
            turn = self.turn(cache.positions(count))
            mask = None
            if cache.starts is not None or not row_by_row:
                mask = cache.mask(count)
            x = self.embedding(tokens.to(self.embedding.weight.device))  # [B, K, D]
            for block in self.blocks:
                x = block(x, turn, mask, cache, row_by_row)
            cache.advance(count)
            if last_only:
                x = x[:, -1:]
            return self.head(self.norm(x))

    def turn(self, positions: Tensor) -> Tensor:
        """In the decode loop: the angles of `positions` as `rotate` takes them."""
        turn = self._table[positions].unsqueeze(-3)
        if torch.compiler.is_compiling():
            return turn
        return torch.view_as_complex(turn)

    def _require_trained_length(self, max_tokens: int) -> None:
        """Raise ValueError if the decode loop would leave the model's positions or its window."""
        positions = self.sizes.positions
        if positions is not None and max_tokens > positions:
            raise ValueError(
                f"max_tokens={max_tokens}, prompt and answer together: the model was trained for "
                f"{positions} positions (max_position_embeddings), and what it writes beyond them "
                f"is noise; give a shorter prompt or fewer new tokens"
            )
        window = self.sizes.window
        if window is not None and max_tokens > window:
            raise ValueError(
                f"max_tokens={max_tokens}: the model looks back {window} tokens, and the decode "
                f"loop does not forget; give {window} or fewer, or use model.generate()"
            )

    def _grow_table(self, positions: int, device: torch.device) -> None:
        """The decode loop's table: cosine and sine up to `positions`, [positions, E/2, 2]."""
        if len(self._table) >= positions and self._table.device == device:
            return
        # On the CPU and in fp32, so that all devices turn by the same angles.
        angles = torch.arange(positions)[:, None].float() * self._frequencies
        table = torch.stack([angles.cos(), angles.sin()], dim=-1) * self.sizes.sharpening
        self._table = table.to(device)


def _without_gradients() -> Any:
    """Inference mode, in which a compiled graph could take no view of its inputs."""
    if torch.compiler.is_compiling():
        return torch.no_grad()
    return torch.inference_mode()


class DecoderBlock(nn.Module):
    """Attention and MLP of one layer, with the fewest operators."""

    def __init__(self, index: int, block: Any, sizes: Sizes) -> None:
        """Fuse the weights of one block for the decode loop."""
        super().__init__()
        self.index = index
        self.sizes = sizes
        attention = block.self_attn
        mlp = block.mlp
        queries = in_pairs(attention.q_proj, sizes)
        keys = in_pairs(attention.k_proj, sizes)
        self.attention_norm = norm_like(block.input_layernorm)
        self.qkv = stacked(queries, keys, attention.v_proj)
        self.query_key_norm = head_norm(attention, sizes)  # Qwen3's; None for most families
        self.output = linear_on_same_memory(attention.o_proj)
        self.mlp_norm = norm_like(block.post_attention_layernorm)
        self.gate_up = stacked(mlp.gate_proj, mlp.up_proj)
        self.down = linear_on_same_memory(mlp.down_proj)
        self.activation = activation_of(mlp.act_fn)

    def forward(
        self,
        x: Tensor,
        turn: Tensor,
        mask: Tensor | None,
        cache: KeyValueCache,
        row_by_row: bool,
    ) -> Tensor:
        """A fused block of the decode loop: x [B, K, D] -> [B, K, D], `turn` as in `rotate`."""
        sizes = self.sizes
        batch, count, _ = x.shape

        heads = self.qkv(self.attention_norm(x)).view(batch, count, -1, sizes.head_dim)
        heads = heads.to(cache.dtype)  # [B, K, Hq + 2 Hkv, E]
        queries_keys = heads.narrow(2, 0, sizes.heads + sizes.kv_heads)
        if self.query_key_norm is not None:
            queries_keys = self.query_key_norm(queries_keys)
        queries_keys = rotate(queries_keys, turn)
        keys, values = cache.append(
            self.index,
            queries_keys.narrow(2, sizes.heads, sizes.kv_heads).transpose(1, 2),  # [B, Hkv, K, E]
            heads.narrow(2, sizes.heads + sizes.kv_heads, sizes.kv_heads).transpose(1, 2),
        )
        queries = queries_keys.narrow(2, 0, sizes.heads)  # [B, K, Hq, E]
        looked = attend(queries, keys, values, mask, scale=sizes.scale, row_by_row=row_by_row)
        x = x + self.output(looked.to(x.dtype))

        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)  # [B, K, F] each
        return x + self.down(self.activation(gate) * up)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """In the decode loop: turn queries or keys x [..., E] by the angles of their positions.

    Dimensions 2i and 2i + 1 are one pair: a complex number, and one multiplication turns it.
    (transformers pairs i with i + E/2, and `from_transformers` reorders the rows of the weights.)
    `turn` is complex [..., E/2], or real [..., E/2, 2] in compiled graphs, which have no complex
    kernels.
    16-bit numbers have none either: they are turned in fp32 and rounded once.
    """
    if turn.is_complex() and x.dtype == torch.float32:
        return (x.view(torch.complex64) * turn).view(torch.float32)  # views: nothing is copied
    a, b = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)  # [..., E/2] each
    if turn.is_complex():
        turn = torch.view_as_real(turn)
    cos, sin = turn.unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1)  # [..., E/2, 2]
    return turned.flatten(-2).to(x.dtype)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    row_by_row: bool = False,
) -> Tensor:
    """In the decode loop: queries [B, K, Hq, E] of K tokens look at keys and values [B, Hkv, T, E].

    Returns [B, K, Hq * E]. Without a mask each of them sees itself and all tokens before.
    """
    count = queries.shape[1]
    if count == 1:
        return _attend_one(queries, keys, values, mask, scale)
    if row_by_row:
        return _attend_row_by_row(queries, keys, values, mask, scale)
    groups = queries.shape[2] // keys.shape[1]
    if groups > 1 and _would_store_scores(keys, mask):
        keys = keys.repeat_interleave(groups, dim=1)  # [B, Hq, T, E]
        values = values.repeat_interleave(groups, dim=1)
        groups = 1
    looked = functional.scaled_dot_product_attention(
        queries.transpose(1, 2),  # [B, Hq, K, E]
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=groups > 1,
    )
    return looked.transpose(1, 2).flatten(2)


def _would_store_scores(keys: Tensor, mask: Tensor | None) -> bool:
    """Whether the decode loop would store all scores [B, Hq, K, T], because heads share keys.

    Of the fast kernels of CUDA only flash attention lets them share, and it takes no mask.
    """
    masked = mask is not None
    return keys.is_cuda and (masked or without_grouped_heads(keys.device, keys.dtype))


def _attend_one(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """In the decode loop: one token per row [B, 1, Hq, E]; G query heads are G rows."""
    batch, _, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads, head_dim)  # [B, Hkv, G, E]
    looked = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, scale=scale
    )
    return looked.reshape(batch, 1, heads * head_dim)


def _attend_row_by_row(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """In the decode loop: each of K tokens as if it came alone, before the later ones."""
    count = queries.shape[1]
    before = keys.shape[2] - count
    rows = []
    for row in range(count):
        seen = before + row + 1
        row_mask = None
        if mask is not None:
            row_mask = mask[:, :, row : row + 1, :seen]
        rows.append(
            _attend_one(
                queries.narrow(1, row, 1),
                keys.narrow(2, 0, seen),
                values.narrow(2, 0, seen),
                row_mask,
                scale,
            )
        )
    return torch.cat(rows, dim=1)
