"""A student made from its teacher: some of its blocks, chosen by what each does.

Problem    A smaller model with random weights has everything to learn. The large one holds most of
           it already, and not all of its blocks do equally much.
Idea       Measure on some text what each block does, and keep those that do most:

               influence of a block          1 - mean cosine(h before, h after)

           The student is a model of the same class with a smaller configuration, and with the
           weights that were kept.
Saves      The share of blocks that go, of weights, KV cache and time per token.
Costs      The loss jumps: the student has to be trained again, best by its teacher
           (`distillation`). The measurement takes a few forwards.
Use when   A trained model is too slow or too large, and text to train on is there.
Not when   Nothing can be trained afterwards. Where 8 or 4 bits are small enough: they cost less.
           Adapters or few bits are on the teacher: merge, or take the model in full precision.
           Channels and heads stay as many as they are.
In production   NVIDIA Model Optimizer `mtp.prune(…, mode="mcore_minitron")` on Megatron models;
           mergekit copies chosen layers (`merge_method: passthrough`), without a measurement.
Source     Men et al., "ShortGPT", arXiv 2403.03853; Muralidharan et al., "Compact Language Models
           via Pruning and Knowledge Distillation", arXiv 2407.14679.

Shapes: B batch, S sequence, T positions, D hidden.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.model.causal_lm import decoder_blocks, require_causal_lm
from recipes_lib.core.model.evaluating import evaluating

Batches = Iterable[dict[str, Tensor]]

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_student(teacher: Any, blocks: Sequence[int]) -> Any:
    """A copy of a Llama-like `teacher` that has these of its blocks, and no others."""
    student = copy.deepcopy(teacher)
    trunk = student.model
    trunk.layers = nn.ModuleList(trunk.layers[number] for number in blocks)
    student.config.num_hidden_layers = len(blocks)
    for number, block in enumerate(trunk.layers):
        # By this number a block finds its keys and values in the cache. With the old numbers,
        # training works and generation is wrong.
        block.self_attn.layer_idx = number
    return student


@torch.no_grad()
def plain_influence(hidden_states: Sequence[Tensor]) -> list[float]:
    """What each of a teacher's L blocks does, from L + 1 hidden states [B, S, D] around them.

    The last of transformers' `output_hidden_states` is no such state: it comes from behind the
    final norm, and would give the last block an influence that is not its own.
    """
    influence = []
    for before, after in pairwise(hidden_states):
        cosine = torch.cosine_similarity(before, after, dim=-1)  # [B, S]
        influence.append(1 - cosine.mean().item())
    return influence


# --- the technique --------------------------------------------------------------------------------


def make_student(teacher: Any, *, blocks: Sequence[int]) -> Any:
    """A new model with these blocks of the teacher.

    It is an ordinary model of the teacher's class, on its device and in its dtype, with a smaller
    configuration: it saves, loads and generates like any other. It shares no memory with the
    teacher, which stays as it is. What a recipe has put on the teacher's blocks is not on the
    student's: apply it to the student, too, such as `apply_sliding_window`.

    Args:
        blocks: their numbers from 0, in rising order, as `choose_blocks` returns them.
    """
    require_causal_lm(teacher)
    blocks = list(blocks)
    _require_no_shared_keys(teacher)
    try:
        student = _empty_model(teacher, _smaller_config(teacher, blocks))
        student.load_state_dict(_tensors_of_blocks(teacher, blocks))
        student.tie_weights()
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(
            f"transformers makes no such student of {type(teacher).__name__} ({reason}): keep all "
            f"blocks, and give a model without adapters in full precision"
        ) from error
    _require_same_settings(student, teacher, blocks)
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return student.train(teacher.training)


def choose_blocks(influence: Sequence[float], *, keep: int) -> list[int]:
    """The blocks of the teacher that stay: the `keep` ones with most influence, in rising order."""
    by_influence = sorted(range(len(influence)), key=lambda number: -influence[number])
    return sorted(by_influence[:keep])


# --- what is measured on a text -------------------------------------------------------------------


def block_influence(model: Any, batches: Batches) -> list[float]:
    """What each block of a teacher does to the text: 1 - the mean cosine of input and output."""
    require_causal_lm(model)
    sums = [0.0] * len(decoder_blocks(model))
    positions = 0
    shown = torch.empty(0)  # of the batch that runs, [B, S]

    def add_influence(
        number: int, _block: nn.Module, args: tuple, kwargs: dict, output: Any
    ) -> None:
        """Add what a block of the teacher does to this batch."""
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        cosine = torch.cosine_similarity(before.float(), after.float(), dim=-1)  # [B, S]
        sums[number] += cosine[shown].sum().item()

    with contextlib.ExitStack() as stack:
        for number, block in enumerate(decoder_blocks(model)):
            hook = partial(add_influence, number)
            stack.enter_context(block.register_forward_hook(hook, with_kwargs=True))
        stack.enter_context(evaluating(model))
        for batch in batches:
            # Without labels, for with them there would be all logits.
            inputs = {name: batch[name].to(model.device) for name in batch if name != "labels"}
            ids = inputs["input_ids"]
            shown = inputs.get("attention_mask", torch.ones_like(ids)).bool()
            positions += int(shown.sum())
            model(**inputs, use_cache=False, logits_to_keep=1)
    return [1 - total / positions for total in sums]


# --- Hugging Face glue and guards -----------------------------------------------------------------

# Settings of a configuration that are a list with one entry per block.
PER_BLOCK = ("layer_types", "no_rope_layers", "mlp_layer_types")
# Attributes of modules that tell where a block is, and not what it computes.
PLACE = {"training", "layer_idx"}


def _require_no_shared_keys(teacher: Any) -> None:
    """A student's blocks that read the keys of another one would read those of a third."""
    if getattr(teacher.config.get_text_config(), "num_kv_shared_layers", 0):
        raise ValueError(
            f"blocks of {type(teacher).__name__} share keys and values with others: "
            f"a model without some of them computes something else; give one that shares none"
        )


