"""Train a model that is too large for the card: QLoRA, a loss in chunks, checkpoints, 16 bits.

    python scripts/train_large_model.py                     # SmolLM2 on this machine, 40 steps
    python scripts/train_large_model.py --model meta-llama/Llama-3.1-8B --rows 2 --length 1024
    python scripts/train_large_model.py --model meta-llama/Llama-3.1-8B --data mine.jsonl \
        --streamed host

The first line reaches a held-out loss of 2.86 from 4.10, with 256 MiB of tensors at the peak (two
CPU cores, one run). The last one is for a card that cannot hold the packed blocks: two of them are
there at a time. They are packed on the host first, which takes minutes.

Everything is in `main`, from top to bottom. Each recipe is one line: leave out what you do not
need. Blocks are not compiled here, as they are in the best row of notebook 01: its rows have one
length, and rows of pairs have many. The same command once more goes on from the last checkpoint,
and changes nothing after the last step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import HfArgumentParser, get_cosine_schedule_with_warmup

from recipes_lib.core.data import collate, load_instructions
from recipes_lib.core.data.losses_and_answers import evaluate
from recipes_lib.core.data.row_order import rows_of_step
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.machine import machine, seed_everything
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.fine_tuning.qlora import apply_qlora, quantize_nf4
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.layer_streaming import apply_layer_streaming
from recipes_lib.precision.mixed_precision import mixed_precision
from recipes_lib.training.exact_resume import load_checkpoint, save_checkpoint


@dataclass
class Settings:
    """What a run is; every field is an option of the command line."""

    model: str = "smollm2"  # or a hub id, or a folder
    data: str = "docstrings"  # or a file of pairs (JSON lines, CSV, Parquet), or a hub data set
    output: Path = Path("runs/large-model")  # the adapters, and the checkpoint while it runs
    rows: int = 8  # of a step
    length: int = 128  # tokens of a row at most
    steps: int = 40  # of the optimizer, a batch of `rows` each
    learning_rate: float = 5e-4  # of adapters: about ten times that of full fine-tuning
    rank: int = 16  # of adapters, whose memory grows with it
    streamed: str = ""  # "host" or "disk": weights wait there (layer streaming)
    held_out: int = 64  # pairs that are not trained on
    save_every: int = 20  # steps
    seed: int = 0  # of the adapters' first weights and of the order of rows


def main(settings: Settings) -> None:
    seed_everything(settings.seed)
    settings.output.mkdir(parents=True, exist_ok=True)
    checkpoint = settings.output / "checkpoint.pt"

    # Data: pairs of a question and an answer, of which only the answer is trained on.
    tokenizer = load_tokenizer(settings.model)
    source = {} if settings.data == "docstrings" else {"dataset": settings.data}
    pairs = list(load_instructions(tokenizer, max_tokens=settings.length, **source))
    held_out, pairs = pairs[: settings.held_out], pairs[settings.held_out :]
    padding = tokenizer.pad_token_id

    # The model: a frozen base in 4 bits, and adapters that train. In 16 bits it is too large for
    # the card, so the host reads it, and its layers move one after the other, when they are packed.
    precision = mixed_precision()  # bf16 where the hardware has it, fp16 on a T4, fp32 else
    model = load_model(settings.model, dtype=precision.dtype, device="cpu")
    # Streamed layers are packed on the host: the card might not hold all of them in 4 bits either.
    home = "cpu" if settings.streamed else machine().device
    model = quantize_nf4(model, compute_dtype=precision.dtype, device=home).to(home)
    model = apply_qlora(model, rank=settings.rank, alpha=2 * settings.rank)  # finds the 4 bits
    if settings.streamed:  # has checkpoints of its own; its check would compute all on the host
        apply_layer_streaming(model, to=settings.streamed, device=machine().device, check=False)
    else:
        apply_activation_checkpointing(model)  # activations of one block at a time
    apply_chunked_cross_entropy(model)  # no table of all logits

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=settings.learning_rate, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, settings.steps // 20, settings.steps)

    # All that the next step reads. A run with other settings is refused.
    facts = {name: str(value) for name, value in asdict(settings).items() if name != "output"}
    parts = {"schedule": schedule, "precision": precision}
    state = {"model": model, "optimizer": optimizer, "run": facts, "parts": parts}
    done = load_checkpoint(checkpoint, **state) if checkpoint.exists() else 0
    if done == 0:
        print(f"held-out loss before: {evaluate(model, held_out, pad_token_id=padding):.3f}")

    with PeakMemory() as memory:
        for step in range(done, settings.steps):
            chosen = rows_of_step(
                step, rows=len(pairs), rows_per_step=settings.rows, seed=settings.seed
            )
            batch = collate(
                [pairs[index] for index in chosen],
                pad_token_id=padding,
                device=machine().device,
            )
            with precision.autocast():
                loss = model(**batch, use_cache=False).loss
            precision.backward(loss)
            precision.step(optimizer, max_grad_norm=1.0)
            schedule.step()
            optimizer.zero_grad()
            print(f"step {step + 1:>4}  loss {loss.item():.3f}", flush=True)
            if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
                save_checkpoint(checkpoint, step=step + 1, **state)

    print(f"peak of tensors: {memory.peak / 2**20:,.0f} MiB")
    print(f"held-out loss after:  {evaluate(model, held_out, pad_token_id=padding):.3f}")
    model.save_pretrained(settings.output)  # the adapters: some megabytes


if __name__ == "__main__":
    main(*HfArgumentParser(Settings).parse_args_into_dataclasses())
