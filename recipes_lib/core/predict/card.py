"""A GPU that is not there: its memory, and the kernels that PyTorch would choose on it.

    predict(build, card=CARDS["L4"])

The tensors of a dry run say that they are on a CPU. What a GPU does otherwise with them are a few
rules, and each is the operator itself, of which PyTorch knows shapes without a GPU:

    attention                FlashAttention for 16 bits without a mask on capability 8.0 and later,
                             with the memory of its backward, else memory-efficient attention, else
                             the table of all scores
    autocast                 norms, softmax and losses in fp32; a library that asks whether it is
                             on, and names no device, means the GPU
    products                 two workspaces of cuBLAS, one for each thread that multiplies

Not covered: cuDNN's attention, kernels of Triton and bitsandbytes with memory of their own, a
second stream.

Source: PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, cuda/CUDABlas.cpp and
autocast_mode.h; the specifications of the cards.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from recipes_lib.core.checks import check_choice
from recipes_lib.core.measure.dry_run import pretend_a_card

aten = torch.ops.aten
MIB = 2**20
GIB = 2**30

CONTEXT = 500 * MIB  # of CUDA, outside of PyTorch's allocator: 300 to 500 MiB, by card and driver
MODERN = (8, 0)  # the least capability of a card that has bf16 and FlashAttention
WIDEST_FLASH_HEAD = 256
FLASH_ALIGNED = 8  # elements of a head

AUTOCAST_IS_ON = torch.is_autocast_enabled  # as PyTorch has it

# Functions that autocast computes in fp32 on a GPU, and in 16 bits on a CPU.
IN_FP32 = ("layer_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "group_norm")


@dataclass(frozen=True)
class Card:
    """A GPU: its compute capability, and the bytes of memory that PyTorch sees.

    `rate` is that of its data sheet for products of matrices in 16 bits, without zeros that are
    passed over; 0 where it is not known.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    rate: float = 0.0  # operations in a second

    @property
    def workspace(self) -> int:
        """Bytes that cuBLAS takes for each thread: 32 MiB from capability 9.0 on."""
        return 32 * MIB if self.capability >= (9, 0) else 8 * MIB + 128 * 1024

    @property
    def for_tensors(self) -> int:
        """Bytes that are left beside CUDA's own context."""
        return self.memory_bytes - CONTEXT


def _card(name: str, capability: tuple[int, int], gib: float, rate: float) -> Card:
    return Card(name, capability, round(gib * GIB), rate * 1e12)


# What `torch.cuda.get_device_properties(0).total_memory` says, which is less than is sold, and the
# least of what drivers leave: a T4 has 14.56 to 14.75. Seen in messages of PyTorch ("total capacity
# of"): T4 Zheng-Chong/CatVTON#133, L4 ArcInstitute/evo2#190, RTX 4090 3DTopia/Phidias-Diffusion#8,
# A100-80GB lianqi1008/Control-GIC#6, H100 vllm-project/vllm#27508. An A100-40GB says 39.50 in
# TianheWu/CoSeR#10. For the others no such message was found.
# The rates, with sums in fp32: T4, V100 and H100 (both SXM; an H200 computes alike), A100 in the
# data sheets that src/lightning/fabric/utilities/throughput.py of Lightning-AI/pytorch-lightning
# links; L4 is half of the 242 with zeros. RTX 3090, 4080, 4090 and A6000 stand in NVIDIA's
# whitepapers of GA102 and Ada, which tables of several programs repeat. An A10G is no A10, which
# has 125: mag-/gpu_benchmark has measured 69.7.
CARDS = {
    card.name: card
    for card in (
        _card("T4", (7, 5), 14.56, 65),
        _card("V100", (7, 0), 15.77, 125),
        _card("RTX 3090", (8, 6), 23.69, 71),
        _card("RTX 4080", (8, 9), 15.70, 97.5),
        _card("RTX 4090", (8, 9), 23.64, 165.2),
        _card("RTX A6000", (8, 6), 47.54, 154.8),
        _card("A10G", (8, 6), 22.06, 70),
        _card("L4", (8, 9), 22.03, 121),
        _card("A100-40GB", (8, 0), 39.38, 312),
        _card("A100-80GB", (8, 0), 79.14, 312),
        _card("H100", (9, 0), 79.11, 989.4),
        _card("H200", (9, 0), 139.81, 989.4),
    )
}


def card_named(name: str) -> Card:
    """A key of CARDS, or a size such as "24GB": of the cards that are sold with it the smallest."""
    size = name.upper().removesuffix("GB").strip()
    if size.isdecimal():
        sold = cards_sold_with(int(size))
        if sold:
            return sold[0]
    check_choice(CARDS, card=name)
    return CARDS[name]


def cards_sold_with(size: float) -> list[Card]:
    """The cards of so many GB, least memory first: PyTorch sees up to a tenth less."""
    sold = [card for card in CARDS.values() if 0.9 * size <= card.memory_bytes / GIB <= size]
    return sorted(sold, key=operator.attrgetter("memory_bytes"))


