"""Train on long texts: one row of thousands of tokens at a time; all weights, or adapters.

    python scripts/train_long_sequences.py                          # 4,096 tokens on this machine
    python scripts/train_long_sequences.py --inputs disk            # the same, in less memory
    python scripts/train_long_sequences.py --model Qwen/Qwen3-0.6B --length 65536 --inputs host
    python scripts/train_long_sequences.py --model meta-llama/Llama-3.1-8B --method qlora \
        --length 32768 --learning_rate 2e-4

The first line reaches a held-out loss of 1.66 from 1.70, with 2,319 MiB of tensors at the peak (two
CPU cores, one run).

Everything is in `main`, from top to bottom. Each recipe is one line. The same command once more
goes on from the last checkpoint.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import HfArgumentParser, PreTrainedModel, get_constant_schedule_with_warmup

from recipes_lib.architecture.rope import apply_rope_scaling
from recipes_lib.attention.flash import apply_flash_attention
from recipes_lib.core.data.corpus import load_text
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.machine import machine, seed_everything
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora, quantize_nf4
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.precision.mixed_precision import mixed_precision
from recipes_lib.training.exact_resume import load_checkpoint, save_checkpoint

ADAPTERS = {"lora": apply_lora, "qlora": apply_qlora}


@dataclass
class Settings:
    """What a run is; every field is an option of the command line."""

    model: str = "smollm2"  # or a hub id, or a folder
    method: Literal["all", "lora", "qlora"] = "all"  # weights, in fp32; or adapters on 16 or 4 bits
    text: str = ""  # a file of plain text; by default Python's own sources
    output: Path = Path("runs/long-sequences")  # the model or adapters, and the checkpoint
    length: int = 4096  # tokens of a step
    inputs: str = ""  # of the blocks wait on the "host" of a GPU, on "disk", or where they are
    steps: int = 6  # of the optimizer, each on `length` new tokens
    learning_rate: float = 2e-5  # of adapters about ten times that
    save_every: int = 3  # steps
    seed: int = 0  # of the adapters' first weights


def main(settings: Settings) -> None:
    seed_everything(settings.seed)
    settings.output.mkdir(parents=True, exist_ok=True)
    checkpoint = settings.output / "checkpoint.pt"

    # Data: one long text in pieces of `length` tokens; the last of them is held out.
    tokenizer = load_tokenizer(settings.model)
    text = Path(settings.text).read_text() if settings.text else load_text()
    needed = (settings.steps + 1) * settings.length
    ids = tokenizer(text[: 12 * needed], return_tensors="pt").input_ids[0]  # [tokens]
    if len(ids) < needed:
        raise ValueError(f"the text has {len(ids):,} tokens, and {needed:,} are needed")
    pieces = ids[:needed].view(-1, settings.length).to(machine().device)  # [steps + 1, S]

    # The model, and what makes room for the tokens.
    precision = mixed_precision()
    dtype = torch.float32 if settings.method == "all" else precision.dtype
    model = base_model(settings, dtype)
    positions = model.config.max_position_embeddings
    if settings.length > positions:  # beyond them nothing else raises an error
        apply_rope_scaling(model, kind="yarn", factor=settings.length / positions)
    apply_flash_attention(model)  # no table of scores [S, S]
    model = ADAPTERS.get(settings.method, lambda model: model)(model)
    apply_chunked_cross_entropy(model)  # no table of logits [S, V]
    apply_tiled_mlp(model, norms=True)  # MLPs see some tokens at a time
    apply_activation_checkpointing(model)  # of a block only its input stays

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=settings.learning_rate, fused=True)
    schedule = get_constant_schedule_with_warmup(optimizer, 2)
    facts = {name: str(value) for name, value in asdict(settings).items() if name != "output"}
    parts = {"schedule": schedule, "precision": precision}
    state = {"model": model, "optimizer": optimizer, "run": facts, "parts": parts}
    done = load_checkpoint(checkpoint, **state) if checkpoint.exists() else 0

    def inputs_away() -> AbstractContextManager:
        if not settings.inputs:
            return nullcontext()
        # One on its way in each direction: those of long texts are large.
        return offload_activations(model, to=settings.inputs, in_flight=1)

    @torch.no_grad()
    def held_out_loss() -> float:
        last = pieces[-1:]
        with precision.autocast():
            return model(input_ids=last, labels=last, use_cache=False).loss.item()

    if done == 0:
        print(f"held-out loss before: {held_out_loss():.3f}")
    with PeakMemory() as memory:
        for step in range(done, settings.steps):
            row = pieces[step : step + 1]  # [1, S]
            with inputs_away():
                with precision.autocast():
                    loss = model(input_ids=row, labels=row, use_cache=False).loss
                precision.backward(loss)
            precision.step(optimizer, max_grad_norm=1.0)
            schedule.step()
            optimizer.zero_grad()
            print(f"step {step + 1:>4}  loss {loss.item():.3f}", flush=True)
            if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
                save_checkpoint(checkpoint, step=step + 1, **state)

    print(f"peak of tensors: {memory.peak / 2**20:,.0f} MiB")
    print(f"held-out loss after:  {held_out_loss():.3f}")
    model.save_pretrained(settings.output)


def base_model(settings: Settings, dtype: torch.dtype) -> PreTrainedModel:
    """The model without adapters. In 16 bits the card might not hold it: packed, layer by layer."""
    if settings.method != "qlora":
        return load_model(settings.model, dtype=dtype)
    model = load_model(settings.model, dtype=dtype, device="cpu")
    model = quantize_nf4(model, compute_dtype=dtype, device=machine().device)
    return model.to(machine().device)  # what is not packed: the embedding and the norms


if __name__ == "__main__":
    main(*HfArgumentParser(Settings).parse_args_into_dataclasses())
