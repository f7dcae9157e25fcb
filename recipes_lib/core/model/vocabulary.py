"""The tokens of a model: those that its table holds, those that are added, those at which it stops.

    check_vocabulary(rows, tokenizer=tokenizer, size=49152)
    added = add_tokens(tokenizer, ["<|user|>"])     # {"<|user|>": 49152}
    grow_vocabulary(model, added)                   # adapters then train these rows, and no others
    stop_at(model, tokenizer, [2])

An id that the table does not hold fails deep inside an embedding, and on a GPU without a name. A
row of random numbers makes the first steps worse than the mean of the rows that were trained. And a
model stops at the ids of its `generation_config`, whatever it has learnt to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from recipes_lib.core.model.marks import ADDED_TOKENS, LEARNT_END, mark


def check_vocabulary(rows: Iterable[Mapping[str, Any]], *, tokenizer: Any, size: int) -> None:
    """Raise ValueError for an id of `rows`, or for padding, that a table of `size` rows lacks."""
    largest = max((max(row["input_ids"]) for row in rows), default=-1)
    pad = tokenizer.pad_token_id
    for use, token in {"a row": largest, "padding": -1 if pad is None else pad}.items():
        if token >= size:
            text = tokenizer.convert_ids_to_tokens(token)
            raise ValueError(
                f"{use} has token {token} ({text!r}), and the model's table has the {size} rows 0 "
                f"to {size - 1}: let it grow (finetune: --add-token '{text}'; elsewhere: "
                f"model.resize_token_embeddings({token + 1})), or give the model's own tokenizer"
            )


def add_tokens(tokenizer: Any, names: Sequence[str]) -> dict[str, int]:
    """The id of each of `names`; those that the tokenizer does not know are added to it."""
    from tokenizers import AddedToken

    for name in names:
        if name not in tokenizer.get_vocab():
            tokenizer.add_tokens([AddedToken(name, normalized=False)])
    known = tokenizer.get_vocab()
    return {name: known[name] for name in names}


@torch.no_grad()
def grow_vocabulary(model: Any, added: Mapping[str, int]) -> Any:
    """Give the tokens `added` (name and id) rows of the table, and of the output layer.

    A new row is the mean of those that were there. Adapters of `apply_lora` then train these rows
    too, and save them.
    """
    if not added:
        return model
    size = len(model.get_input_embeddings().weight)
    needed = max(added.values()) + 1
    means = [_mean_of_rows(weight, added) for weight in _tables(model)]
    if needed > size:
        model.resize_token_embeddings(needed, mean_resizing=False)
    for weight, mean in zip(_tables(model), means, strict=True):
        rows = sorted({*added.values(), *range(size, needed)})
        weight[rows] = mean.to(weight.dtype)
    mark(model, ADDED_TOKENS, dict(added))
    return model


def _tables(model: Any) -> list[torch.Tensor]:
    """The tables of a vocabulary: weights of the embedding and the output layer, or one."""
    inside = model.get_input_embeddings().weight
    outside = model.get_output_embeddings()
    if outside is None or outside.weight is inside:
        return [inside]
    return [inside, outside.weight]


def _mean_of_rows(weight: torch.Tensor, added: Mapping[str, int]) -> torch.Tensor:
    """The mean of a table's rows but those of the added tokens, which may stand in it already."""
    known = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
    known[[token for token in added.values() if token < len(weight)]] = False
    return weight[known].float().mean(0)


def trainable_rows(model: Any) -> dict[str, list[int]]:
    """peft's `trainable_token_indices`: the rows of added tokens, by the name of their layer."""
    tokens = sorted(getattr(model, ADDED_TOKENS, {}).values())
    if not tokens:
        return {}
    layers = [model.get_input_embeddings()]
    if len(_tables(model)) == 2:
        layers.append(model.get_output_embeddings())
    names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    return {names[id(layer)]: tokens for layer in layers}


def stop_at(model: Any, tokenizer: Any, ends: Sequence[int]) -> None:
    """Let `model` stop at the tokens `ends`, the first of them the end mark of `tokenizer`.

    Where it stopped before it stops still: a base's mark ends its texts.
    """
    if not ends:
        return
    stops = list(dict.fromkeys([*ends, *stops_of(model)]))
    one_or_more = stops[0] if len(stops) == 1 else stops
    model.generation_config.eos_token_id = one_or_more
    model.config.eos_token_id = one_or_more
    mark(model, LEARNT_END, ends[0])
    if tokenizer is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])


def stops_of(model: Any) -> list[int]:
    """The tokens at which `model` stops, in their order."""
    stops = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if stops is None:
        return []
    return list(stops) if isinstance(stops, list | tuple) else [stops]
