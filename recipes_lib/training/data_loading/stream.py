"""The part of data_loading that reads a stream: one share per rank, with a position that is saved.

A stream is shuffled block by block: so many rows are read and permuted, then the next ones. The
permutation is a function of the block's number. The position is therefore small:

    position   the stream's own, where the block begins · number of the block · rows given from it

To go on, the block is read a second time, and the rows that were given are left out. The shuffle
buffer of `datasets` has no position: after a resume, the rows that were in it are lost.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

Batch = dict[str, torch.Tensor]


class StreamLoader:
    """The batches of this rank's share of a stream, and the position among them."""

    def __init__(
        self,
        stream: Any,
        *,
        rows: int,
        collate: Callable[[list[Any]], Batch],
        shuffle_rows: int,
        order: str,
        rank: int,
        ranks: int,
        options: dict[str, Any],
    ) -> None:
        share = _share_of_rank(stream, rank, ranks, workers=options["num_workers"])
        self._facts = {
            "rank": rank,
            "ranks": ranks,
            "workers": options["num_workers"],
            "rows": rows,
            "shuffle_rows": shuffle_rows,
            "order": order,
        }
        blocks = ShuffledBlocks(share, shuffle_rows, f"{order} {rank}")
        stateful_loader = _stateful_loader_class()
        self._begun = False
        with warnings.catch_warnings():
            # torchdata 0.11 tells PyTorch its name by a function that warns since torch 2.13.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            self._loader = stateful_loader(blocks, batch_size=rows, collate_fn=collate, **options)

    def __iter__(self) -> Iterator[Batch]:
        if self._begun:
            raise ValueError("this epoch was begun already: make a loader with the next `epoch`")
        self._begun = True
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was given, and what it is a position in."""
        return {"facts": dict(self._facts), "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after that batch. Raises ValueError for a position in another share."""
        there = state["facts"]
        odd = [name for name in self._facts if there.get(name) != self._facts[name]]
        if odd:
            differences = []
            for name in odd:
                differences.append(f"{name}: {there.get(name)} there, {self._facts[name]} here")
            raise ValueError(
                f"this position is one in another share of the stream ({'; '.join(differences)}): "
                f"go on with the same ranks, workers and sizes, or begin a new epoch"
            )
        self._loader.load_state_dict(state["loader"])


class ShuffledBlocks(IterableDataset):
    """The rows of `share`, shuffled in blocks of `size`, with a position that can be saved."""

    def __init__(self, share: Any, size: int, order: str) -> None:
        self.share = share
        self.size = size
        self.order = order
        self._block = 0
        self._given = 0
        self._begin = None  # where the block begins in the stream; None for the first one

    def __iter__(self) -> Iterator[Any]:
        # A worker reads shards of its own, and has an order of its own.
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        source = iter(self.share)  # from the position on that was loaded
        while True:
            rows = list(itertools.islice(source, self.size))
            if not rows:
                return
            random.Random(f"{self.order} {number} {self._block}").shuffle(rows)
            for row in rows[self._given :]:
                self._given += 1
                yield row
            self._begin = self.share.state_dict()  # here the next block begins
            self._block += 1
            self._given = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the block begins, and how many of its rows were given."""
        return {"begin": self._begin, "block": self._block, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration begins after the row that was given last."""
        self._block = state["block"]
        self._given = state["given"]
        self._begin = state["begin"]
        if self._begin is not None:
            self.share.load_state_dict(self._begin)


# --- guards ---------------------------------------------------------------------------------------


def _share_of_rank(stream: Any, rank: int, ranks: int, *, workers: int) -> Any:
    """The rows of this rank. Raises ValueError for what cannot be split or resumed."""
    from datasets import IterableDataset as Stream
    from datasets.distributed import split_dataset_by_node

    if not isinstance(stream, Stream):
        raise ValueError(
            f"{type(stream).__name__} is no stream that can be split and resumed: give a "
            f"datasets.IterableDataset, or use step_loader for rows with a length"
        )
    _refuse_shuffle_buffer(stream)
    # `datasets` hands each worker whole shards, and leaves the others without a row.
    shards = stream.num_shards
    own = shards
    if shards % ranks == 0:
        own = shards // ranks
    elif ranks > 1:
        warnings.warn(
            f"{ranks} ranks do not divide the {shards} shards of the stream: each rank reads all "
            f"rows and leaves out those of the others; write a multiple of {ranks} shards",
            stacklevel=4,
        )
    if workers > own:
        raise ValueError(
            f"workers={workers}: {own} of the {shards} shards are left for this rank, and a worker "
            f"reads whole ones; give at most {own} workers, or write more shards"
        )
    return split_dataset_by_node(stream, rank=rank, world_size=ranks)


def _refuse_shuffle_buffer(stream: Any) -> None:
    """Follow the chain of steps of which a stream is made."""
    part = getattr(stream, "_ex_iterable", None)
    while part is not None:
        if "Shuffled" in type(part).__name__:
            raise ValueError(
                "the stream has a shuffle buffer, whose rows would be lost in a resume: "
                "leave out stream.shuffle() and give shuffle_rows"
            )
        part = getattr(part, "ex_iterable", None)


def _stateful_loader_class() -> Any:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise ImportError(
            "a stream that can be resumed needs torchdata: pip install torchdata"
        ) from error
    return StatefulDataLoader
