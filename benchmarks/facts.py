"""What a notebook notes beside the rows of its ladder, each fact in the words of one cell."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.sentences import beside

# --- notebooks 01, 04 and 05 ----------------------------------------------------------------------


def mean_of_means(facts: dict[str, Any]) -> str:
    return f"gradient off by {facts['naive_error']:.0%}"


def dynamic_batch(facts: dict[str, Any]) -> str:
    expected, found = facts["micro_batches"]
    return f"{expected} micro-batches expected, {found} found"


def answers_only(facts: dict[str, Any]) -> str:
    return f"{facts['targets']:.0%} of the tokens carry loss"


def held_out_loss(facts: dict[str, Any]) -> str:
    change = "{difference:+.2f} nats per token, {low:+.2f} to {high:+.2f}"
    return change.format(**facts["verdict"])


def eight_bit_states(facts: dict[str, Any]) -> str:
    sizes = [
        f"{library.removesuffix(', fused')} {size:.2f}"
        for library, size in facts["state_bytes"].items()
    ]
    return f"bytes per parameter: {', '.join(sizes)}"


def pure_bf16(facts: dict[str, Any]) -> str:
    shares = [f"{way} {facts['changed'][way]:.0%}" for way in ("nearest", "stochastic", "master")]
    return f"weights that move: {', '.join(shares)}"


def packing(facts: dict[str, Any]) -> str:
    useful = facts["useful"]
    packed = useful["packed"] / useful["padded"]
    sorted_rows = useful["by length"] / useful["padded"]
    return f"{packed:.2f}× useful tokens/s, by sorting {sorted_rows:.2f}×"


def merge(facts: dict[str, Any]) -> str:
    return f"logits off by {facts['merge_error']:.1e} when it is loaded again"


def resume(facts: dict[str, Any]) -> str:
    verdict = "differ"
    if facts["exact"]:
        verdict = "identical"
    return f"losses {verdict} after SIGKILL"


def flash(facts: dict[str, Any]) -> str:
    slopes = facts["slopes"]
    return f"memory grows as S^{slopes['flash attention']:.2f}, eager S^{slopes['baseline']:.2f}"


def loss(facts: dict[str, Any]) -> str:
    ways = facts["loss"]
    memory = ways["ours"]["peak_bytes"] / ways["plain"]["peak_bytes"]
    time = ways["ours"]["seconds"] / ways["plain"]["seconds"]
    against_torch = []
    for name, cost in ways.items():
        if name.startswith("torch"):  # "torch", or with options "torch, 256 rows"
            _, _, options = name.partition(", ")
            ratio = ways["ours"]["seconds"] / cost["seconds"]
            against_torch.append(f"{ratio:.2f}× the time with {options or 'its default'}")
    return (
        f"ours takes {memory:.2f}× the memory and {time:.2f}× the time of all logits; "
        f"of `F.linear_cross_entropy` {', '.join(against_torch)}"
    )


def faster(local: dict[str, Any], way: str) -> str:
    """A pattern of attention against full causal attention."""
    return (
        f"{local['speedup'][way]:.1f}× faster at {local['tokens']:,} tokens, "
        f"{local['ideal'][way]:.1f}× fewer pairs"
    )


def sliding_window(facts: dict[str, Any]) -> str:
    return faster(facts["local"], "sliding window")


def block_sparse(facts: dict[str, Any]) -> str:
    return faster(facts["local"], "block-sparse")


def curriculum(facts: dict[str, Any]) -> str:
    # The mean over the seeds of each schedule.
    reached = {name: statistics.fmean(seeds) for name, seeds in facts["curriculum"].items()}
    return (
        f"loss {reached['curriculum']:.2f}, fixed length {reached['fixed length']:.2f}, "
        f"at equal compute"
    )


def trainer(facts: dict[str, Any]) -> str:
    return beside(facts["production"], "Trainer")


def sft_trainer(facts: dict[str, Any]) -> str:
    return beside(facts["production"], "SFTTrainer")


# --- notebook 02 ----------------------------------------------------------------------------------


def bandwidth(facts: dict[str, Any]) -> str:
    """Latency and bandwidth of an all-reduce; nothing where times were too uneven for a line."""
    if "all_reduce" not in facts["links"]:
        return ""
    latency, rate = facts["links"]["all_reduce"]
    return f"all-reduce by gloo: {latency * 1e6:.0f} µs a message, then {rate / 1e9:.2f} GB/s"


def quantized_shards(facts: dict[str, Any]) -> str:
    """What a rank keeps of a QLoRA model, and how far the losses are off."""
    sizes = facts["quantized"]
    less = 1 - sizes["sharded"] / sizes["one process"]
    return f"{less:.0%} fewer bytes per rank on 2, losses to {facts['quantized_difference']:.0e}"


def experts(facts: dict[str, Any]) -> str:
    """The same of a mixture of experts."""
    sizes = facts["experts"]
    less = 1 - sizes["shared"] / sizes["one process"]
    return f"{less:.0%} fewer bytes per rank on 2, losses to {facts['expert_difference']:.0e}"


def data_loading(facts: dict[str, Any]) -> str:
    """How much of the time a step waits for its batch."""
    stalls = facts["stalls"]
    return f"waiting {stalls['no worker']:.0%} → {stalls['a worker']:.0%} of the time"


def checkpoint(facts: dict[str, Any]) -> str:
    """For how long a save stops the training."""
    stall = {name: 1e3 * seconds for name, seconds in facts["checkpoint"].items()}
    return (
        f"a save stops all for {stall['foreground']:.0f} ms, behind for {stall['background']:.0f}"
    )


# --- notebook 03 ----------------------------------------------------------------------------------


def two_terms(facts: dict[str, Any]) -> str:
    """The fixed milliseconds of a token in both loops."""
    milliseconds = {name: 1e3 * overhead for name, (overhead, _) in facts["overhead"].items()}
    theirs = milliseconds["model.generate"]
    ours = milliseconds["decode loop"]
    return (
        f"{theirs:.1f} ms of a token beside its bytes with `generate`, {ours:.1f} ms with the loop"
    )


def compiled_decoding(facts: dict[str, Any]) -> str:
    """The compiled step against the same step uncompiled, each turn against its neighbour.

    Nothing where no compiler was there.
    """
    timed = facts.get("compiled", {"seconds_per_token": {}})
    if "compiled" not in timed["seconds_per_token"]:
        return ""
    turns = timed["seconds_per_token"]
    ratios = [before / after for before, after in zip(turns["uncompiled"], turns["compiled"])]
    middle = statistics.median(ratios)
    first_text = timed["first_run"]["compiled"]
    return (
        f"{middle:.2f}× ({min(ratios):.2f}–{max(ratios):.2f}) as fast as uncompiled, "
        f"{timed['blocks']} blocks; {first_text:.0f} s or more for the first text"
    )


def four_bits(facts: dict[str, Any]) -> str:
    """What rounding to four bits alone costs, on a grid that the weights did not have before."""
    before, _ = facts["qualities"]["fp32"]
    after, _ = facts["qualities"]["int4, groups of 64"]
    return f"perplexity {after / before - 1:+.1%} by rounding alone, in groups of 64"


def prompt_lookup(facts: dict[str, Any]) -> str:
    """From the text that gains least to the one that gains most."""
    gains = sorted((speedup, name) for name, _, speedup, _ in facts["speculation"])
    (least, worst), *_, (most, best) = gains
    return f"{least:.2f}× ({worst}) to {most:.2f}× ({best}) as fast"


def prefill(facts: dict[str, Any]) -> str:
    """A prompt with a fused kernel against eager attention, each in the same precision."""
    times = facts["prefill"]
    words = f"{times['fused, fp32']:.2f}× as fast as eager in fp32"
    if {"eager, 16 bits", "fused, 16 bits"} <= times.keys():
        in_16_bits = times["fused, 16 bits"] / times["eager, 16 bits"]
        words += f", {in_16_bits:.2f}× in 16 bits"
    return words


def batching(facts: dict[str, Any]) -> str:
    """Tokens per second of one text and of the largest batch, in the fastest precision."""
    fastest = max(facts["throughput"], key=lambda name: facts["throughput"][name][-1][1])
    (one, alone), *_, (many, together) = facts["throughput"][fastest]
    times = together / alone
    return f"{times:.1f}× as many tokens per second with {many} texts as with {one} ({fastest})"


# --- notebook 06 ----------------------------------------------------------------------------------


def gguf(facts: dict[str, Any]) -> str:
    """The file for llama.cpp, and how often it agrees with the model."""
    found = facts["gguf"]
    return (
        f"{found['bytes'] / 1e6:.0f} MB with {found['blocks']} blocks, and {found['agrees']:.0%} "
        f"of the likeliest tokens are the same"
    )


def size_budget(facts: dict[str, Any]) -> str:
    """How far the expected files are from those that were written."""
    off = max(abs(share) for share in facts["budget_off"].values())
    return f"{len(facts['budget_off'])} files off by {off:.1%} at most"


# By the name that a marker in a text has: <!--m 05 packing-->
FACTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "mean of means": mean_of_means,
    "dynamic batch": dynamic_batch,
    "answers only": answers_only,
    "held-out loss": held_out_loss,
    "8-bit states": eight_bit_states,
    "pure bf16": pure_bf16,
    "packing": packing,
    "merge": merge,
    "resume": resume,
    "flash": flash,
    "loss": loss,
    "sliding window": sliding_window,
    "block-sparse": block_sparse,
    "curriculum": curriculum,
    "Trainer": trainer,
    "SFTTrainer": sft_trainer,
    "bandwidth": bandwidth,
    "quantized shards": quantized_shards,
    "experts": experts,
    "data loading": data_loading,
    "checkpoint": checkpoint,
    "two terms": two_terms,
    "compiled decoding": compiled_decoding,
    "four bits": four_bits,
    "prompt lookup": prompt_lookup,
    "prefill": prefill,
    "batching": batching,
    "gguf": gguf,
    "size budget": size_budget,
}
