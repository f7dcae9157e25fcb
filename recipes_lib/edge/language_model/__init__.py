"""A language model as one file for a phone: quantized, with its cache, for ExecuTorch's runtime.

Problem    A phone has no Python, little memory, and no room for 4 bytes per weight. And `generate`
           of transformers spends more time between the layers than in them.
Idea       ExecuTorch turns the model into a file of its own, a `.pte`: the graph, the weights,
           and the plan where each result lies in memory. Its runtime is a small C++ library.

               Hugging Face model
                 -> weights on their grids     4 bits, 64 inputs share a scale (torchao)
                 -> torch.export               one graph for 1 … max_length - 1 tokens
                 -> XNNPACK                    takes the linear layers and what lies between
                 -> model.pte                  logits of the last token, keys and values inside

           `custom_sdpa` attends only to what the cache holds, `update_cache` writes a token into it
           in place. Without them each token is compared with all positions, and the cache copied.
Saves      With 4 bits in the blocks, 8 in the output layer and in the embedding, `predicted_bytes`
           of a file. No interpreter between the layers of a step.
Costs      An export takes seconds per layer and gigabytes of memory. Four bits cost quality. The
           output layer has a copy of its own, also where it shared its weights with the embedding.
           The length is fixed.
Use when   A Llama (SmolLM2 is one), a Mistral without a window or a Qwen2 is to answer on a phone,
           a board or a laptop, one user at a time.
Not when   Many users at once: servers keep the GPU busy with vLLM. Laptops without a build of
           ExecuTorch: `edge/gguf_export.py` and llama.cpp.
In production   `python -m executorch.extension.llm.export.export_llm --config …` with
           `quantization.qmode=8da4w`, `group_size=64`, `use_hqq=False`, which rounds the output
           layer to 4 bits as well; a checkpoint that torchao has quantized keeps it at 8 bits. On
           the device: LlmModule (Android), TextLLMRunner (iOS), llama_main.
Source     ExecuTorch, "Exporting LLMs", docs.pytorch.org/executorch; Liu et al., "MobileLLM",
           arXiv 2402.14905.

Shapes: N outputs and K inputs of a layer, D of a head, H heads, S tokens, V vocabulary.

weights  ... names, order and grid of the weights that ExecuTorch expects
runtime  ... the file in the runtime: the prompt, then token by token
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.measure.machine import require
from recipes_lib.core.model.causal_lm import (
    decoder_blocks,
    longest_text,
    without_adapters,
)
from recipes_lib.core.model.integer_grid import check_group_divides
from recipes_lib.core.model.linears import quantized_layers
from recipes_lib.edge._delegated_operators import Delegation, read_delegation, require_delegated
from recipes_lib.edge._exported_file import ExportedFile, whole_or_none
from recipes_lib.edge._graph import sparing_the_collector
from recipes_lib.edge._llama import require_llama
from recipes_lib.edge._silenced_libraries import noise_to
from recipes_lib.edge.language_model.runtime import PteLanguageModel
from recipes_lib.edge.language_model.weights import (
    LINEARS,
    bits_of_ends,
    llama_parameters,
    llama_weights,
    require_same_logits,
)

FAMILIES_OF_EXECUTORCH = ("llama", "mistral", "qwen2")
LLAMA_3_ANGLES = (1.0, 8192)  # ExecuTorch has these two of "llama3" as constants
GROUP_UNIT = 32  # XNNPACK's kernels for 4 bits take groups of 32, 64, 96, …
ROWS_LOOKED_AT = 8  # of each layer, to see whether it is on a grid already
# One that `export_llama` never downloads. All of them are built from the same source.
MODEL_CLASS = "llama3"

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
    """What an app does with a language model's file: `read(tokens, position)` gives logits [V]."""
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
    custom_attention: bool = True,
    max_length: int = 256,
    tokenizer: Any = None,
) -> ExportedFile:
    """Write `model` as a `.pte` for ExecuTorch's runtime on CPUs. The model stays as it is.

    Before the export, ExecuTorch's Llama gets the weights and has to answer as the model does. The
    file appears under its name when it is complete. What the libraries print goes into a file
    beside it, with the ending `.log`. Nothing is ever downloaded.

    Args:
        model: a causal LM of one of `FAMILIES_OF_EXECUTORCH`, also one that trains with
            `apply_quantization_aware`: its weights are rounded here, on the grid of its training.
        path: of the file, which ends in `.pte`.
        weight_bits: of the linear layers in the blocks: 4 in groups, or 8 with one scale per row.
            The embedding and the output layer always get 8. None keeps the whole file in fp32.
        group: inputs that share a scale, a multiple of 32 that divides every layer.
        custom_attention: attend with the operators made for it. A C++ program that is built against
            the wheel has no kernels for them: False makes a file for it, which is slower.
        max_length: positions of the cache, those of the prompt and of the answer together; at most
            those that the model was trained for.
        tokenizer: of the model; the ids that begin and end a text are written into the file.
            None: those of the model's generation_config, as far as it has them.
    """
    path = Path(path)
    check_choice((4, 8, None), weight_bits=weight_bits)
    _require_what_executorch_runs(model, max_length)
    if weight_bits == 4:
        _check_groups_divide_rows(without_adapters(model), group)
    model = without_adapters(model)
    metadata = _special_tokens(model, tokenizer)
    require("executorch")
    start = time.perf_counter()
    with noise_to(path.with_suffix(".log")):
        require_same_logits(model, weight_bits, group)
        with whole_or_none(path) as unfinished:
            settings = _llama_settings(unfinished, custom_attention, max_length, metadata)
            Path(settings.base.params).write_text(json.dumps(llama_parameters(model.config)))
            torch.save(llama_weights(model, weight_bits, group), settings.base.checkpoint)
            delegation = _export_by_executorch(settings)
            # Products of attention may stay outside: with plain attention they do.
            require_delegated(delegation, operators=("linear", "addmm", "mm"))
    seconds = time.perf_counter() - start
    return ExportedFile(path, bytes=path.stat().st_size, seconds=seconds, delegation=delegation)


