"""Fine-tune a pretrained model on pairs of a question and an answer: LoRA, packed rows.

    python scripts/finetune.py                                  # SmolLM2 on this machine
    python scripts/finetune.py --model Qwen/Qwen3-0.6B --data mine.jsonl --steps 200

Everything is in `main`, from top to bottom. The held-out losses before and after come with an
interval, and with an answer each. The same command once more goes on from the last checkpoint. With
all options of a production run: `python -m recipes_lib finetune --help`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import HfArgumentParser, get_cosine_schedule_with_warmup

from recipes_lib.core.data import load_instructions, load_pairs
from recipes_lib.core.data.evaluation import generate_answers
from recipes_lib.core.data.row_order import rows_of_step
from recipes_lib.core.measure.machine import machine, seed_everything
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.fine_tuning.completion_only_loss import completion_only_loss
from recipes_lib.fine_tuning.honest_evaluation import compare, held_out_losses
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.precision.mixed_precision import mixed_precision
from recipes_lib.training.exact_resume import load_checkpoint, save_checkpoint
from recipes_lib.training.gradient_accumulation import accumulate_gradients
from recipes_lib.training.sequence_packing import collate_packed, pack_sequences


@dataclass
class Settings:
    """What a run is; every field is an option of the command line."""

    model: str = "smollm2"  # or a hub id, or a folder
    data: str = "docstrings"  # or a file of pairs (JSON lines, CSV, Parquet), or a hub data set
    output: Path = Path("runs/finetune")  # the adapters, and the checkpoint while it runs
    length: int = 256  # tokens of a packed row; longer pairs are left out
    rows: int = 2  # packed rows of a step
    micro_batches: int = 2  # in which a step is computed
    steps: int = 30
    learning_rate: float = 5e-4  # of adapters: about ten times that of full fine-tuning
    rank: int = 16
    held_out: int = 48  # pairs that are not trained on
    save_every: int = 15  # steps
    seed: int = 0


def main(settings: Settings) -> None:
    seed_everything(settings.seed)
    settings.output.mkdir(parents=True, exist_ok=True)
    checkpoint = settings.output / "checkpoint.pt"

    # Data: pairs as tokens, in which only the answer has labels; then several pairs to a row.
    tokenizer = load_tokenizer(settings.model)
    padding = tokenizer.pad_token_id
    source = {} if settings.data == "docstrings" else {"dataset": settings.data}
    pairs = list(load_instructions(tokenizer, max_tokens=settings.length, **source))
    held_out, pairs = pairs[: settings.held_out], pairs[settings.held_out :]
    packed = pack_sequences(pairs, length=settings.length, seed=settings.seed)
    question = next(iter(load_pairs(**source)))["prompt"]

    # The model: a frozen base, and adapters on all of its linear layers.
    precision = mixed_precision()
    model = load_model(settings.model, dtype=torch.float32)
    model = apply_lora(model, rank=settings.rank, alpha=2 * settings.rank)
    apply_activation_checkpointing(model)

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=settings.learning_rate, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, settings.steps // 20, settings.steps)
    facts = {name: str(value) for name, value in asdict(settings).items() if name != "output"}
    parts = {"schedule": schedule, "precision": precision}
    state = {"model": model, "optimizer": optimizer, "run": facts, "parts": parts}
    done = load_checkpoint(checkpoint, **state) if checkpoint.exists() else 0

    def answer() -> str:
        return generate_answers(model, tokenizer, [question], max_new_tokens=40)[0]

    # Adapters begin as nothing: without them the model is the base, also in a run that goes on.
    with model.disable_adapter():
        before = held_out_losses(model, held_out, pad_token_id=padding)
        print(f"answer before: {answer()!r}")

    for step in range(done, settings.steps):
        order = {"rows_per_step": settings.rows * settings.micro_batches, "seed": settings.seed}
        chosen = [packed[index] for index in rows_of_step(step, rows=len(packed), **order)]
        micros = []
        for start in range(0, len(chosen), settings.rows):
            part = chosen[start : start + settings.rows]
            micros.append(collate_packed(part, pad_token_id=padding, device=machine().device))
        # One mean over the answers' tokens of all micro-batches, whatever their number.
        loss = accumulate_gradients(
            model,
            micros,
            loss_sum=completion_only_loss,
            autocast=precision.autocast,
            backward=precision.backward,
        )
        precision.step(optimizer, max_grad_norm=1.0)
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step + 1:>4}  loss {loss.item():.3f}", flush=True)
        if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
            save_checkpoint(checkpoint, step=step + 1, **state)

    print(f"answer after: {answer()!r}")
    print(compare(before, held_out_losses(model, held_out, pad_token_id=padding)))
    model.save_pretrained(settings.output)
    tokenizer.save_pretrained(settings.output)


if __name__ == "__main__":
    main(*HfArgumentParser(Settings).parse_args_into_dataclasses())
