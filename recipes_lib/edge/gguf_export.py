"""GGUF: one file with weights, settings and tokenizer, for llama.cpp and all that stands on it.

Problem    A laptop or a board is to run the model without Python. Ollama, LM Studio and llama.cpp
           read one format only. It has names, an order of rows and kinds of numbers of its own.
Idea       The file is a list of settings and a list of tensors. In the kind "q8_0", 32 weights
           beside each other are 32 levels of 8 bits and one scale of 16 bits:

               | scale | q0 q1 q2 … q31 |      weight ≈ scale * q        34 bytes for 32 weights
               scale = max |w| / 127           q = round(w / scale)

           Vectors, such as the weights of norms, stay in fp32.
Saves      q8_0 stores 8.5 bits per weight, f16 stores 16. The embedding is stored once where the
           output layer shares it. The file is mapped into memory, so it loads at once.
Costs      q8_0 rounds each weight by up to 1/254 of the largest of its 32. f16 has no weights above
           65,504.
Use when   The model is to run in llama.cpp, Ollama or LM Studio, on a CPU, a Mac or a small GPU.
Not when   An app calls the model: `edge/language_model` makes a file with a plan of its memory.
           Less than 8 bits: llama.cpp's `llama-quantize` makes "q4_k_m" from the f16 file.
In production   llama.cpp: `convert_hf_to_gguf.py FOLDER --outtype q8_0`, and then `llama-quantize
           model.gguf q4_k_m`. transformers reads such a file with `gguf_file=`.
Source     ggml, "GGUF", github.com/ggml-org/ggml/blob/master/docs/gguf.md; the `gguf` package.

The families: Llama (SmolLM2 is one) and Qwen2.

Shapes: N outputs and K inputs of a layer, D of a head, H heads.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes_lib.core.checks import check_choice
from recipes_lib.core.measure.machine import require
from recipes_lib.core.model.linears import refuse_quantized
from recipes_lib.core.model.vocabulary import stops_of
from recipes_lib.edge._exported_file import ExportedFile, whole_or_none
from recipes_lib.edge._llama import head_width, in_pairs, require_llama
from recipes_lib.edge._silenced_libraries import noise_to

KINDS = ("q8_0", "f16", "f32")
BLOCK = 32  # weights of q8_0 that share a scale
FAMILIES_OF_GGUF = ("llama", "qwen2")
# How llama.cpp cuts a text into words before it looks for tokens, by family and vocabulary.
PRE_TOKENIZERS = {
    ("llama", 49152): "smollm",
    ("llama", 128256): "llama-bpe",
    ("qwen2", 151936): "qwen2",
    ("qwen2", 152064): "qwen2",
}
ROTATED = ("q_proj", "k_proj")

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_q8_0(weight: Tensor) -> tuple[Tensor, Tensor]:
    """GGUF's Q8_0: `weight` [N, K] as levels [N, K/32, 32] from -127 to 127, and 16-bit scales."""
    blocks = weight.reshape(len(weight), -1, BLOCK)
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
    levels = (blocks / scale).round()
    return levels.to(torch.int8), scale.squeeze(-1).half()


# --- the technique --------------------------------------------------------------------------------


