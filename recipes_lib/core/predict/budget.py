"""The budget of a training step: its terms in bytes, and the protocol by which recipes change them.

    peak = weights + states + the largest of three moments of backward:

        it begins                   carried + activations + max(loss, block_gradients)
        it enters the first block   gradients - last_gradients + one_block + block_gradients
        the last gradient arrives   gradients + embedding_gradient

Each term is plain arithmetic on the model's shape, so that a recipe can say which one it shrinks:

    weights             4 bytes x parameters (2 in bf16, about 0.52 in NF4)
    states              twice the bytes of the trainable parameters: AdamW keeps two averages
    gradients           the bytes of the trainable parameters
    carried             gradients that exist before a micro-batch runs (only with accumulation)
    activations         what the blocks save for backward: grows with batch x sequence
    loss                logits and their gradients: three fp32 [batch x sequence, vocabulary]
    one_block           what one block saves for backward
    block_gradients     gradients of activations that backward makes inside a block
    last_gradients      gradients that the first block, and an untied embedding, have still to make
    embedding_gradient  copies of the embedding table that are alive as its gradient is summed

`plain_step.budget_of` makes the budget of a plain step. Where these formulas do not hold for all
blocks of the model, it takes the terms from a dry step, which gives a list of the blocks (`dry`).
The second moment is then looked for in every block, and `source` says why. A recipe's estimate
takes a budget and gives the one that holds with the recipe:

    @estimate(Order.LOSS)
    def estimate_chunked_cross_entropy(budget, model, shape, *, chunk_size=None) -> Budget: ...

    shape = Shape(batch=8, seq=512)
    plan = estimate_chunked_cross_entropy(budget_of(model, shape), model, shape, chunk_size=256)

With `Shape(ranks=…)` all terms are those of one rank. They begin as those of a rank that has the
whole model and its part of the rows. What of the model it does not hold, an estimate of
`Order.SHARDING` takes off.

Recipes build on each other: what a checkpoint keeps depends on the precision, and the precision on
which weights train. So every estimate has a place in `Order`. A wrong order raises an error, and
`compose` sorts by itself.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from recipes_lib.core.checks import check_whole
from recipes_lib.core.predict.block_bytes import DryBlocks


@dataclass(frozen=True)
class Shape:
    """What one optimizer step trains on: `batch` rows of `seq` tokens.

    `batch` counts the rows of all ranks and of all micro-batches. `ranks` are those among which the
    rows are divided: not those of tensor, pipeline or context parallelism, which work on the same
    rows. Raises ValueError for numbers below 1, and for a batch that does not split evenly.
    """

    batch: int
    seq: int
    micro_batches: int = 1
    ranks: int = 1

    def __post_init__(self) -> None:
        check_whole(
            batch=self.batch, seq=self.seq, micro_batches=self.micro_batches, ranks=self.ranks
        )
        parts = self.micro_batches * self.ranks
        if self.batch % parts:
            raise ValueError(
                f"batch={self.batch}: give a multiple of micro_batches x ranks = "
                f"{self.micro_batches} x {self.ranks} = {parts}"
            )

    @property
    def rows(self) -> int:
        """Rows that one rank holds at a time: those of a micro-batch."""
        return self.batch // (self.micro_batches * self.ranks)

    @property
    def tokens(self) -> int:
        """Tokens that one rank holds at a time."""
        return self.rows * self.seq

    def whole(self) -> Shape:
        """The same batch in one pass, without micro-batches."""
        return replace(self, micro_batches=1)

    def micro(self) -> Shape:
        """One micro-batch of one rank, as a step of its own."""
        return Shape(batch=self.rows, seq=self.seq)


class Order(enum.IntEnum):
    """When a recipe's estimate has its turn. Each builds on what those before it have decided."""

    BATCH = 1  # how many tokens are in memory at a time
    ADAPTERS = 2  # which weights train, and how the others are stored
    PRECISION = 3  # in how many bits the model computes
    ATTENTION = 4  # what attention saves
    LOSS = 5  # how many logits exist
    MLP = 6  # what the feed-forward layers save
    CHECKPOINTS = 7  # what of all that is kept for backward
    STATES = 8  # what the optimizer keeps
    GRADIENTS = 9  # how long a gradient lives
    SHARDING = 10  # what of all that is on one rank


@dataclass(frozen=True)
class Applied:
    """One estimate that has had its turn."""

    order: Order
    name: str


