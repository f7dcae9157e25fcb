"""The same step and the same training by transformers itself, on ranks.

pool.run(compare_tensor_parallel, sizes=SIZES, rows=8, tokens=128)      sent bytes, and the loss
pool.run(train_with_trainer, sizes=SIZES, steps=3, rows=8, tokens=128)  FSDP2 by the Trainer

`from_pretrained(…, tp_plan="auto")` and `TrainingArguments(fsdp=True)` are meant for torchrun. Here
the model gets a `DistributedConfig`, which says the same by numbers. It cuts and shards on CPU
ranks as well, where accelerate would train under DDP.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import distributed

from recipes_lib.core.ranks import group_device, rank, world_size
from recipes_lib.core.ranks.rank_bytes import rank_bytes
from recipes_lib.core.ranks.traffic import count_traffic
from recipes_lib.parallel.tensor_parallel import apply_tensor_parallel
from recipes_lib.workflows.on_ranks.batches import byte_batches
from recipes_lib.workflows.on_ranks.strategies import EPSILON, Options
from recipes_lib.workflows.on_ranks.train import small_llama


def compare_tensor_parallel(
    *, sizes: dict[str, int], rows: int, tokens: int
) -> dict[str, dict[str, float]]:
    """One forward and backward of a model that we have cut, and of one that transformers has.

    Returns for "ours" and "transformers" the loss, and the bytes of parameters that rank 0 keeps,
    and that it sends. Raises ValueError as `apply_tensor_parallel`.
    """
    (batch,) = byte_batches(steps=1, rows=rows, tokens=tokens)
    batch = {name: tensor.to(group_device()) for name, tensor in batch.items()}
    whole = small_llama(sizes=sizes, tokens=tokens).to(group_device())
    models = {
        "ours": apply_tensor_parallel(whole),
        "transformers": _loaded(sizes, tokens, tp_size=world_size()),
    }
    found = {}
    for name, model in models.items():
        with count_traffic() as traffic:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
        held = rank_bytes(model)
        found[name] = {
            "loss": loss.item(),
            "parameters": held.parameters,
            "sent": traffic.sent,
        }
    return found


def train_with_trainer(
    *, sizes: dict[str, int], steps: int, rows: int, tokens: int
) -> dict[str, Any]:
    """Losses under FSDP2 by the Trainer of transformers, and the bytes of parameters on rank 0.

    The batches, the optimizer and the clipping are those of `train_on_ranks`. The Trainer divides
    by the tokens of all ranks, and its losses are logged as the mean over the tokens of a step.
    """
    import transformers

    batches = byte_batches(steps=steps, rows=rows, tokens=tokens)
    in_order = []
    for batch in batches:
        for row in range(rows):
            in_order.append({name: tensor[row] for name, tensor in batch.items()})
    options = Options()
    with tempfile.TemporaryDirectory() as folder, _as_started_by_torchrun():
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=group_device().type == "cpu",
            per_device_train_batch_size=rows // world_size(),
            max_steps=steps,
            learning_rate=options.learning_rate,
            adam_epsilon=EPSILON,
            weight_decay=0.01,  # the default of torch.optim.AdamW
            max_grad_norm=options.max_norm,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=_loaded(sizes, tokens, fsdp_size=world_size()),
            args=arguments,
            train_dataset=in_order,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "parameters": rank_bytes(trainer.model).parameters}


def _loaded(sizes: dict[str, int], tokens: int, **parts: int) -> Any:
    """`small_llama`, which transformers loads from a folder and divides among the ranks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with tempfile.TemporaryDirectory() as own_folder:
        # Only rank 0 writes when a model is saved on ranks, so all read what is in its folder.
        folders = [own_folder]
        distributed.broadcast_object_list(folders, src=0)
        small_llama(sizes=sizes, tokens=tokens).save_pretrained(folders[0])
        distributed.barrier()
        model = AutoModelForCausalLM.from_pretrained(
            folders[0], distributed_config=DistributedConfig(**parts)
        )
        distributed.barrier()
    return model.train()


@contextmanager
def _as_started_by_torchrun() -> Iterator[None]:
    """The variables by which accelerate counts ranks. The group itself is there already."""
    own = {
        "RANK": str(rank()),
        "LOCAL_RANK": str(rank()),
        "WORLD_SIZE": str(world_size()),
        "LOCAL_WORLD_SIZE": str(world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nobody asks there
    }
    with mock.patch.dict(os.environ, own):
        yield
