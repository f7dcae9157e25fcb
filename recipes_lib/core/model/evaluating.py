"""A model that is asked, and not trained: without dropout and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Without dropout and gradients; afterwards every module has the mode that it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
