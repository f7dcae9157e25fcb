"""A small model trained both ways: what does a part of the architecture change, at equal tokens?

    as GPT        LayerNorm, GELU, a head of keys for every head of queries, tied embeddings
    RMSNorm       the same with RMSNorm, without biases in the norms
    SwiGLU        the same with a gate in the MLP, at equal weights
    one KV head   the same with one head of keys and values for all heads of queries
    untied        the same with an output layer of its own
    as Llama      RMSNorm, SwiGLU and one head of keys and values

All of them read the same bytes of text in the same order, in the same step. So their times are
taken in turns, and their losses differ by the architecture and by the weights that they start from.
One seed says little: a difference counts if it has the same sign for every seed.

`pool_and_heal` asks another question: what does a trained model lose when its heads of keys and
values are pooled, and how much of that does a short run bring back?

The models are of StarCoder 2's family: rotary positions, LayerNorm, GELU, apart from these as
Llama. A byte is a token, so no tokenizer plays a part.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes_lib.architecture.grouped_query_attention import (
    apply_grouped_query_attention,
    predicted_cache_bytes,
)
from recipes_lib.architecture.rms_norm import apply_rms_norm
from recipes_lib.architecture.swiglu import apply_swiglu
from recipes_lib.core.data import load_text
from recipes_lib.core.measure.machine import machine
from recipes_lib.workflows.bench.kernels import now

BASELINE = "as GPT"
BYTES = 256  # the vocabulary
# The models have four heads with pairs of dimensions, so their width is a multiple of 32.
SIZES = {"hidden": 64, "layers": 2, "rows": 8, "seq_len": 64}
RATE = 2e-3  # of learning, at its highest
HELD_OUT_ROWS = 128
WARM_UP = 0.1  # the part of the steps in which the learning rate rises
TEXT_BYTES = 4_000_000  # more than any run here reads


@dataclass(frozen=True)
class Trained:
    """What became of one architecture; `losses` are held-out, in nats per byte, one per seed."""

    parameters: int
    cache_bytes_per_token: int
    seconds_per_step: float
    losses: list[float]
    beyond_baseline: list[float]  # each loss, less that of the baseline with the same seed

    @property
    def loss(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.losses)

    def __str__(self) -> str:
        difference = statistics.fmean(self.beyond_baseline)
        low = min(self.beyond_baseline)
        high = max(self.beyond_baseline)
        return (
            f"loss {self.loss:.3f} ({difference:+.3f}, {low:+.3f} to {high:+.3f})  "
            f"{self.parameters:9,} weights  {self.cache_bytes_per_token:6,} bytes of cache per "
            f"token  {1e3 * self.seconds_per_step:6.1f} ms per step"
        )


def compare_architectures(
    *, steps: int = 150, seeds: Sequence[int] = (0, 1, 2)
) -> dict[str, Trained]:
    """Train a small model of each architecture with each seed, on the same tokens per step."""
    train = bytes_of("train")
    held_out = rows_of_bytes(bytes_of("validation"), HELD_OUT_ROWS, SIZES["seq_len"], seed=0)
    losses: dict[str, list[float]] = {name: [] for name in ARCHITECTURES}
    seconds: dict[str, list[float]] = {name: [] for name in ARCHITECTURES}
    models: dict[str, Any] = {}
    for seed in seeds:
        models = {name: _small_model(name, seed) for name in ARCHITECTURES}
        batches = _batches_from_step(train, first=1000 * seed, count=steps)
        for name, took in train_side_by_side(models, batches, steps, RATE).items():
            seconds[name] += took
            losses[name].append(loss_on_rows(models[name], held_out))
    return {
        name: _trained_with_seed(model, seconds[name], losses, name)
        for name, model in models.items()
    }


def _batches_from_step(text: Tensor, *, first: int, count: int) -> Iterator[Tensor]:
    """For small models: rows [B, S] of the steps from this number on."""
    for number in range(first, first + count):
        yield rows_of_bytes(text, SIZES["rows"], SIZES["seq_len"], seed=number)


def _trained_with_seed(
    model: Any, seconds: list[float], losses: dict[str, list[float]], name: str
) -> Trained:
    """What has become of one small model with one seed."""
    beyond = [loss - base for loss, base in zip(losses[name], losses[BASELINE])]
    return Trained(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        cache_bytes_per_token=predicted_cache_bytes(model, tokens=1),
        seconds_per_step=statistics.median(seconds),
        losses=losses[name],
        beyond_baseline=beyond,
    )


# --- pooled heads, and a run that heals -----------------------------------------------------------


class Healing(NamedTuple):
    """Held-out losses of a small model with one seed, in nats per byte."""

    trained: float
    pooled: float
    healed: float
    never_pooled: float  # the trained model after the same further steps

    def __str__(self) -> str:
        return (
            f"trained {self.trained:.3f}, pooled {self.pooled:.3f}, healed {self.healed:.3f}, "
            f"never pooled {self.never_pooled:.3f}"
        )


def pool_and_heal(
    *, steps: int = 300, healing_steps: int = 60, seeds: Sequence[int] = (0, 1, 2)
) -> list[Healing]:
    """A small model trains, its heads of keys and values are pooled to one, and it trains on.

    The same model trains on without being pooled, on the same text: more steps help that one, too.
    """
    text = bytes_of("train")
    held_out = rows_of_bytes(bytes_of("validation"), HELD_OUT_ROWS, SIZES["seq_len"], seed=0)
    found = []
    for seed in seeds:
        model = _small_model(BASELINE, seed)
        batches = _batches_from_step(text, first=1000 * seed, count=steps)
        train_side_by_side({"trained": model}, batches, steps, RATE)
        whole = copy.deepcopy(model)
        trained = loss_on_rows(model, held_out)
        apply_grouped_query_attention(model, kv_heads=1)
        pooled = loss_on_rows(model, held_out)
        both = {"pooled": model.train(), "whole": whole.train()}
        batches = _batches_from_step(text, first=1000 * seed + steps, count=healing_steps)
        train_side_by_side(both, batches, healing_steps, RATE)
        healed = loss_on_rows(model, held_out)
        found.append(Healing(trained, pooled, healed, loss_on_rows(whole, held_out)))
    return found


# --- the models -----------------------------------------------------------------------------------


def _rms(model: Any) -> Any:
    return apply_rms_norm(model, exact=False, keep_bias=False)


def _as_llama(model: Any) -> Any:
    return apply_swiglu(_rms(model))


def _unchanged(model: Any) -> Any:
    return model


GPT = {"num_key_value_heads": 4, "tie_word_embeddings": True}
ONE_HEAD = GPT | {"num_key_value_heads": 1}
# By name: the configuration, and what is applied to the model that it describes.
ARCHITECTURES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    BASELINE: (GPT, _unchanged),
    "RMSNorm": (GPT, _rms),
    "SwiGLU": (GPT, apply_swiglu),
    "one KV head": (ONE_HEAD, _unchanged),
    "untied": (GPT | {"tie_word_embeddings": False}, _unchanged),
    "as Llama": (ONE_HEAD, _as_llama),
}


def _small_model(name: str, seed: int) -> Any:
    from transformers import AutoModelForCausalLM, Starcoder2Config

    options, change = ARCHITECTURES[name]
    config = Starcoder2Config(
        vocab_size=BYTES,
        hidden_size=SIZES["hidden"],
        intermediate_size=4 * SIZES["hidden"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=4,
        max_position_embeddings=SIZES["seq_len"],
        use_bias=False,
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )
    torch.manual_seed(seed)
    return change(AutoModelForCausalLM.from_config(config)).to(machine().device).train()


# --- text, steps and held-out loss ----------------------------------------------------------------


def bytes_of(split: str) -> Tensor:
    """For small models: the beginning of the standard library as bytes [N], each a token."""
    text = load_text(split=split).encode()[:TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def rows_of_bytes(text: Tensor, rows: int, seq_len: int, *, seed: int) -> Tensor:
    """For small models: rows [B, S] of bytes from places that the seed draws."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - seq_len, (rows, 1), generator=generator)
    places = starts + torch.arange(seq_len)  # [B, S]
    return text[places].long().to(machine().device)


def train_side_by_side(
    models: dict[str, Any], batches: Iterator[Tensor], steps: int, learning_rate: float
) -> dict[str, list[float]]:
    """Train small models side by side on the same batches; the seconds of each step of each."""
    optimizers = {}
    for name, model in models.items():
        optimizers[name] = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for step, ids in enumerate(batches):
        rate = learning_rate * _share_of_rate(step, steps)
        for name, model in models.items():
            start = now()
            optimizers[name].param_groups[0]["lr"] = rate
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizers[name].step()
            optimizers[name].zero_grad()
            seconds[name].append(now() - start)
    return seconds


def _share_of_rate(step: int, steps: int) -> float:
    """The rate of small models rises in the first tenth of steps, and falls along a cosine."""
    rising = max(round(WARM_UP * steps), 1)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


@torch.no_grad()
def loss_on_rows(model: Any, rows: Tensor) -> float:
    """The loss of a small model on these rows, in nats per byte."""
    model.eval()
    return model(input_ids=rows, labels=rows, use_cache=False).loss.item()
