"""What each block of a model costs in a training step, where the blocks differ or have no formula.

`core.plain_step` multiplies what one block saves by the number of blocks. A model whose blocks are
not all the same needs a list, and `core.dry_step` fills it:

    peak in block i = weights + states
                    + gradients of what comes after block i        (the engine goes backwards)
                    + what is saved before block i
                    + what is alive inside of block i

A recipe that keeps less per block changes the list: a checkpoint keeps the input only, and `inside`
stays as it is, for the block is whole again while backward is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BlockBytes:
    """The bytes of one block.

    `saved` is what its forward leaves for backward. `forward` and `backward` are the most that is
    alive inside of it, beyond what was there before its forward and beside the gradients of what
    comes after it. `backward` has the gradients of the block's own weights, as they come. `at_once`
    is `backward` if each of them goes as soon as it is complete. `gradients` are all of them.
    """

    saved: int
    forward: int
    backward: int
    at_once: int
    gradients: int


@dataclass(frozen=True)
class DryBlocks:
    """The blocks of a model, as a dry step has found them.

    `reason` says why no formula holds, as the end of the sentence "by a dry step, because …".
    `behind` is what is saved behind the last block, and free when backward reaches it. `head` are
    the gradients that exist by then. `waiting` is the part of them that stays until the end even if
    each gradient goes as soon as it is complete: the first half of a tied embedding's.
    """

    reason: str
    blocks: tuple[BlockBytes, ...]
    behind: int
    head: int
    waiting: int
    gradients_stay: bool = True

    @property
    def saved(self) -> int:
        """What all blocks save."""
        return sum(block.saved for block in self.blocks)

    def keeping(self, kept: list[int], *, more_inside: list[int] | None = None) -> DryBlocks:
        """The blocks if each keeps only so many bytes, and makes the rest again in backward.

        Args:
            kept: for each block, the bytes that it keeps until backward arrives.
            more_inside: for each block, what else is alive while backward is in it.
        """
        if more_inside is None:
            more_inside = [0] * len(self.blocks)
        changed = []
        for block, bytes_kept, more in zip(self.blocks, kept, more_inside, strict=True):
            # Its forward runs a second time, with the gradients of later blocks beside it.
            again = block.forward if bytes_kept < block.saved else 0
            changed.append(
                replace(
                    block,
                    saved=bytes_kept,
                    backward=max(block.backward, again) + more,
                    at_once=max(block.at_once, again) + more,
                )
            )
        return replace(self, blocks=tuple(changed))

    def saving_more(self, more: list[int]) -> DryBlocks:
        """The blocks if each saves so many bytes more, which are there in its backward as well."""
        changed = []
        for block, bytes_more in zip(self.blocks, more, strict=True):
            changed.append(
                replace(
                    block,
                    saved=block.saved + bytes_more,
                    forward=block.forward + bytes_more,
                    backward=block.backward + bytes_more,
                    at_once=block.at_once + bytes_more,
                )
            )
        return replace(self, blocks=tuple(changed))

    def moments(self, *, activations: int, carried: int) -> Iterator[dict[str, int]]:
        """What is alive while backward is in each block, and while forward is: parts in bytes.

        Args:
            activations: all that is saved, inside and outside of the blocks.
            carried: gradients that are there before the step begins.
        """
        before = activations - self.saved - self.behind  # masks, the embedding's output
        later = self.head + sum(block.gradients for block in self.blocks)
        for block in self.blocks:
            later -= block.gradients
            gradients = later
            inside = block.backward
            if carried > 0:  # all of them exist, and each new one is added to its old one
                gradients = carried
                inside = block.at_once
            elif not self.gradients_stay:
                gradients = self.waiting
                inside = block.at_once
            yield {
                "gradients": gradients,
                "activations": before + block.saved,
                "block gradients": inside - block.saved,
            }
            yield {
                "gradients": carried,
                "activations": before,
                "block gradients": block.forward,
            }
            before += block.saved
