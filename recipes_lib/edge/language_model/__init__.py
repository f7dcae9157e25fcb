"""A language model as one file for a phone: quantized, with its cache, for ExecuTorch's runtime.

Problem    A phone has no Python. It has little memory, and no room for 4 bytes per weight.
           And `generate` of transformers spends more time between the layers than in them.
Idea       ExecuTorch turns the model into a file of its own, a `.pte`: the graph, the weights,
           and the plan where each result lies in memory. Its runtime is a small C++ library.

               Hugging Face model
                 -> weights on their grids     4 bits, 64 inputs share a scale (torchao)
                 -> torch.export               one graph for 1 … max_length - 1 tokens
                 -> XNNPACK                    takes the linear layers and what lies between
                 -> model.pte                  logits of the last token, keys and values inside

           Two operators are made for this: `custom_sdpa` attends only to what the cache holds, and
           `update_cache` writes a token into it in place. Without them each token is compared
           with all positions that the cache could hold, and the cache is copied.
Saves      With 4 bits in the blocks, 8 in the output layer and in the embedding, `predicted_bytes`
           of a file. No interpreter between the layers of a step.
Costs      An export takes seconds per layer and gigabytes of memory, on the machine that exports.
           Four bits cost quality. The output layer has a copy of its own, also where it shared its
           weights with the embedding; in fp32 that is a large one. The length is fixed.
Use when   A model of the Llama family is to answer on a phone, a board or a laptop, one user at a
           time.
Not when   Many users at once: servers keep the GPU busy with vLLM. Laptops without a build of
           ExecuTorch: `edge/gguf_export.py` and llama.cpp.
In production   `python -m executorch.extension.llm.export.export_llm --config …` with
           `quantization.qmode=8da4w`, `group_size=64`, `use_hqq=False`, which rounds the output
           layer to 4 bits as well; the same from a checkpoint that torchao has quantized keeps it
           at 8 bits. On the device: LlmModule (Android), TextLLMRunner (iOS), llama_main.
Source     ExecuTorch, "Exporting LLMs", docs.pytorch.org/executorch; Liu et al., "MobileLLM",
           arXiv 2402.14905.

The families: Llama (SmolLM2 is one), Mistral without a window, Qwen2 with its biases.

Shapes: N outputs and K inputs of a layer, D of a head, H heads, S tokens, V vocabulary.

lowering  ... from weights to the file, with nothing left to be guessed
runtime  ... the file in the runtime: the prompt, then token by token
weights  ... names, order and grid of the weights that ExecuTorch expects
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import (
    check_choice,
    check_existing_file,
    check_file,
    check_flag,
    check_whole,
)
from recipes_lib.core.model.causal_lm import (
    decoder_blocks,
    longest_text,
    require_causal_lm,
    require_full_attention,
    without_adapters,
)
from recipes_lib.core.model.integer_grid import check_group_divides
from recipes_lib.core.model.linears import quantized_layers
from recipes_lib.core.model.mixing import unmixed_class
from recipes_lib.edge._exported_file import ExportedFile, require_delegated
from recipes_lib.edge.language_model.lowering import PRODUCTS, lower
from recipes_lib.edge.language_model.runtime import PteLanguageModel
from recipes_lib.edge.language_model.weights import LINEARS, NORMS

FAMILIES = ("llama", "mistral", "qwen2")
# These layers have their weights unrounded, and round them in each forward.
TRAINS_ON_A_GRID = "apply_quantization_aware"
GROUP_UNIT = 32  # XNNPACK's kernels for 4 bits take groups of 32, 64, 96, …
ROWS_LOOKED_AT = 8  # of each layer, to see whether it is on a grid already

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_pairs(weight: Tensor, *, head_dim: int) -> Tensor:
    """The rows of a query's `weight` [N, K] in the order in which ExecuTorch turns them.

    Rotary positions turn two numbers of a head by one angle. Hugging Face takes number 0 and number
    D/2, ExecuTorch takes neighbours. With the rows in the wrong order nothing fails: the model
    talks nonsense.

        halves   a0 a1 a2 b0 b1 b2        pairs   a0 b0 a1 b1 a2 b2
    """
    rows = []
    for start in range(0, len(weight), head_dim):
        first_half, second_half = weight[start : start + head_dim].chunk(2)
        for a, b in zip(first_half, second_half):
            rows.append(a)
            rows.append(b)
    return torch.stack(rows)


def plain_greedy(
    read: Callable[[Tensor, int], Tensor], prompt: list[int], new_tokens: int
) -> list[int]:
    """What an app does with the file. `read(tokens [1, S], position)` returns logits [V]."""
    logits = read(torch.tensor([prompt]), 0)  # the whole prompt at once
    answer = [int(logits.argmax())]
    while len(answer) < new_tokens:
        position = len(prompt) + len(answer) - 1
        logits = read(torch.tensor([answer[-1:]]), position)  # then the last token only
        answer.append(int(logits.argmax()))
    return answer


# --- the technique --------------------------------------------------------------------------------


def export_language_model(
    model: Any,
    *,
    path: str | Path,
    weight_bits: int | None = 4,
    group: int = 64,
    output_bits: int | None = 8,
    embedding_bits: int | None = 8,
    custom_attention: bool = True,
    max_length: int = 256,
    tokenizer: Any = None,
) -> ExportedFile:
    """Write `model` as a `.pte` for ExecuTorch's runtime on CPUs. The model stays as it is.

    The file appears under its name when it is complete. What the libraries print goes into a file
    beside it, with the ending `.log`. Nothing is ever downloaded.

    Args:
        model: a Hugging Face causal LM of one of `FAMILIES`, also one that trains with
            `apply_quantization_aware`: its weights are rounded here, on the grid of its training.
        path: of the file, which ends in `.pte`.
        weight_bits: of the linear layers in the blocks: 4, or 8 with one scale per row. None keeps
            the whole file in fp32, and the next three arguments do not count.
        group: inputs that share a scale, a multiple of 32 that divides every layer.
        output_bits: of the output layer: 4 in groups, or 8 with one scale per row; None only
            together with weight_bits=None.
        embedding_bits: of the embedding: 8 with one scale per row, or None for fp32.
        custom_attention: attend with the operators made for it. A C++ program that is built against
            the wheel has no kernels for them: False makes a file for it, which is slower.
        max_length: positions of the cache, those of the prompt and of the answer together; at most
            those that the model was trained for.
        tokenizer: of the model; the ids that begin and end a text are written into the file.
            None: those of the model's generation_config, as far as it has them.
    Raises ValueError, before anything is written, for a model that ExecuTorch's Llama cannot be,
    for layers that are quantized already or train on another grid, for weights that are not finite,
    for a group that does not divide all layers, and for a tokenizer without a token that ends a
    text, unless the model has one.
    RuntimeError if a layer was left unquantized or outside of XNNPACK: no file stays.
    """
    check_file(example="model.pte", path=path)
    check_flag(custom_attention=custom_attention)
    path = Path(path)
    _check_widths(weight_bits, output_bits, embedding_bits)
    check_whole(least=2, max_length=max_length)
    _check_model(model, max_length)
    if weight_bits is None:
        output_bits = None
        embedding_bits = None
    else:
        _check_grids(
            without_adapters(model),
            weight_bits=weight_bits,
            group=group,
            output_bits=output_bits,
            embedding_bits=embedding_bits,
        )
    metadata = _special_tokens(model, tokenizer)
    _require_libraries()
    start = time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own until it is complete and checked: a cut export leaves no half file.
    with tempfile.TemporaryDirectory(prefix="export-", dir=path.parent) as scratch:
        unfinished = Path(scratch, "model.pte")
        delegation, quantized = lower(
            without_adapters(model),
            path=unfinished,
            log=path.with_suffix(".log"),
            weight_bits=weight_bits,
            group=group,
            output_bits=output_bits,
            embedding_bits=embedding_bits,
            custom_attention=custom_attention,
            max_length=max_length,
            metadata=metadata,
        )
        _check_lowered(model, delegation, quantized, wanted=weight_bits is not None)
        os.replace(unfinished, path)
    seconds = time.perf_counter() - start
    return ExportedFile(path, bytes=path.stat().st_size, seconds=seconds, delegation=delegation)


def load_language_model(path: str | Path, *, threads: int = 1) -> PteLanguageModel:
    """Load a `.pte` that `export_language_model` has written into ExecuTorch's runtime.

    Args:
        threads: of ExecuTorch, for all files of this process.
    Raises ValueError if there is no such file, or if it is another one; ImportError without
    ExecuTorch.
    """
    check_whole(threads=threads)
    check_existing_file(made_by="export_language_model", path=path)
    return PteLanguageModel(Path(path), threads=threads)


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _check_widths(
    weight_bits: int | None, output_bits: int | None, embedding_bits: int | None
) -> None:
    check_choice((4, 8, None), weight_bits=weight_bits)
    check_choice((4, 8, None), output_bits=output_bits)
    check_choice((8, None), embedding_bits=embedding_bits)
    if weight_bits is not None and output_bits is None:
        raise ValueError(
            "output_bits=None: the output layer of a quantized file has 4 or 8 bits; with "
            "weight_bits=None the whole file is in fp32"
        )


def _check_model(model: Any, max_length: int) -> None:
    """Raise ValueError unless ExecuTorch's Llama computes what this model does."""
    require_causal_lm(model)
    config = without_adapters(model).config
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{type(model).__name__} is no model of {', '.join(FAMILIES)}: ExecuTorch's Llama "
            f"would be another model; export it with the exporter of its own family"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r}: ExecuTorch's Llama computes silu")
    _check_rotation(config)
    _check_window(config, max_length)
    require_full_attention(model, way_out='call model.set_attn_implementation("sdpa") first')
    positions = longest_text(config)
    if positions is not None and max_length > positions:
        raise ValueError(
            f"max_length={max_length}: the model was trained for {positions} positions; give "
            f"max_length={positions} or less"
        )
    for name, by in quantized_layers(model).items():
        if by != TRAINS_ON_A_GRID:
            raise ValueError(
                f"{name} is quantized by {by} already, and a second rounding would use another "
                f"grid: export the model as it was before"
            )
    _check_parameters(without_adapters(model))


