"""Which strategy when: the simplest one whose parts of a model fit into a card.

    which_strategy(parameters=8e9, gpus=2)   -> "FSDP (ZeRO-3)"

A card has to hold its part of the weights, gradients and states, and a reserve for activations. We
go from the strategy that sends least to the one that keeps least, and take the first that fits:

    one GPU         16 P                         nothing is sent
    DDP             16 P                         2 (N-1)/N x 4 P bytes per step
    ZeRO-1           8 P + 8 P / N               as much
    ZeRO-2           4 P + 12 P / N              as much
    FSDP (ZeRO-3)   16 P / N + one block         3 (N-1)/N x 4 P
    FSDP x TP       the same, and the block, its activations and logits are split by 8

P parameters in fp32 with AdamW: 4 bytes of weight, 4 of gradient, 8 of states. Mixed precision by
autocast has the same 16. FSDP on more than some hundred GPUs waits for its collectives: from
MOST_DATA_PARALLEL ranks on, a part of the ranks shares the work inside of a block instead.

Source: Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5; Tazi et al., "The Ultra-Scale
Playbook" (2025), on when to combine.
"""

from __future__ import annotations

from recipes_lib.core.measure.machine import GIB

RESERVE = 10 * GIB  # of a card, for activations and the framework
BLOCKS = 32  # a model's largest unit is about this part of it
TENSOR_RANKS = 8  # the GPUs of a node, which have the fast links that tensor parallelism needs
MOST_DATA_PARALLEL = 512  # ranks: beyond them FSDP alone is not taken
STRATEGIES = ("one GPU", "DDP", "ZeRO-1", "ZeRO-2", "FSDP (ZeRO-3)", "FSDP × TP", "does not fit")


def predicted_bytes_per_rank(*, strategy: str, parameters: float, gpus: int) -> float:
    """Bytes of weights, gradients and states on one rank under a strategy.

    Args:
        strategy: one of STRATEGIES but the last.
        parameters: of the model, all trained with AdamW.
        gpus: how many ranks share the model.
    """
    per_rank = {
        "one GPU": 16 * parameters,
        "DDP": 16 * parameters,
        "ZeRO-1": 8 * parameters + 8 * parameters / gpus,
        "ZeRO-2": 4 * parameters + 12 * parameters / gpus,
        "FSDP (ZeRO-3)": 16 * parameters / gpus + 4 * parameters / BLOCKS,
        "FSDP × TP": 16 * parameters / gpus + 4 * parameters / BLOCKS / TENSOR_RANKS,
    }
    return per_rank[strategy]


def which_strategy(*, parameters: float, gpus: int, card_bytes: float = 80 * GIB) -> str:
    """The first of STRATEGIES that fits so many cards, for a model that AdamW trains as a whole."""
    possible = ["one GPU"] if gpus == 1 else ["DDP", "ZeRO-1", "ZeRO-2"]
    if 1 < gpus <= MOST_DATA_PARALLEL:
        possible.append("FSDP (ZeRO-3)")
    if gpus >= TENSOR_RANKS:
        possible.append("FSDP × TP")
    for strategy in possible:  # from the one that sends least on
        needed = predicted_bytes_per_rank(strategy=strategy, parameters=parameters, gpus=gpus)
        if needed <= card_bytes - RESERVE:
            return strategy
    return "does not fit"