def load_language_model(path: str | Path, *, threads: int = 1) -> PteLanguageModel:
    """Load a `.pte` that `export_language_model` has written into ExecuTorch's runtime."""
    return PteLanguageModel(Path(path), threads=threads)


def _llama_settings(
    path: Path, custom_attention: bool, max_length: int, metadata: dict[str, Any]
) -> Any:
    """The settings of a language model's export, all that `export_llama` would guess.

    Left alone, it downloads a model if there is no checkpoint, takes 10,000 as the base of the
    rotation, rounds the output layer to four bits and skips layers that its group does not divide.
    None of this says a word.
    """
    from executorch.extension.llm.export.config.llm_config import LlmConfig, ModelType

    settings = LlmConfig()
    settings.base.model_class = ModelType(MODEL_CLASS)
    settings.base.checkpoint = str(path.with_name("weights.pth"))
    settings.base.params = str(path.with_name("parameters.json"))
    settings.base.metadata = json.dumps(metadata)
    settings.model.use_kv_cache = True
    settings.model.use_sdpa_with_kv_cache = custom_attention
    settings.export.max_seq_length = max_length
    settings.export.max_context_length = max_length
    settings.export.output_name = str(path)
    settings.backend.xnnpack.enabled = True
    settings.backend.xnnpack.extended_ops = True  # 10 % faster
    # The weights are on their grids already.
    settings.quantization.qmode = None
    settings.quantization.embedding_quantize = None
    return settings


def _export_by_executorch(settings: Any) -> Delegation:
    from executorch.examples.models.llama import export_llama_lib

    # The public `export_llama` returns only the file's name. This is what it calls: it also
    # returns the lowered program.
    with sparing_the_collector():
        builder = export_llama_lib._export_llama(settings)
    return read_delegation(builder.edge_manager.exported_program().graph_module)


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _require_what_executorch_runs(model: Any, max_length: int) -> None:
    """Raise ValueError for what a few tokens of a language model in ExecuTorch do not show."""
    require_llama(model, families=FAMILIES_OF_EXECUTORCH, rope_types=("default", "llama3"))
    config = without_adapters(model).config
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        check_choice([LLAMA_3_ANGLES[0]], low_freq_factor=rope["low_freq_factor"])
        original = rope["original_max_position_embeddings"]
        check_choice([LLAMA_3_ANGLES[1]], original_max_position_embeddings=original)
    check_whole(least=2, most=longest_text(config), max_length=max_length)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) and window is not None and max_length > window:
        raise ValueError(
            f"max_length={max_length} is longer than the model's window of {window} tokens, which "
            f"the export does not know: give max_length={window} or less"
        )
    for name, by in quantized_layers(model).items():
        if by != "apply_quantization_aware":  # which rounds fp32 weights in each forward
            raise ValueError(
                f"{name} is quantized by {by} already, and a second rounding would use another "
                f"grid: export the model as it was before"
            )


def _check_groups_divide_rows(model: Any, group: int) -> None:
    """Raise ValueError unless groups of the `.pte`'s 4-bit weights divide the rows of layers."""
    if group % GROUP_UNIT != 0:
        raise ValueError(f"group={group}: XNNPACK's kernels take multiples of {GROUP_UNIT}")
    for number, block in enumerate(decoder_blocks(model)):
        for name in LINEARS:
            weight = block.get_submodule(name).weight
            check_group_divides(weight.shape[1], group, f"layers.{number}.{name}")
            _check_not_rounded(weight, f"layers.{number}.{name}", group)


def _check_not_rounded(weight: Tensor, name: str, group: int) -> None:
    """Rounded weights that the `.pte` rounds again land on another grid, and lose a second time."""
    rows = weight.detach()[:ROWS_LOOKED_AT].float()
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


def _special_tokens(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The ids that begin and end a text, for ExecuTorch's runner: its own defaults are others."""
    source = model.generation_config
    if tokenizer is not None:
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


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_bytes(model: Any, *, weight_bits: int | None = 4, group: int = 64) -> int:
    """The weights and scales of the `.pte`, in bytes; arguments as in `export_language_model`."""
    causal = without_adapters(model)
    total = 0
    for end in (causal.get_input_embeddings(), causal.get_output_embeddings()):
        total += _weight_bytes(end.weight, bits_of_ends(weight_bits), group)
    for block in decoder_blocks(causal):
        for parameter in block.parameters():
            bits = weight_bits
            if parameter.dim() == 1:  # norms and biases
                bits = None
            total += _weight_bytes(parameter, bits, group)
    return total


def _weight_bytes(weight: Tensor, bits: int | None, group: int) -> int:
    if bits is None:
        return 4 * weight.numel()
    if bits == 8:
        return weight.numel() + 4 * len(weight)
    return weight.numel() // 2 + 2 * weight.numel() // group