def _check_rotation(config: Any) -> None:
    """The angles are those of plain rotary positions, or stretched as in Llama 3.1."""
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type={kind!r}: the export knows 'default' and 'llama3'")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("only a part of each head is rotated: the export rotates all of it")
    if kind == "llama3":
        # ExecuTorch has these two as constants.
        fixed = (rope["low_freq_factor"], rope["original_max_position_embeddings"])
        if fixed != (1.0, 8192):
            raise ValueError(
                f"low_freq_factor and original_max_position_embeddings are {fixed}: ExecuTorch's "
                f"Llama has (1.0, 8192), those of Llama 3.1"
            )


def _check_window(config: Any, max_length: int) -> None:
    """A window that the cache never outgrows changes nothing."""
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    if used and window is not None and max_length > window:
        raise ValueError(
            f"max_length={max_length} is longer than the model's window of {window} tokens, which "
            f"the export does not know: give max_length={window} or less"
        )


def _check_parameters(model: Any) -> None:
    """Each parameter has a place in ExecuTorch's Llama, which drops what it does not know."""
    known = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for number in range(len(decoder_blocks(model))):
        block = f"model.layers.{number}"
        known |= {f"{block}.{name}.weight" for name in (*NORMS, *LINEARS)}
        known |= {f"{block}.self_attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj")}
    strange = [name for name, _ in model.named_parameters() if name not in known]
    if strange:
        raise ValueError(
            f"the export has no place for {strange[0]} (and {len(strange) - 1} others): merge "
            f"adapters into their layers first; other parts ExecuTorch's Llama does not have"
        )
    for number, block in enumerate(model.model.layers):
        for name in LINEARS:
            linear = block.get_submodule(name)
            # A class with a forward of its own computes something else than the weight says.
            plain = isinstance(linear, nn.Linear)
            if not plain or unmixed_class(linear).forward is not nn.Linear.forward:
                raise ValueError(
                    f"layers.{number}.{name} is a {type(linear).__name__}: give a model with "
                    f"nn.Linear"
                )
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{name} has weights that are not finite: the model has diverged")


