"""Runs of programs of their own in the form in which they are written, with numbers to divide."""

from __future__ import annotations

import json

from tests.benchmarks.test_record import machine_facts

SIZES = {"hidden": 64, "layers": 2, "rows": 8, "seq_len": 64}


def written(folder, name, content):
    """The file of a program in `runs/`."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(machine_facts() | content))
    return path


def distillation(*, taught=(2.0, 2.1, 2.2), alone=(2.5, 2.5, 2.5)):
    """Students of three seeds, with the losses of each way."""
    runs = []
    for way, losses in (("labels", alone), ("teacher", taught)):
        for seed, loss in enumerate(losses):
            runs.append({"way": way, "seed": seed, "loss": loss, "seconds_per_step": 2.0})
    settings = {"ways": ["labels", "teacher"], "seeds": 3, "steps": 40}
    return {
        "settings": settings | {"rows": 2, "seq": 256, "held_out": 8},
        "influence": [0.1] * 30,
        "blocks": list(range(20)),
        "teacher": 1.5,
        "untrained": 9.0,
        "weight_bytes": {"teacher": 4e8, "student": 3e8},
        "decode": {"teacher": 0.06, "student": 0.04},
        "runs": runs,
    }


def quantization_aware(*, aware=(12.0, 12.2, 12.4), rounded=(14.0, 14.0, 14.0)):
    """Three seeds, whose perplexity in full precision is 10 after training."""
    runs = []
    for way, perplexities in (("full precision", rounded), ("aware", aware)):
        for seed, perplexity in enumerate(perplexities):
            found = {"full": 10.0, "rounded": perplexity, "seconds_per_step": 2.0}
            runs.append({"way": way, "seed": seed} | found)
    settings = {"ways": ["full precision", "aware"], "seeds": 3, "steps": 40, "rows": 2}
    settings |= {"lr": 1e-4, "aware_lr": 3e-4}
    return {
        "settings": settings | {"seq": 256, "held_out": 8, "weight_bits": 4, "group": 64},
        "untrained": {"full": 11.0, "rounded": 16.0},
        "runs": runs,
    }


def architecture(*, beyond=(0.1, 0.2, 0.3)):
    """Small models of three seeds: RMSNorm differs by `beyond` from the first line."""
    rows = {}
    for name, differences in {"as GPT": (0, 0, 0), "RMSNorm": beyond}.items():
        losses = [2 + difference for difference in differences]
        row = {"losses": losses, "beyond_baseline": list(differences)}
        rows[name] = row | {"parameters": 1000, "cache_bytes_per_token": 256}
    of_seeds = {"short": False, "seeds": [0, 1, 2], "sizes": SIZES}
    healed = {"trained": 2.0, "pooled": 4.0, "healed": 2.5, "never_pooled": 1.75}
    found = [{"kv_heads": 1, "seed": seed} | healed for seed in range(3)]
    times = []
    for count in (8192, 1):
        for way, seconds in {"plain": 8e-3, "compiled": 2e-3, "copy": 1e-3}.items():
            row = {"rows": count, "hidden": 2048, "dtype": "torch.float32", "way": way}
            times.append(row | {"seconds": seconds, "bytes_per_second": 4e6 / seconds})
    return {
        "threads": 1,
        "small_models": of_seeds | {"steps": 600, "rows": rows},
        "healing": of_seeds | {"steps": 300, "healing_steps": 60, "rows": found},
        "norms": {"short": False, "rounds": 20, "rows": times},
    }


def depths(*, beyond=(-0.1, -0.2, -0.3)):
    """Two depths of three seeds: the deeper one differs by `beyond` from the first line."""
    rows = []
    for layers, differences in {2: (0, 0, 0), 8: beyond}.items():
        losses = [2 + difference for difference in differences]
        row = {"layers": layers, "hidden": 64, "parameters": 1000, "losses": losses}
        rows.append(row | {"beyond_first": list(differences), "seconds_per_token": layers / 1000})
    sizes = {"weights": 1000, "rows": 8, "seq_len": 64}
    seeds = {"short": False, "steps": 600, "seeds": [0, 1, 2]}
    return {"threads": 1, "sizes": sizes, "rows": rows} | seeds


def time(median, low, high):
    """Milliseconds, or a ratio, of five rounds."""
    rounds = [low, low, median, high, high]
    return {"median": median, "low": low, "high": high, "rounds": rounds}


def peer(name, *, ratio=None, reason=None):
    """A row of 8 bits beside ours; `reason` is why it could not run."""
    row = {"name": name, "program": name, "version": "1.0", "bits": 8, "reason": reason}
    row |= {"beside": "ours, int8", "ratio": ratio, "prefill_ratio": ratio}
    if reason is not None:
        return row | {"version": None, "decode_ms": None, "prefill_ms": None, "equal_tokens": None}
    return (
        row
        | {"decode_ms": time(20, 19, 21), "prefill_ms": time(900, 890, 910)}
        | {"equal_tokens": 48}
    )


def peers(*rows):
    """Our row, and those of other programs."""
    ours = peer("ours, int8") | {"beside": None}
    return {
        "threads": 1,
        "new_tokens": 48,
        "decode_after_tokens": 38,
        "prefill_tokens": 512,
        "rounds": 5,
        "rows": [ours, *rows],
    }