@contextlib.contextmanager
def on_card(card: Card | None) -> Iterator[None]:
    """Inside of a dry run, kernels are those that `card` would choose; None changes nothing."""
    if card is None:
        yield
        return
    pretend_a_card()
    with contextlib.ExitStack() as stack:
        attention = _attention_that_card_chooses(card.capability)
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        stack.enter_context(mock.patch.object(torch, "is_autocast_enabled", _autocast_is_on))
        for name in IN_FP32:
            function = _in_fp32(getattr(F, name))
            stack.enter_context(mock.patch.object(F, name, function))
        yield


def _attention_that_card_chooses(capability: tuple[int, int]) -> Callable[..., torch.Tensor]:
    """PyTorch's attention by the kernel that it takes on a GPU of this capability."""

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """As this card would: by FlashAttention, memory-efficient, or with all scores."""
        q, k, v = (_as_autocast_gives_it(each) for each in (query, key, value))
        with torch.autocast("cpu", enabled=False):  # the inputs are cast, and nothing inside
            options = {"scale": scale}
            half = q.dtype in (torch.float16, torch.bfloat16)
            head = q.shape[-1]
            if half and attn_mask is None and capability >= MODERN and head <= WIDEST_FLASH_HEAD:
                if scale is None:
                    options["scale"] = head**-0.5
                missing = -head % FLASH_ALIGNED
                if missing:
                    q, k, v = (F.pad(each, (0, missing)) for each in (q, k, v))
                kernel = aten._scaled_dot_product_flash_attention
                out = kernel(q, k, v, dropout_p, is_causal, False, **options)[0]
                _with_scratch_memory(q, k, out)
                return out[..., :head] if missing else out
            if enable_gqa:
                if is_causal:
                    attn_mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
                return _with_all_scores(q, k, v, _additive(attn_mask, q, k), dropout_p, scale)
            mask = _additive(attn_mask, q, k)
            trains = q.requires_grad or k.requires_grad
            kernel = aten._scaled_dot_product_efficient_attention
            return kernel(q, k, v, mask, trains, dropout_p, is_causal, **options)[0]

    return scaled_dot_product_attention


def _with_scratch_memory(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> None:
    """While it runs, FlashAttention's backward adds up q's gradient in fp32, and where heads share
    keys and values, the gradients of both for each head.
    """
    if out.grad_fn is None:
        return
    # Shapes, because the hooks would keep the tensors.
    shape, device = q.shape, q.device
    for_each_head = (*q.shape[:2], k.shape[2], q.shape[3])
    shared, dtype = k.shape[1] != q.shape[1], q.dtype
    scratch: list[torch.Tensor] = []

    def begin(gradients: tuple) -> None:
        scratch.append(torch.empty(shape, dtype=torch.float32, device=device))
        if shared:
            scratch.extend(torch.empty(for_each_head, dtype=dtype, device=device) for _ in "kv")

    def end(inputs: tuple, outputs: tuple) -> None:
        scratch.clear()

    out.grad_fn.register_prehook(begin)
    out.grad_fn.register_hook(end)


def _with_all_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> torch.Tensor:
    """A card's attention with all scores: PyTorch's `…_attention_math`, line by line, in fp32.

    The operator itself adds the mask out of place in a dry run, and on a GPU in place.
    """
    root = (q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scaled = q.float() * root
    times = q.shape[1] // k.shape[1]
    k, v = (each.float().repeat_interleave(times, 1) for each in (k, v))
    scores = scaled @ (k.transpose(-2, -1) * root)  # [B, H, S, T]
    if mask is not None:
        scores.add_(mask)
    scores = torch._safe_softmax(scores, -1)
    if dropout_p:
        scores = F.dropout(scores, dropout_p)
    return (scores @ v).to(q.dtype)


def _additive(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """As a card takes the mask: numbers added to the scores, for each head [B, H, S, T]."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(q.dtype)
    return mask.expand(*q.shape[:3], k.shape[2])


def _as_autocast_gives_it(tensor: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu") and tensor.dtype is torch.float32:
        return tensor.to(torch.get_autocast_dtype("cpu"))
    return tensor


def _autocast_is_on(device_type: str = "cpu") -> bool:
    """Whether autocast is on for a device; by default for the card, which is the CPU here.

    PyTorch's own default is a GPU. peft asks so, and where autocast is not on, its layers make
    copies in fp32 of what they read.
    """
    return AUTOCAST_IS_ON(device_type)


def _in_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a card runs it under autocast: with copies in fp32 of what has 16 bits."""

    def widened(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            return value.float()
        return value

    def call_as_on_card(*args: Any, **options: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **options)
        args = [widened(each) for each in args]
        options = {name: widened(each) for name, each in options.items()}
        with torch.autocast("cpu", enabled=False):
            return function(*args, **options)

    return call_as_on_card