@dataclass(frozen=True)
class Budget:
    """The terms of the equation above, in bytes, for the step that `shape` describes.

    `change(term=…)` gives a new budget. `base_frozen` says that adapters train and the model's own
    weights do not. The model that an estimate gets may not have its adapters yet. `dry` holds the
    blocks one by one, if a dry step has counted them. `activations_if_gradients_go` is what the
    activations will be once a later recipe frees each gradient at once, if that is something else.
    """

    weights: int
    states: int
    gradients: int
    carried: int
    activations: int
    loss: int
    one_block: int
    block_gradients: int
    last_gradients: int
    embedding_gradient: int
    shape: Shape | None = field(default=None, repr=False)
    base_frozen: bool = field(default=False, repr=False)
    applied: tuple[Applied, ...] = field(default=(), repr=False)
    dry: DryBlocks | None = field(default=None, repr=False)
    activations_if_gradients_go: int | None = field(default=None, repr=False)

    @property
    def source(self) -> str:
        """Where the terms come from: the formulas, or a dry step and why."""
        if self.dry is None:
            return "by arithmetic"
        return f"by a dry step, because {self.dry.reason}"

    @property
    def peak(self) -> int:
        """Bytes at the largest moment."""
        return sum(self.at_peak().values())

    @property
    def after_activations(self) -> int:
        """What joins all activations: the loss, or what backward makes in the last block.

        Not both: the loss is free when backward reaches a block.
        """
        return max(self.loss, self.block_gradients)

    def terms(self) -> dict[str, int]:
        """The terms by name, in bytes."""
        return {name: getattr(self, name) for name in TERMS}

    def moments(self) -> dict[str, dict[str, int]]:
        """The moments that can be the peak: what is alive in each, beside weights and states.

        Every moment has the same PARTS. A part that is not alive then has 0 bytes.
        """
        if self.dry is not None:
            return self._moments_of_blocks(self.dry)
        beside_activations = {"loss": self.loss}
        if self.block_gradients > self.loss:
            beside_activations = {"block gradients": self.block_gradients}
        return {
            "backward begins": _parts(
                {"gradients": self.carried, "activations": self.activations} | beside_activations
            ),
            "backward enters the first block": _parts(
                {
                    "gradients": self.gradients - self.last_gradients,
                    "activations": self.one_block,
                    "block gradients": self.block_gradients,
                }
            ),
            "the last gradient arrives": _parts(
                {"gradients": self.gradients, "embedding copies": self.embedding_gradient}
            ),
        }

    def _moments_of_blocks(self, dry: DryBlocks) -> dict[str, dict[str, int]]:
        """The same, with the worst of all blocks in place of the first one."""
        in_blocks = dry.moments(activations=self.activations, carried=self.carried)
        worst = max(in_blocks, key=lambda parts: sum(parts.values()))
        beginning = {
            "gradients": self.carried,
            "activations": self.activations,
            "loss": self.loss,
        }
        end = {"gradients": self.gradients, "embedding copies": self.embedding_gradient}
        return {
            "backward begins": _parts(beginning),
            "a block is computed": _parts(worst),
            "the last gradient arrives": _parts(end),
        }

    def peak_moment(self) -> str:
        """Which of `moments` is the peak."""
        moments = self.moments()
        return max(moments, key=lambda name: sum(moments[name].values()))

    def at_peak(self) -> dict[str, int]:
        """What the peak consists of: weights, states and the PARTS of its moment, in bytes."""
        always = {"weights": self.weights, "states": self.states}
        return always | self.moments()[self.peak_moment()]

    def with_moment_in_a_block(
        self, *, as_backward_begins: int, in_a_block: int, if_gradients_go: int | None = None
    ) -> Budget:
        """The budget of a recipe whose peak may come while backward is in one of the last blocks.

        In a plain step there is more as backward begins, for then all activations are alive. So
        `moments` has nothing in between. A recipe that keeps little may have its peak there, and
        counts it as one of the beginning:

            as backward begins     as_backward_begins + the loss
            in a block             in_a_block, the loss is free
            what `moments` adds    activations + the loss

        `activations` is such that the third is the larger of the first two: what `moments` adds to
        the activations is taken off `in_a_block` before.

        Args:
            as_backward_begins: bytes of the activations that are alive then.
            in_a_block: bytes of all that is alive then, beside weights, states and the carried
                gradients, which `moments` adds in any case.
            if_gradients_go: the same if a later recipe frees each gradient at once, where
                `in_a_block` has gradients that would be gone by then.
        """

        def larger(in_a_block: int) -> int:
            return max(as_backward_begins, in_a_block - self.after_activations)

        changed = self.change(activations=larger(in_a_block))
        if if_gradients_go is None:
            return changed
        return replace(changed, activations_if_gradients_go=larger(if_gradients_go))

    def change(self, **terms: Any) -> Budget:
        """A new budget with these terms."""
        if "activations" in terms:
            terms["activations_if_gradients_go"] = None  # it was said of the old ones
        return replace(self, **terms)

    def __str__(self) -> str:
        lines = [_line(in_words(name), size) for name, size in self.terms().items()]
        lines.append(_line("predicted peak", self.peak))
        if self.dry is not None:
            lines.append(self.source)
        return "\n".join(lines)


