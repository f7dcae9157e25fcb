"""The library beside ours: torch-pruning takes as many channels from the same places.

It follows each channel through a trace of the network and finds all layers that have to change
together, whatever the network is. Its usual importance of a channel asks for no images: it is the
size of all weights that go with it. Told how many channels stay in which layer, it makes a network
of the same layers as `compression.channel_pruning` does, and their accuracies tell which choice was
better.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from recipes_lib.compression.channel_pruning import inner_channels
from recipes_lib.core.measure.machine import require

# The library rounds down what is left of a layer: 8 channels computed as 7.999 would be 7.
AGAINST_ROUNDING = 1e-6


def pruned_by_torch_pruning(model: Any, example: Tensor, *, kept: Mapping[str, Tensor]) -> Any:
    """A copy of `model` with as many channels in each part as `kept` has: the library says which.

    Args:
        model: a MobileNetV2 classifier of transformers. It stays as it is.
        example: images [B, C, H, W] for the trace; what they show does not matter.
        kept: as in `apply_channel_pruning`.
    Raises ValueError for another model, and ImportError with the command that installs the library.
    """
    library = require("torch_pruning")
    pruned = copy.deepcopy(model)
    inner = inner_channels(pruned)
    ratios = {}
    for name, channels in kept.items():
        share = 1 - len(channels) / inner[name].channels
        ratios[inner[name].makers[0].convolution] = max(0.0, share - AGAINST_ROUNDING)
    pruner = library.pruner.BasePruner(
        pruned,
        example,
        importance=library.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=0.0,  # of all other layers
        pruning_ratio_dict=ratios,
        # These make what other blocks read, too, or the logits.
        ignored_layers=[part.reader for part in inner.values()],
    )
    pruner.step()
    return pruned