def _smaller_config(teacher: Any, blocks: Sequence[int]) -> Any:
    """The teacher's configuration, with these blocks alone."""
    whole = copy.deepcopy(teacher.config)
    config = whole.get_text_config()
    config.num_hidden_layers = len(blocks)
    for name in PER_BLOCK:
        entries = vars(config).get(name)  # not what is computed of the number of blocks (Mamba)
        if isinstance(entries, list | tuple) and len(entries) == len(decoder_blocks(teacher)):
            setattr(config, name, [entries[number] for number in blocks])
    return whole


def _empty_model(teacher: Any, config: Any) -> Any:
    """A student without values of its own, on the teacher's device and in its dtype.

    Its weights are drawn, and then replaced. The random stream stays where it is.
    """
    from transformers import AutoModelForCausalLM

    devices = [teacher.device] if teacher.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(teacher.device):
        return AutoModelForCausalLM.from_config(config, dtype=teacher.dtype)


def _tensors_of_blocks(teacher: Any, blocks: Sequence[int]) -> dict[str, Tensor]:
    """The teacher's tensors, under the names that they have in the student."""
    names = {module: name for name, module in teacher.named_modules()}
    prefix = f"{names[decoder_blocks(teacher)]}."  # "model.layers."
    found = {}
    for name, tensor in teacher.state_dict().items():
        if not name.startswith(prefix):
            found[name] = tensor
            continue
        number, _, inside = name.removeprefix(prefix).partition(".")
        if int(number) in blocks:
            found[f"{prefix}{blocks.index(int(number))}.{inside}"] = tensor
    return found


def _require_same_settings(student: Any, teacher: Any, blocks: Sequence[int]) -> None:
    """Raise ValueError if a block of the student would compute otherwise than its original."""
    of_teacher = decoder_blocks(teacher)
    for number, (old, block) in enumerate(zip(blocks, decoder_blocks(student), strict=True)):
        ours = _settings_of_block(block)
        theirs = _settings_of_block(of_teacher[old])
        # What only the original has is a mark of a technique, and none of the model's settings.
        different = [name for name in theirs if name in ours and ours[name] != theirs[name]]
        if different:
            raise ValueError(
                f"block {old} of {type(teacher).__name__} computes otherwise as block {number} of "
                f"a student, for its {different[0]} depends on its number: keep all blocks, or "
                f"choose others"
            )


def _settings_of_block(block: nn.Module) -> dict[str, Any]:
    """The settings of a teacher's block: plain attributes of modules, but those of its place."""
    found = {}
    for name, module in block.named_modules():
        for attribute, value in vars(module).items():
            plain = isinstance(value, bool | int | float | str | None)
            if plain and not attribute.startswith("_") and attribute not in PLACE:
                found[f"{name}.{attribute}"] = value
    return found
