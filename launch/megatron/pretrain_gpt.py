"""A Llama-shaped model from random weights, by Megatron-Core: tensor, pipeline and data parallel.

    torchrun --standalone --nproc-per-node 8 launch/megatron/pretrain_gpt.py \\
        --shape llama-3.1-8b --tensor 4 --pipeline 2

Megatron-Core is the case of training from scratch: it brings its own layers, which are cut from
the first line on, and its own optimizer. To train on from the weights of the hub, use train.py.

    ranks of a run    tensor x pipeline x data     8 = 4 x 2 x 1

    pip install megatron-core                      # pure Python
    pip install "transformer-engine[pytorch]"      # fused layers; without it PyTorch's own are used

Neighbouring ranks share a layer (tensor), since they say most to each other and are on one machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ranks
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.elastic.multiprocessing.errors import record

from recipes_lib.core.model import SHAPES, ModelShape

sys.path.append(str(Path(__file__).resolve().parents[1]))  # guards.py and text.py
import guards
import text

FUSED = importlib.util.find_spec("transformer_engine") is not None


def read_options() -> argparse.Namespace:
    """The options of the command line; `--help` prints them."""
    parser = argparse.ArgumentParser(description="Pretrain a model with Megatron-Core.")
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="smollm2-135m")
    add("--tensor", type=int, default=1, help="ranks that share a layer")
    add("--pipeline", type=int, default=1, help="ranks that have a part of the layers each")
    add("--steps", type=int, default=10)
    add("--batch", type=int, default=8, help="rows of a step, those of all ranks together")
    add("--micro-batch", type=int, default=1, help="rows that a rank computes at a time")
    add("--length", type=int, default=128, help="tokens of a row")
    add("--learning-rate", type=float, default=3e-4)
    add("--max-norm", type=float, default=1.0, help="of all gradients together; 0 does not clip")
    add("--ranks", type=int, help="how many you expect; another number is an error")
    return parser.parse_args()


# --- the model ------------------------------------------------------------------------------------


def model_config(sizes: ModelShape, options: argparse.Namespace) -> Any:
    """Megatron's names for a Llama: RMSNorm, a gated MLP with SiLU, grouped heads, no biases."""
    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.feed_forward,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline,
        # PyTorch's norm, which stands in for the fused one, sees whole rows only.
        sequence_parallel=FUSED and options.tensor > 1,
        # These are kernels of Apex, which is built by hand.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=FUSED,
        bias_dropout_fusion=FUSED,
        finalize_model_grads_func=finalize_model_grads,
    )


def make_model(options: argparse.Namespace, device: torch.device) -> DistributedDataParallel:
    """This rank's part of the model, with gradients that are added up among its copies."""
    sizes = SHAPES[options.shape]
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    if FUSED:
        layer = get_gpt_layer_with_transformer_engine_spec()
    model = GPTModel(
        config=model_config(sizes, options),
        transformer_layer_spec=layer,
        vocab_size=sizes.vocabulary,
        max_sequence_length=options.length,
        pre_process=ranks.is_pipeline_first_stage(),
        post_process=ranks.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=sizes.tied,
        position_embedding_type="rope",
    ).to(device)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,  # ZeRO-1
    )
    return DistributedDataParallel(model.config, settings, model)


def make_optimizer(model: Any, options: argparse.Namespace) -> Any:
    """Megatron's AdamW, with fp32 copies of 16-bit weights."""
    settings = OptimizerConfig(
        optimizer="adam",
        lr=options.learning_rate,
        weight_decay=0.0,
        clip_grad=options.max_norm,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(settings, [model])


# --- a step ---------------------------------------------------------------------------------------


def micro_batches(rows: torch.Tensor, options: argparse.Namespace) -> list[torch.Tensor]:
    """The micro-batches [b, S + 1] of this rank; ranks of one copy of the model read the same.

    Megatron itself refuses ranks that do not divide the model.
    """
    copies = ranks.get_data_parallel_world_size()
    if len(rows) % (copies * options.micro_batch):
        raise ValueError(
            f"--batch {len(rows)}: give a multiple of {copies} data ranks x --micro-batch "
            f"{options.micro_batch}"
        )
    own = rows.chunk(copies)[ranks.get_data_parallel_rank()]
    return list(own.split(options.micro_batch))


def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """What Megatron's schedules call for each micro-batch: the output, and its loss function."""
    rows = next(batches)  # [b, S + 1]
    # Every stage gets the tokens, and the inner ones do not look at them.
    ids = rows[:, :-1].contiguous()
    targets = rows[:, 1:].contiguous()
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    losses = model(ids, positions, None, labels=targets)  # [b, S] on the last stage
    return losses, mean_loss


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean over the tokens of a micro-batch, twice: for backward, and to be printed."""
    mean = losses.float().mean()
    # A copy: the schedule divides the first one in place by the number of micro-batches.
    return mean, {"loss": mean.detach().clone()}


def train_step(
    model: Any, optimizer: Any, rows: torch.Tensor, options: argparse.Namespace
) -> float | None:
    """One step on the rows [B, S + 1]. Returns the loss on ranks of the last stage, else None."""
    batches = micro_batches(rows, options)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=options.length,
        micro_batch_size=options.micro_batch,
        forward_only=False,
    )
    optimizer.step()
    if not reports:
        return None
    mean = torch.stack([report["loss"] for report in reports]).mean()
    dist.all_reduce(mean, group=ranks.get_data_parallel_group())
    return mean.item() / ranks.get_data_parallel_world_size()


# --- the run --------------------------------------------------------------------------------------


def train(options: argparse.Namespace, device: torch.device) -> None:
    """All steps of the run, on this rank."""
    ranks.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline,
    )
    # Other weights on the ranks of a layer, equal ones on copies.
    model_parallel_cuda_manual_seed(0)
    model = make_model(options, device)
    optimizer = make_optimizer(model, options)
    tokens = text.make_tokens(options.shape)  # bytes: a shape has no tokenizer
    for step in range(options.steps):
        began = time.perf_counter()
        # One token more than a row has: each is predicted from those before it.
        rows = text.rows_of_step(tokens, step, rows=options.batch, length=options.length + 1)
        loss = train_step(model, optimizer, rows.to(device), options)
        speed = options.batch * options.length / (time.perf_counter() - began)
        # The last rank is always on the last stage, where the loss is known.
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {step + 1:4d}   loss {loss:.6f}   {speed:,.0f} tokens/s", flush=True)


@record  # a failing rank leaves its traceback in the summary that torchrun prints
def main() -> None:
    """Read the options, and train on one GPU for each rank."""
    options = read_options()
    guards.require_torchrun(options.ranks)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
