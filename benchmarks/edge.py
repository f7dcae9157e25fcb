"""SmolLM2 in a `.pte`: what the file weighs, loads and writes, beside `generate` of transformers.

python -m benchmarks.edge

Four things are measured:

    export    the files are made in another process; this takes most of the time
    quality   perplexity of the whole model: fp32, rounded in eager mode, and from the file; and
              whether the fp32 file of a short model writes the same tokens as the model
    load      a fresh process loads a file, or the model, and writes a token: its memory
    times     seconds for each token behind a prompt, on one thread, in turns

The short model is SmolLM2 without most of its blocks. It talks nonsense, but its files show step by
step where the speed comes from: fp32, four bits, and the attention that is made for a cache.

The files stay in `runs/edge/smollm2`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import study
from recipes_lib.core.data import load_text
from recipes_lib.core.data.losses_and_answers import GREEDY, row_losses, text_windows
from recipes_lib.core.measure.provenance import runs_dir
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.core.model.bytes_of_tensors import weight_bytes
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.default_model import model_source
from recipes_lib.edge.language_model import export_language_model, load_language_model
from recipes_lib.edge.language_model.runtime import PteLanguageModel
from recipes_lib.precision.quantization_aware import apply_rounding
from recipes_lib.report.ladders.speed import Writing
from recipes_lib.workflows.on_device.background import in_background

WHOLE = 30  # blocks of SmolLM2-135M
SHORT = 6
PAD = 0  # no row is padded


@dataclass(frozen=True)
class FileOf:
    """One file: how many blocks of the model, and in what form. Arguments as in the export."""

    layers: int
    weight_bits: int | None
    custom_attention: bool = True


# The chain of the short model, and then the whole one.
FILES = {
    "short-fp32": FileOf(SHORT, None),
    "short-4bit-plain-attention": FileOf(SHORT, 4, custom_attention=False),
    "short-4bit": FileOf(SHORT, 4),
    "whole-4bit": FileOf(WHOLE, 4),
    "whole-fp32": FileOf(WHOLE, None),
}


@dataclass(frozen=True)
class Settings:
    """What is read and written, and how often."""

    prompt: int = 32  # tokens
    new_tokens: int = 33
    rounds: int = 7
    context: int = 256
    windows: int = 8


def model_of(layers: int) -> Any:
    """SmolLM2 with its first blocks only, in eval mode."""
    model = load_model().eval().requires_grad_(False)
    del decoder_blocks(model)[layers:]
    model.config.num_hidden_layers = layers
    return model


# --- export ---------------------------------------------------------------------------------------


def export(folder: Path) -> dict[str, Any]:
    """Make the files, one after the other. Returns what each of them is."""
    rows = {}
    for name, file in FILES.items():
        print(f"exporting {name}", flush=True)
        made = in_background(export_one, path=folder / f"{name}.pte", file=file).result()
        in_bf16 = weight_bytes(model_of(file.layers)) // 2
        rows[name] = {"bytes": made, "settings": asdict(file), "bf16_bytes": in_bf16}
    return rows


def export_one(*, path: Path, file: FileOf) -> int:
    """In the other process: the file, and its bytes."""
    options = asdict(file)
    model = model_of(options.pop("layers"))
    return export_language_model(model, path=path, **options).bytes


# --- quality --------------------------------------------------------------------------------------


def quality(folder: Path, settings: Settings) -> dict[str, Any]:
    """Perplexity of the whole model in each form, and equal tokens of the short one in fp32."""
    tokenizer = load_tokenizer()
    rows = text_windows(
        tokenizer,
        text=load_text(split="validation"),
        context=settings.context,
        windows=settings.windows,
    )
    found = {
        "tokens": sum(len(row["input_ids"]) - 1 for row in rows),
        "perplexity": {"eager fp32": eager_perplexity(model_of(WHOLE), rows)},
        "equal_tokens": equal_tokens(folder / "short-fp32.pte", settings),
    }
    for name, file in FILES.items():
        if file.layers != WHOLE:
            continue
        pte = load_language_model(folder / f"{name}.pte")
        found["perplexity"][name] = perplexity_of(pte, rows)
        if file.weight_bits is not None:
            rounded = apply_rounding(model_of(WHOLE))
            found["perplexity"][f"{name}, rounded in eager"] = eager_perplexity(rounded, rows)
    return found


def perplexity_of(pte: PteLanguageModel, rows: list) -> float:
    """exp of the mean loss over all tokens of `rows` but the first ones, read token by token."""
    total = 0.0
    count = 0
    for row in rows:
        ids = row["input_ids"]
        for position, following in enumerate(ids[1:]):
            logits = pte.step(int(ids[position]), position)
            total -= float(logits.log_softmax(-1)[following])
            count += 1
    return math.exp(total / count)


def eager_perplexity(model: Any, rows: list) -> float:
    losses, targets = row_losses(model, rows, pad_token_id=PAD, batch_size=1)
    return (losses.sum() / targets.sum()).exp().item()


def equal_tokens(path: Path, settings: Settings) -> list[int]:
    """[how many of the first greedy tokens are those of the eager model, out of how many]."""
    prompt = a_prompt(settings)
    expected = generated(model_of(SHORT), prompt, settings.new_tokens)
    written = load_language_model(path).greedy(prompt, settings.new_tokens)
    equal = 0
    while equal < len(expected) and written[equal] == expected[equal]:
        equal += 1
    return [equal, len(expected)]


def generated(model: Any, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    """Greedily by transformers, to the last token, whatever ends a text."""
    options = GREEDY | {"pad_token_id": PAD, "eos_token_id": None}
    out = model.generate(prompt, **options, min_new_tokens=new_tokens, max_new_tokens=new_tokens)
    return out[0, prompt.shape[1] :].tolist()


def a_prompt(settings: Settings) -> torch.Tensor:
    """The first tokens of the text, [1, S]."""
    text = load_text(split="validation")
    [row] = text_windows(load_tokenizer(), text=text, context=settings.prompt, windows=1)
    return torch.tensor([row["input_ids"]])


# --- load -----------------------------------------------------------------------------------------

LOADED = """
import sys, torch
from benchmarks import edge