def export_to_gguf(
    model: Any,
    *,
    path: str | Path,
    kind: str = "q8_0",
    tokenizer: Any = None,
    pre_tokenizer: str | None = None,
) -> ExportedFile:
    """Write `model` as a `.gguf` file. It appears under its name when it is complete.

    Args:
        model: a Hugging Face causal LM of one of `FAMILIES_OF_GGUF`. It stays as it is.
        path: of the file, which ends in `.gguf`.
        kind: of the matrices: "q8_0", "f16" or "f32".
        tokenizer: of the model, with merges of bytes (BPE). None: the file has no tokenizer, and
            llama.cpp takes it for tokens only.
        pre_tokenizer: llama.cpp's name for how a text is cut into words, such as "smollm". None:
            the one that goes with the family and its vocabulary.
    """
    path = Path(path)
    check_choice(KINDS, kind=kind)
    gguf = require("gguf")
    _require_what_gguf_can_say(model)
    names = _names_in_gguf(model)
    vocabulary = None
    if tokenizer is not None:
        vocabulary = _vocabulary_of(model, tokenizer)
        pre_tokenizer = _pre_tokenizer_of(model.config, pre_tokenizer)
    start = time.perf_counter()
    with noise_to(), whole_or_none(path) as unfinished:
        writer = gguf.GGUFWriter(unfinished, model.config.model_type)
        _add_settings(writer, model.config, kind)
        if vocabulary is not None:
            _add_tokenizer(writer, vocabulary, tokenizer, pre_tokenizer)
            _add_stops(writer, model, tokenizer)
        _add_tensors(writer, model, names, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    seconds = time.perf_counter() - start
    return ExportedFile(path, bytes=path.stat().st_size, seconds=seconds)


def load_gguf(path: str | Path) -> Any:
    """Load a `.gguf` file back into transformers, in fp32 and in eval mode: a check of the file."""
    from transformers import AutoModelForCausalLM

    path = Path(path)
    with noise_to():
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    return model.eval()


def _add_settings(writer: Any, config: Any, kind: str) -> None:
    """The sizes by GGUF's names. What is missing has a default in llama.cpp, and it is silent."""
    import gguf

    file_types = {"q8_0": "MOSTLY_Q8_0", "f16": "MOSTLY_F16", "f32": "ALL_F32"}
    writer.add_file_type(gguf.LlamaFileType[file_types[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_name(str(config.model_type))
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    # Without them llama.cpp divides the hidden size by the heads, and heads that were pruned away
    # would make the others wider.
    writer.add_key_length(head_width(config))
    writer.add_value_length(head_width(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_width(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _add_tensors(writer: Any, model: Any, names: dict[str, str], kind: str) -> None:
    """The weights by GGUF's names, matrices in the kind of the file, and vectors in fp32."""
    import gguf

    number_type = gguf.GGMLQuantizationType[kind.upper()]
    # llama.cpp turns neighbours of a head, transformers halves; Qwen2 is turned by halves in both.
    in_other_order = ROTATED if model.config.model_type == "llama" else ()
    for name, parameter in model.named_parameters():  # a shared weight comes once
        weight = parameter.detach().to(device="cpu", dtype=torch.float32).contiguous()
        if name.split(".")[-2] in in_other_order:
            weight = in_pairs(weight, head_dim=head_width(model.config))
        if weight.dim() == 1:
            writer.add_tensor(names[name], weight.numpy())
        else:
            values = gguf.quants.quantize(weight.numpy(), number_type)
            writer.add_tensor(names[name], values, raw_dtype=number_type)


def _names_in_gguf(model: Any) -> dict[str, str]:
    """GGUF's name of each tensor of the model."""
    import gguf

    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(
        architecture[model.config.model_type], model.config.num_hidden_layers
    )
    names = {}
    for name, _ in model.named_parameters():
        names[name] = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if names[name] is None:
            raise ValueError(
                f"GGUF has no name for {name}: a technique has changed this layer, take it off "
                f"first (masks by remove_pruning, adapters by merge_and_unload)"
            )
    return names


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _require_what_gguf_can_say(model: Any) -> None:
    """Raise ValueError for what llama.cpp would compute in another way."""
    require_llama(model, families=FAMILIES_OF_GGUF, rope_types=("default",))
    refuse_quantized(model, way_out="export the model as it was before")
    config = model.config
    if config.model_type == "llama" and (config.attention_bias or config.mlp_bias):
        raise ValueError("a Llama with biases has no place for them in GGUF: use one without")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError(
            f"the model has a window of {config.sliding_window} tokens, and llama.cpp attends to "
            f"all of them in this family: give a model without a window"
        )


def _pre_tokenizer_of(config: Any, given: str | None) -> str:
    """GGUF's name for how a text is cut into words; ValueError for an unknown vocabulary."""
    if given is not None:
        return given
    known = PRE_TOKENIZERS.get((config.model_type, config.vocab_size))
    if known is None:
        raise ValueError(
            f"a {config.model_type} with {config.vocab_size} tokens is unknown: give "
            f"pre_tokenizer, llama.cpp's name for how a text is cut into words, such as 'smollm'"
        )
    return known


def _vocabulary_of(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The tokens that GGUF stores, those of the tokenizer's BPE in the order of their ids."""
    described = {}
    if hasattr(tokenizer, "backend_tokenizer"):
        described = json.loads(tokenizer.backend_tokenizer.to_str())
    if described.get("model", {}).get("type") != "BPE":
        raise ValueError(
            f"{type(tokenizer).__name__} is no tokenizer with merges of bytes (BPE): use "
            f"llama.cpp's convert_hf_to_gguf.py"
        )
    tokens = {number: text for text, number in described["model"]["vocab"].items()}
    special = {}
    for added in described["added_tokens"]:
        tokens[added["id"]] = added["content"]
        special[added["id"]] = added["special"]
    size = model.config.vocab_size
    return {
        "tokens": [tokens.get(number, f"[PAD{number}]") for number in range(size)],
        "types": [_token_type(number, tokens, special) for number in range(size)],
        "merges": [" ".join(pair) for pair in described["model"]["merges"]],
    }


def _token_type(number: int, tokens: dict[int, str], special: dict[int, bool]) -> int:
    """GGUF's numbers: 1 is normal, 3 controls the model, 4 is added by the user, 5 is unused."""
    if number not in tokens:
        return 5
    if number not in special:
        return 1
    if special[number]:
        return 3
    return 4


def _add_tokenizer(
    writer: Any, vocabulary: dict[str, Any], tokenizer: Any, pre_tokenizer: str
) -> None:
    """Tokens, their types and the merges, for llama.cpp."""
    writer.add_tokenizer_model("gpt2")  # GGUF's name for merges of bytes
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(_begins_a_text(tokenizer))
    template = getattr(tokenizer, "chat_template", None)
    if template is not None:
        writer.add_chat_template(template)


def _add_stops(writer: Any, model: Any, tokenizer: Any) -> None:
    """Where a text ends for llama.cpp: as in transformers, which its tokenizer may not know.

    GGUF has a name for each of three, and llama.cpp stops at all of them.
    """
    stops = stops_of(model)
    if tokenizer.eos_token_id not in (None, *stops):
        stops.append(tokenizer.eos_token_id)
    names = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, token in zip(names, stops, strict=False):
        add(token)


def _begins_a_text(tokenizer: Any) -> bool:
    """Whether llama.cpp has to put a first token before each text, as Llama 3's tokenizer does."""
    if tokenizer.bos_token_id is None:
        return False
    ids = tokenizer("a")["input_ids"]
    return len(ids) > 0 and ids[0] == tokenizer.bos_token_id