# What a budget knows beside its terms.
FACTS = ("shape", "base_frozen", "applied", "dry", "activations_if_gradients_go")
TERMS = tuple(each.name for each in fields(Budget) if each.name not in FACTS)

# What is alive at a moment beside weights and states. Each part is one term of the equation.
PARTS = ("gradients", "embedding copies", "activations", "block gradients", "loss")


def _parts(alive: dict[str, int]) -> dict[str, int]:
    """All PARTS in their order; those that are not `alive` have 0 bytes."""
    return dict.fromkeys(PARTS, 0) | alive


def in_words(term: str) -> str:
    """The name of a term for people: `embedding_gradient` counts copies of the embedding."""
    if term == "embedding_gradient":
        return "embedding copies"
    return term.replace("_", " ")


def _line(name: str, size: int) -> str:
    return f"{name:<19}{size / 2**20:>9,.0f} MiB"


Estimate = Callable[..., Budget]


def estimate(order: Order) -> Callable[[Estimate], Estimate]:
    """Mark `f(budget, model, shape, **options) -> Budget` as an estimate, and give it its place.

    The marked function raises ValueError for a budget that a later recipe has changed already, and
    for one that was made for another shape. One of `Order.SHARDING` goes through the parameters of
    the model: it raises ValueError, too, if they are not yet those that train.
    """

    def decorate(change: Estimate) -> Estimate:
        @functools.wraps(change)
        def checked(budget: Budget, model: Any, shape: Shape, **options: Any) -> Budget:
            _check_order(budget, order, change.__name__)
            _check_shape(budget, shape, order, change.__name__)
            if order is Order.SHARDING:
                require_adapters(budget, model)
            changed = change(budget, model, shape, **options)
            changed = _with_blocks_that_agree(budget, changed, order, change.__name__)
            applied = (*budget.applied, Applied(order, change.__name__))
            return changed.change(shape=shape, applied=applied)

        checked.order = order  # by which `compose` sorts
        return checked

    return decorate


def compose(
    budget: Budget, model: Any, shape: Shape, recipes: Iterable[tuple[Estimate, dict[str, Any]]]
) -> Budget:
    """Apply the estimates, each with its options, in their right order, whatever order is given."""
    for recipe, options in sorted(recipes, key=lambda pair: pair[0].order):
        budget = recipe(budget, model, shape, **options)
    return budget


def require_adapters(budget: Budget, model: Any) -> None:
    """Raise ValueError if the budget is that of adapters and `model` has none yet.

    Then nobody knows which weights will train.
    """
    if budget.base_frozen and not hasattr(model, "peft_config"):
        raise ValueError(
            f"the budget is that of adapters and this {type(model).__name__} has none: "
            f"give the model that apply_lora or apply_qlora returned"
        )


def _check_order(budget: Budget, order: Order, name: str) -> None:
    later = [done for done in budget.applied if done.order > order]
    if later:
        raise ValueError(
            f"{name} has to come before {later[0].name}, which builds on it: "
            f"change the order, or let recipes_lib.core.predict.budget.compose sort them"
        )


def _with_blocks_that_agree(before: Budget, after: Budget, order: Order, name: str) -> Budget:
    """`after`, if its blocks are still those of its terms.

    Arithmetic of one block holds for those that have a formula. Raises ValueError where an
    estimate has changed the terms of a block, and not the list that a dry step has made.
    """
    if before.dry is None or after.dry is not before.dry:
        return after
    if order is Order.SHARDING:
        return after.change(dry=None)  # what is on one rank follows from the terms
    same = (after.one_block, after.block_gradients) == (before.one_block, before.block_gradients)
    if same:
        return after
    raise ValueError(
        f"{name} has no arithmetic for this model, because {before.dry.reason}: "
        f"leave it out of the prediction, or measure the step with PeakMemory"
    )


def _check_shape(budget: Budget, shape: Shape, order: Order, name: str) -> None:
    known = budget.shape
    if known is None or known == shape:
        return
    if order is Order.BATCH and known.whole() == shape.whole():
        return  # the estimate that splits the batch may change the number of micro-batches
    if known.whole() == shape.whole():
        raise ValueError(
            f"{name}: the budget is that of {known.micro_batches} micro-batches and the shape has "
            f"{shape.micro_batches}: apply estimate_gradient_accumulation first"
        )
    raise ValueError(
        f"{name}: the budget is that of {known}, not of {shape}: give both the same shape"
    )
