"""Peaks of memory that others have published, beside what this package predicts for them.

python -m benchmarks.published_peaks          some minutes of one core, no GPU

Each line of published_peaks.jsonl is a measurement of another program on a GPU, in a setting that
its source describes. The step is built here in that setting and in full size, and predicted on
the card that it ran on. The code is ours, not theirs: where a setting names a loss or a cast, that
of the source stands below. What no source says, such as a setting of a run, is called a guess.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.record import keep
from recipes_lib.core.measure.machine import GIB
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import trunk
from recipes_lib.core.predict import CARDS, Build, predict
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.training.compiled_blocks import apply_compiled_blocks

FILE = Path(__file__).with_suffix(".jsonl")
CHUNKS = 8  # into which torchtune cuts the tokens of its loss


@dataclass(frozen=True)
class Published:
    """One published peak: what was trained and how, in bf16, and where it says so.

    `published` is which bytes the source gives: "allocated", "reserved" or "not said". `guess` is
    what the source does not say of the setting. `reason` is why the prediction is known to differ.
    """

    name: str
    library: str
    source: str
    card: str
    gib: float
    published: str
    model: str
    rows: int
    tokens: int
    adapters: str = ""  # "LoRA" or "QLoRA"; without them all weights train
    rank: int = 0
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    adapters_in_16_bits: bool = False
    kbit_casts: bool = False  # prepare_model_for_kbit_training: what is not in 4 bits gets fp32
    attention: str = "sdpa"
    checkpointing: bool = False
    compiled: bool = False
    loss: str = "plain"
    in_backward: bool = False
    offload: bool = False  # of the checkpoints: the inputs of the blocks go to the host
    optimizer: str = "fused"
    keeps_logits: bool = False  # until backward ends
    keeps_gradients: bool = False  # zero_grad(set_to_none=False)
    autocast: str = ""
    guess: str = ""
    reason: str = ""
    reserved_gib: float | None = None  # beside allocated ones


def rows() -> list[Published]:
    """All rows of the file."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return [Published(**json.loads(line)) for line in lines]


# --- the step of a row ----------------------------------------------------------------------------


def build_of(row: Published) -> Build:
    """`build` of `predict`: the published step, in full size."""

    def build() -> tuple[Any, Any, Callable[[Any, Any], None]]:
        ids = torch.zeros(row.rows, row.tokens, dtype=torch.long)
        model = model_as_published(row)
        loss_of = LOSSES[row.loss]

        def step(model: Any, optimizer: Any) -> None:
            with offloading(model, row):
                with torch.autocast("cpu", AUTOCAST.get(row.autocast), enabled=bool(row.autocast)):
                    loss, logits = loss_of(model, ids, mask_of(row))
                if not row.keeps_logits:
                    logits = None
                loss.backward()
            del logits
            optimizer.step()
            optimizer.zero_grad(set_to_none=not row.keeps_gradients)

        make = OPTIMIZERS[row.optimizer]
        if row.in_backward:
            return model, apply_optimizer_in_backward(model, optimizer_class=make), step
        return model, make([p for p in model.parameters() if p.requires_grad]), step

    return build


def model_as_published(row: Published) -> Any:
    """The model with the adapters and recipes of a row."""
    model = model_of_shape(row.model, dtype=torch.bfloat16)
    model.set_attn_implementation(row.attention.split()[0])
    if row.model.startswith("mistral"):
        model.config.sliding_window = None  # no row is longer
    if row.adapters:
        apply = {"LoRA": apply_lora, "QLoRA": apply_qlora}[row.adapters]
        targets = [f"{name}_proj" for name in row.targets]
        model = apply(model, rank=row.rank, dropout=row.dropout, target_modules=targets)
    for parameter in model.parameters():
        if parameter.requires_grad and row.adapters_in_16_bits:
            parameter.data = parameter.data.to(torch.bfloat16)
        elif parameter.dtype is torch.bfloat16 and row.kbit_casts:
            parameter.data = parameter.data.float()
    if row.compiled and not row.checkpointing:  # under a checkpoint only the block's input stays
        apply_compiled_blocks(model)
    if row.checkpointing:
        apply_activation_checkpointing(model)
    torch.cuda.empty_cache()  # what is changed in place here is loaded layer by layer there
    return model


def mask_of(row: Published) -> torch.Tensor | None:
    """What transformers 4.53 to 4.57 makes in every training step [1, 1, S, S]."""
    if "mask" not in row.attention:
        return None
    return torch.ones(row.tokens, row.tokens, dtype=torch.bool).tril()[None, None]


def offloading(model: Any, row: Published) -> contextlib.AbstractContextManager:
    """The surroundings of forward and backward."""
    if not row.offload:
        return contextlib.nullcontext()
    return offload_activations(model, to="disk", in_flight=1)


# --- their losses ---------------------------------------------------------------------------------


Loss = tuple[torch.Tensor, Any]  # the loss, and the logits that a loop may keep


def plain_loss(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> Loss:
    """That of transformers today."""
    out = model(input_ids=ids, labels=ids, use_cache=False, attention_mask=mask)
    return out.loss, out.logits


def loss_of_a_shifted_copy(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> Loss:
    """transformers until 4.48: logits in fp32, and a copy of them without the last token."""
    logits = model(input_ids=ids, use_cache=False, attention_mask=mask).logits.float()  # [B, S, V]
    shifted = logits[:, :-1].contiguous()
    return F.cross_entropy(shifted.flatten(0, 1), ids[:, 1:].flatten()), logits


def loss_in_chunks(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> Loss:
    """torchtune's: all logits in 16 bits, and fp32 only inside of a compiled kernel."""
    hidden = trunk(model)(
        input_ids=ids, use_cache=False, attention_mask=mask
    ).last_hidden_state  # [B, S, D]
    head = model.get_output_embeddings()
    logits = [head(chunk) for chunk in hidden.chunk(CHUNKS, dim=1)]  # [B, S / 8, V]
    return sum(_InOneKernel.apply(chunk) for chunk in logits), None


class _InOneKernel(torch.autograd.Function):
    """The bytes of a loss that is one kernel: its result, and the gradient of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(*ctx.saved_tensors)


LOSSES = {
    "plain": plain_loss,
    "shifted copy": loss_of_a_shifted_copy,
    "in chunks": loss_in_chunks,
}
AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}
OPTIMIZERS = {
    "fused": partial(torch.optim.AdamW, fused=True),
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "8-bit": partial(eight_bit_adamw, lr=1e-5),
    # Its states are in memory that CUDA moves, and the allocator knows nothing of them.
    "paged 8-bit": torch.optim.SGD,
}


# --- the command ----------------------------------------------------------------------------------


def compare(row: Published) -> dict[str, Any]:
    """The published bytes of a row and the predicted ones: requested, allocated and reserved."""
    predicted = predict(build_of(row), card=CARDS[row.card])
    found = {
        "name": row.name,
        "published_bytes": round(row.gib * GIB),
        "requested_bytes": predicted.peak,
        "allocated_bytes": predicted.allocated,
        "reserved_bytes": predicted.reserved,
    }
    compared = "reserved_bytes" if row.published == "reserved" else "allocated_bytes"
    return found | {"off": found[compared] / found["published_bytes"] - 1}


def main() -> None:
    """Predict all rows, print them, and keep them."""
    found = []
    for row in rows():
        found.append(compare(row))
        print(found[-1], flush=True)
    print(keep("published_peaks", {"rows": found}))


if __name__ == "__main__":
    main()
