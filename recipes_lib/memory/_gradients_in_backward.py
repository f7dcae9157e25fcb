"""Backward hands each gradient to an optimizer, as soon as it is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import nn

from recipes_lib.core.model.marks import (
    GRADIENT_TAKER,
    STEPS_IN_BACKWARD,
    TAKES_GRADIENTS_IN_BACKWARD,
    any_marked,
    mark,
    unmark,
)


class GradientsInBackward:
    """Hooks by which backward calls `take(parameter)`, a method of an optimizer.

    Other techniques read the marks: mixed precision, which has to see all gradients first, and
    gradient accumulation, which refuses if the first backward updates (`steps`).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        take: Callable[[nn.Parameter], None],
        *,
        steps: bool,
    ) -> None:
        """In backward, hand each gradient of `parameters` to `take`."""
        self._parameters = list(parameters)
        self._hooks = []
        # The garbage collector cannot see these hooks: one that holds its parameter's optimizer
        # would keep model and states alive for ever. So hooks are weak, and parameters hold it.
        weak = weakref.WeakMethod(take)

        def take_if_alive(parameter: nn.Parameter) -> None:
            weak()(parameter)

        optimizer = take.__self__
        mark(optimizer, TAKES_GRADIENTS_IN_BACKWARD)
        for parameter in self._parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(take_if_alive))
            mark(parameter, STEPS_IN_BACKWARD, steps)
            mark(parameter, GRADIENT_TAKER, optimizer)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            unmark(parameter, STEPS_IN_BACKWARD)
            unmark(parameter, GRADIENT_TAKER)


def refuse_second_taker(parameters: Iterable[nn.Parameter]) -> None:
    """Raise ValueError if an optimizer has these gradients already: a second one finds none."""
    if any_marked(parameters, GRADIENT_TAKER):
        raise ValueError(
            "an optimizer takes these gradients in backward already: remove() it first"
        )