def _check_grids(
    model: Any, *, weight_bits: int, group: int, output_bits: int, embedding_bits: int | None
) -> None:
    """The group divides every layer that has groups, and no layer is on another grid already."""
    check_whole(group=group)
    if group % GROUP_UNIT != 0 and 4 in (weight_bits, output_bits):
        raise ValueError(f"group={group}: XNNPACK's kernels take multiples of {GROUP_UNIT}")
    layers = {"the output layer": (model.get_output_embeddings(), output_bits)}
    for number, block in enumerate(model.model.layers):
        for name in LINEARS:
            layers[f"layers.{number}.{name}"] = (block.get_submodule(name), weight_bits)
    of_groups = [linear.weight.shape[1] for linear, bits in layers.values() if bits == 4]
    for name, (linear, bits) in layers.items():
        if bits == 4:
            check_group_divides(
                linear.weight.shape[1],
                group,
                name,
                all_widths=of_groups,
                unit=GROUP_UNIT,
                otherwise="weight_bits=8 and output_bits=8, which need no groups",
            )
            _check_not_rounded(linear, name, group)
            _check_trained_for(linear, name, bits=4, group=group)
        else:
            _check_trained_for(linear, name, bits=8, group=None)
        _check_trained_activations(linear, name)
    if embedding_bits is not None:
        embedding = model.get_input_embeddings()
        _check_trained_for(embedding, "the embedding", bits=embedding_bits, group=None)


def _check_trained_activations(linear: nn.Linear, name: str) -> None:
    """The file rounds what a layer reads to 8 bits, whatever the training did."""
    trained = getattr(linear, "activation_bits", None)
    if trained not in (None, 8):
        raise ValueError(
            f"{name} trains with activation_bits={trained}, and the file has 8: train with 8"
        )