torch.set_num_threads(1)
print(edge.measure_load(sys.argv[1], sys.argv[2]))
"""


def load(folder: Path) -> dict[str, Any]:
    """Memory of a fresh process, with the libraries imported before."""
    found = {}
    ways = [f"{name}.pte" for name, file in FILES.items() if file.layers == WHOLE]
    for way in [*ways, "eager fp32", "eager bf16"]:
        command = [sys.executable, "-c", LOADED, str(folder), way]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_load(folder: str, way: str) -> str:
    """In the fresh process: load, write one token, and say what it took. Returns JSON."""
    import psutil

    settings = Settings()
    prompt = a_prompt(settings)
    if way.startswith("eager"):
        generated(model_of(1), prompt, 1)  # what transformers imports only now
    else:
        short = next(Path(folder).glob("short-*.pte"))
        load_language_model(short).prefill(prompt)  # ExecuTorch's libraries
    process = psutil.Process()
    before = process.memory_info().rss
    if way.startswith("eager"):
        dtype = {"eager fp32": torch.float32, "eager bf16": torch.bfloat16}[way]
        generated(load_model(dtype=dtype).eval(), prompt, 1)
    else:
        load_language_model(Path(folder, way)).greedy(prompt, 1)
    return json.dumps({"rss": process.memory_info().rss - before})


# --- times ----------------------------------------------------------------------------------------


def times(folder: Path, settings: Settings) -> Iterator[dict[str, Any]]:
    """Seconds of each way for each token behind a prompt, in turns; after each turn."""
    prompt = a_prompt(settings)
    ways = ways_of(folder, prompt)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    turns = {}
    for name in ways:
        turns[name] = Writing(partial(ways.__getitem__, name), settings.new_tokens)
    for _ in range(settings.rounds):
        for name, turn in turns.items():
            rows[name].append({"perf_counter_token": turn()["seconds_per_token"]})
        yield rows


def ways_of(folder: Path, prompt: torch.Tensor) -> dict[str, Callable[[int], Any]]:
    """By name, a function that writes so many tokens behind the prompt."""
    eager = {
        "short eager fp32": model_of(SHORT),
        "whole eager fp32": model_of(WHOLE),
        "whole eager bf16": model_of(WHOLE).bfloat16(),
    }
    ways = {name: partial(generated, model, prompt) for name, model in eager.items()}
    for name in FILES:
        ways[name] = partial(load_language_model(folder / f"{name}.pte").greedy, prompt)
    return ways


# --- the run --------------------------------------------------------------------------------------


def measured(settings: Settings) -> Iterator[dict[str, Any]]:
    """What each part found, one after the other."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = runs_dir() / "edge" / "smollm2"
    yield {"source": model_source(), "export": export(folder)}
    yield {"quality": quality(folder, settings)}
    yield {"load": load(folder)}
    for found in times(folder, settings):
        yield {"times": found}


if __name__ == "__main__":
    study.run("edge", Settings(), measured, about=__doc__)
