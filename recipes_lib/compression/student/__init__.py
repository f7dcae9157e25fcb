"""A student made from its teacher: fewer blocks, channels and heads, chosen by what each does.

Problem    A smaller model with random weights has everything to learn. The large one holds most of
           it already, and not all of its parts do equally much.
Idea       Measure on some text what each part does, and keep the parts that do most.

           A block adds something to the hidden states h. If h points where it pointed before, the
           block has done little:

               influence of a block = 1 - mean cosine(h before, h after)

           An MLP multiplies its channels a [F] by W. Without channel c its output changes by
           a[c] W[:, c], so

               importance of channel c = mean(a[c]²) |W[:, c]|²

           The same goes for attention heads, with all columns of a head at once (`student_heads`).
           The student is a model of the same class with a smaller configuration, and with the
           weights that were kept.
Saves      The share of blocks that go, of weights, KV cache and time per token. Fewer heads save
           the same of the attention, a narrower MLP weights and time alone. Embedding and output
           layer stay as they are.
Costs      The loss jumps: the student has to be trained again, best by its teacher
           (`distillation`). The measurement takes a few forwards.
Use when   A trained model is too slow or too large, and text to train on is there.
Not when   Nothing can be trained afterwards. Where 8 or 4 bits are small enough: they cost less.
In production   NVIDIA Model Optimizer `mtp.prune(…, mode="mcore_minitron")` on Megatron models,
           blocks, MLPs, heads and hidden size; mergekit copies chosen layers
           (`merge_method: passthrough`), without a measurement.
Source     Men et al., "ShortGPT", arXiv 2403.03853 (influence of blocks); Muralidharan et al.,
           "Compact Language Models via Pruning and Knowledge Distillation", arXiv 2407.14679
           (channels by their activations); Sun et al., "Wanda", arXiv 2306.11695 (activation times
           weight).

Shapes: B batch, S sequence, T positions, D hidden, F channels of the feed-forward, K of them kept,
G groups of heads, each with one head of keys and values.

choice  ... the numbers of the parts that stay, chosen and checked
heads  ... attention heads: what each group adds, and its rows and columns
mlps  ... which rows and columns belong to a channel of an MLP
parts  ... what a smaller model takes from the larger one: settings and tensors
watch  ... text runs through a model, and its parts are looked at
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from recipes_lib.compression.student.choice import checked_numbers, checked_parts, largest
from recipes_lib.compression.student.heads import attention_of
from recipes_lib.compression.student.mlps import mlp_of
from recipes_lib.compression.student.parts import (
    require_plain_model,
    require_same_settings,
    require_same_shapes,
    smaller_config,
    tensors_of_student,
)
from recipes_lib.compression.student.watch import watch
from recipes_lib.core.checks import check_number, check_several, check_whole
from recipes_lib.core.model.causal_lm import decoder_blocks, require_causal_lm

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
def plain_influence(hidden_states: Sequence[torch.Tensor]) -> list[float]:
    """Of L blocks, from the L + 1 hidden states [B, S, D] before, between and after them.

    The last of transformers' `output_hidden_states` is no such state: it comes from behind the
    final norm, and would give the last block an influence that is not its own.
    """
    influence = []
    for before, after in pairwise(hidden_states):
        cosine = torch.cosine_similarity(before, after, dim=-1)  # [B, S]
        influence.append(1 - cosine.mean().item())
    return influence


# --- the technique --------------------------------------------------------------------------------


def make_student(
    teacher: Any,
    *,
    blocks: Sequence[int] | None = None,
    channels: Sequence[torch.Tensor] | None = None,
    heads: Sequence[torch.Tensor] | None = None,
) -> Any:
    """A new model with these blocks of the teacher, channels of its MLPs and heads of attention.

    It is an ordinary model of the teacher's class, on its device and in its dtype, with a smaller
    configuration: it saves, loads and generates like any other. It shares no memory with the
    teacher, which stays as it is. What a recipe has put on the teacher's blocks is not on the
    student's: apply it to the student, too, such as `apply_sliding_window`.

    Args:
        blocks: their numbers from 0, in rising order, as `choose_blocks` returns them. None: all.
        channels: for each block of the *teacher* the channels to keep [K], as `choose_channels`
            returns them. None: all.
        heads: for each block of the *teacher* the groups of heads to keep [G], as `choose_heads`
            returns them: a head of keys and values with all heads of queries that read it. None:
            all.
    Raises ValueError for blocks, channels or heads that do not exist or are in no order; for a
    model that is no causal LM, is quantized or has adapters; for blocks that share their keys and
    values or compute otherwise at another place; for narrower MLPs or fewer heads in a model of
    which these are unknown; and for a number of heads that its configuration does not allow.
    """
    require_causal_lm(teacher)
    require_plain_model(teacher)
    of_teacher = decoder_blocks(teacher)
    if blocks is None:
        blocks = range(len(of_teacher))
    blocks = checked_numbers(below=len(of_teacher), blocks=blocks)
    if channels is not None:
        available = [mlp_of(block).channels for block in of_teacher]
        channels = checked_parts(available, channels=channels)
    if heads is not None:
        available = [attention_of(block, teacher.config).groups for block in of_teacher]
        heads = checked_parts(available, heads=heads)

    with _as_refusal(teacher, or_refuses_itself=True):
        config = smaller_config(teacher, blocks=blocks, channels=channels, heads=heads)
    with _as_refusal(teacher):
        student = _empty_model(teacher, config)
    tensors = tensors_of_student(teacher, blocks=blocks, channels=channels, heads=heads)
    require_same_settings(student, teacher, blocks=blocks)
    require_same_shapes(student, tensors)
    with _as_refusal(teacher):
        student.load_state_dict(tensors)
        student.tie_weights()
        _try_out(student)
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return student.train(teacher.training)


def block_influence(model: Any, batches: Iterable[dict[str, torch.Tensor]]) -> list[float]:
    """What each block does to the hidden states: 1 - the mean cosine of its input and its output.

    The mean is over all positions of all batches; with an `attention_mask`, over those that it
    shows. Every module keeps its mode. Raises ValueError for no batch, batches that are no token
    ids [B, S] of the model, and for no causal LM.
    """
    require_causal_lm(model)
    blocks = list(decoder_blocks(model))
    sums = [0.0] * len(blocks)

    def add(number: int, before: torch.Tensor, after: torch.Tensor) -> None:
        cosine = torch.cosine_similarity(before.float(), after.float(), dim=-1)  # [T]
        sums[number] += cosine.sum().item()

    positions = watch(model, blocks, batches, add)
    return [1 - total / positions for total in sums]


def channel_importance(
    model: Any, batches: Iterable[dict[str, torch.Tensor]]
) -> list[torch.Tensor]:
    """What each channel of each block's MLP adds to its output: mean(a²) |W|², fp32 [F] per block.

    Positions count as in `block_influence`. Raises ValueError as it does, and for MLPs whose parts
    are unknown.
    """
    require_causal_lm(model)
    mlps = [mlp_of(block) for block in decoder_blocks(model)]
    sums = [torch.zeros(mlp.channels, device=model.device) for mlp in mlps]

    def add(number: int, activations: torch.Tensor, _output: torch.Tensor) -> None:
        sums[number] += activations.float().square().sum(0)  # of [T, F]

    positions = watch(model, [mlp.out for mlp in mlps], batches, add)
    return [total / positions * mlp.out_norms().square() for total, mlp in zip(sums, mlps)]


def choose_blocks(
    influence: Sequence[float], *, keep: int, longest_gap: int | None = None
) -> list[int]:
    """The numbers of the `keep` blocks that stay, in rising order: the others have less influence.

    Args:
        longest_gap: at most so many neighbours go together; 1 takes no two of them. None: as many
            as the influence says.
    Raises ValueError for influence that is no list of numbers, `keep` outside 1 … number of blocks,
    a gap below 1, and if the gaps are too short for so few blocks.
    """
    check_several(influence=influence)
    if isinstance(influence, torch.Tensor):
        influence = influence.tolist()
    check_number(**{f"influence[{number}]": one for number, one in enumerate(influence)})
    check_whole(keep=keep, most=len(influence))
    if longest_gap is None:
        longest_gap = len(influence)
    check_whole(longest_gap=longest_gap)
    kept = set(range(len(influence)))
    for number in sorted(kept, key=lambda number: influence[number]):
        if len(kept) == keep:
            break
        if _gap_at(number, kept, len(influence)) <= longest_gap:
            kept.remove(number)
    if len(kept) > keep:
        raise ValueError(
            f"longest_gap={longest_gap} leaves {len(kept)} of {len(influence)} blocks: "
            f"give a longer gap, or keep more than {keep}"
        )
    return sorted(kept)


def _gap_at(number: int, kept: set[int], blocks: int) -> int:
    """How many neighbours would be gone together, if this block went as well."""
    before = number
    while before > 0 and before - 1 not in kept:
        before -= 1
    after = number
    while after < blocks - 1 and after + 1 not in kept:
        after += 1
    return after - before + 1


def choose_channels(importance: Sequence[torch.Tensor], *, keep: int) -> list[torch.Tensor]:
    """For each block the numbers of its `keep` most important channels [keep], in rising order.

    Raises ValueError for importance that is no list of tensors [F], as `channel_importance` makes
    it, and for `keep` outside 1 … number of channels.
    """
    return largest(importance, keep=keep, made_by="channel_importance")


def pairs_of_blocks(blocks: Sequence[int], *, of: int) -> list[tuple[int, int]]:
    """(block of the student, block of its teacher) whose outputs should be alike.

    Behind a kept block, those that went have left a gap. The student's block has to do their work
    as well: its output belongs in front of the *next* kept block. So it is compared with the output
    of the last block before that one.

    Args:
        of: how many blocks the teacher has.
    Raises ValueError for blocks that do not exist or are in no order.
    """
    check_whole(of=of)
    blocks = checked_numbers(below=of, blocks=blocks)
    next_kept = [*blocks[1:], of]
    return [(number, following - 1) for number, following in enumerate(next_kept)]


@contextlib.contextmanager
def _as_refusal(teacher: Any, *, or_refuses_itself: bool = False) -> Iterator[None]:
    """Say in one sentence that transformers makes no smaller model of a family.

    Args:
        or_refuses_itself: a ValueError inside is such a sentence already.
    """
    try:
        yield
    except Exception as error:
        if or_refuses_itself and isinstance(error, ValueError):
            raise
        first_line = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"transformers makes no smaller {type(teacher).__name__} in this way "
            f"({type(error).__name__}: {first_line}): keep all blocks, channels and heads"
        ) from error


@torch.no_grad()
def _try_out(student: Any) -> None:
    """Run it on two tokens: a norm over all heads is as wide as before, and fails only here.

    With transformers' own attention: one of a recipe may have to be applied to the student first.
    """
    if student.device.type == "meta":
        return  # there is nothing to run
    ids = torch.zeros((1, 2), dtype=torch.long, device=student.device)
    config = student.config.get_text_config()
    attention = config._attn_implementation
    config._attn_implementation = "eager"
    student.eval()(input_ids=ids, use_cache=False)
    config._attn_implementation = attention


def _empty_model(teacher: Any, config: Any) -> Any:
    """A model of this configuration, on the teacher's device and in its dtype.

    Its weights are drawn, and then replaced. The random stream stays where it is.
    """
    from transformers import AutoModelForCausalLM

    devices = []
    if teacher.device.type == "cuda":
        devices = [teacher.device]
    with torch.random.fork_rng(devices=devices), torch.device(teacher.device):
        return AutoModelForCausalLM.from_config(config, dtype=teacher.dtype)


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_parameters(
    model: Any,
    *,
    blocks: int | None = None,
    channels: int | None = None,
    heads: int | None = None,
) -> int:
    """How many parameters a student of `model` has with so many blocks, channels per MLP and groups
    of heads per block.

    Raises ValueError for more of them than the model has, and for no causal LM.
    """
    require_causal_lm(model)
    of_model = decoder_blocks(model)
    if blocks is None:
        blocks = len(of_model)
    check_whole(blocks=blocks, most=len(of_model))
    first = of_model[0]
    per_block = sum(parameter.numel() for parameter in first.parameters())
    outside = model.num_parameters() - len(of_model) * per_block
    if channels is not None:
        mlp = mlp_of(first)
        check_whole(channels=channels, most=mlp.channels)
        per_block -= (mlp.channels - channels) * mlp.parameters_per_channel()
    if heads is not None:
        attention = attention_of(first, model.config)
        check_whole(heads=heads, most=attention.groups)
        per_block -= (attention.groups - heads) * attention.parameters_per_group(first)
    return outside + blocks * per_block