def _check_trained_for(layer: nn.Module, name: str, *, bits: int, group: int | None) -> None:
    """A layer that trains on a grid is exported on that grid."""
    trained = (getattr(layer, "weight_bits", bits), getattr(layer, "group", group))
    if trained != (bits, group):
        raise ValueError(
            f"{name} trains with weight_bits={trained[0]} and group={trained[1]}, and the file "
            f"would have {bits} and {group}: give the same to both"
        )


def _check_not_rounded(linear: nn.Linear, name: str, group: int) -> None:
    """Rounded weights that are rounded again land on another grid, and lose a second time."""
    rows = linear.weight.detach()[:ROWS_LOOKED_AT].float()
    groups = rows.reshape(len(rows), -1, group)
    largest = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
    # The largest level of a group is 7, or -8.
    steps = torch.stack([groups / largest * 7, groups / largest * 8])
    on_grid = ((steps - steps.round()).abs() < 1e-3).all(dim=-1)
    if on_grid.any(dim=0).all():
        raise ValueError(
            f"the weights of {name} are rounded to 4 bits already, and a second rounding would use "
            f"another grid: export the model as it was before"
        )


def _check_lowered(model: Any, delegation: Any, quantized: int, *, wanted: bool) -> None:
    """All linear layers are quantized, and XNNPACK has all of them.

    RMSNorm's mean stays outside with every model, so "nothing is outside" cannot be asked for.
    """
    layers = len(LINEARS) * len(decoder_blocks(model)) + 1
    if wanted and quantized != layers:
        raise RuntimeError(f"{quantized} of {layers} linear layers are quantized: no file is kept")
    require_delegated(delegation, operators=PRODUCTS)
    inside = sum(delegation.row(name).inside for name in PRODUCTS)
    if inside != layers:
        raise RuntimeError(f"XNNPACK has {inside} of {layers} linear layers: no file is kept")


def _special_tokens(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The ids that begin and end a text, for the runner: its own defaults are other tokens.

    Raises ValueError for a tokenizer where neither it nor the model says what ends a text.
    """
    source = model.generation_config
    if tokenizer is not None:
        if not hasattr(tokenizer, "bos_token_id") or not hasattr(tokenizer, "eos_token_id"):
            raise ValueError(
                f"tokenizer is of type {type(tokenizer).__name__}: give the tokenizer itself, "
                f"which AutoTokenizer.from_pretrained(…) returns, or None"
            )
        source = tokenizer
    found = {}
    if source.bos_token_id is not None:
        found["get_bos_id"] = int(source.bos_token_id)
    ends = source.eos_token_id
    if ends is None:
        ends = model.generation_config.eos_token_id
    if isinstance(ends, int):
        ends = [ends]
    if ends:
        found["get_eos_ids"] = [int(token) for token in ends]
    elif tokenizer is not None:
        raise ValueError(
            "there is no token that ends a text, and the runner would take one of its own: set "
            "tokenizer.eos_token or model.generation_config.eos_token_id"
        )
    return found


def _require_libraries() -> None:
    for library in ("executorch", "torchao"):
        try:
            importlib.import_module(library)
        except ImportError as error:
            raise ImportError(
                f"the export needs {library}: `pip install executorch==1.5.1`, which brings torchao"
            ) from error


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_bytes(
    model: Any,
    *,
    weight_bits: int | None = 4,
    group: int = 64,
    output_bits: int | None = 8,
    embedding_bits: int | None = 8,
) -> int:
    """The weights and scales of the `.pte`, in bytes; arguments as in `export_language_model`.

    A scale of a group takes two bytes, one of a row four. The plan of the graph comes on top.
    Raises ValueError for no causal LM.
    """
    require_causal_lm(model)
    _check_widths(weight_bits, output_bits, embedding_bits)
    check_whole(group=group)
    if weight_bits is None:
        output_bits = None
        embedding_bits = None
    causal = without_adapters(model)
    total = _weight_bytes(causal.get_input_embeddings().weight, embedding_bits, None)
    total += _weight_bytes(causal.get_output_embeddings().weight, output_bits, group)
    for block in decoder_blocks(causal):
        for parameter in block.parameters():
            if parameter.dim() == 2:
                total += _weight_bytes(parameter, weight_bits, group)
            else:
                total += 4 * parameter.numel()
    return total


def _weight_bytes(weight: Tensor, bits: int | None, group: int | None) -> int:
    if bits is None:
        return 4 * weight.numel()
    levels = weight.numel() * bits // 8
    if bits == 8:
        return levels + 4 * len(weight)
    return levels + 2 * weight.numel() // group
