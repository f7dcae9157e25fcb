"""What a rank has to know of torchrun, which starts all ranks again when one of them has died.

    torchrun                        rank 0      rank 1
      starts all ranks              step 1 … 7  step 1 … 7, killed
      sees that rank 1 is gone      ended
      starts all ranks again        step 5 …    step 5 …            from the checkpoint of step 4

By default the ranks meet in the store of torchrun itself, which lives through all attempts. Ranks
of a later attempt can then read addresses of ranks that are dead, and fail or wait. With
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun, each attempt has a store of its
own.

With several machines, `TORCHELASTIC_RESTART_COUNT` does not tell that ranks have died before: the
torchrun of each machine counts the failures of its own ranks only. A checkpoint tells.
"""

from __future__ import annotations

import os

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def require_own_store() -> None:
    """Raise ValueError if torchrun may start ranks again that meet in the store of all attempts.

    Call it before `init_process_group`. Without restarts, and without torchrun, it does nothing.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts > 0 and shared:
        raise ValueError(
            f"torchrun may start these ranks {restarts} more time(s), and would show them "
            f"addresses of ranks that have died: start it as `{OWN_STORE} torchrun …`"
        )
