"""Peaks of memory that others have published, beside what this package predicts for them.

python -m benchmarks.published_peaks    a minute of one core, no weights and no GPU

Each row is a measurement of another library on a GPU, in a setting that its source describes. The
prediction is arithmetic on tensors without data, by the estimates of the techniques. Their code is
not ours: where the two differ by more than LARGE, the row says why, and which part of the reason
the source itself shows. What nobody has published, such as a setting of a run, is called a guess.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from recipes_lib.core.measure.machine import GIB
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.predict.budget import Budget, Shape
from recipes_lib.core.predict.plain_step import (
    budget_of,
    head_of,
    head_trains,
    saved_outside_the_blocks,
)
from recipes_lib.fine_tuning.lora import apply_lora, estimate_lora
from recipes_lib.fine_tuning.qlora import estimate_qlora
from recipes_lib.memory.activation_checkpointing import estimate_activation_checkpointing
from recipes_lib.memory.optimizer_in_backward import estimate_optimizer_in_backward
from recipes_lib.precision.eight_bit_adam import estimate_eight_bit_adam
from recipes_lib.training.compiled_blocks import compiled_block_bytes

LARGE = 0.10  # from here on, a difference needs a reason
CHUNKS = 8  # into which torchtune cuts the tokens of its loss
FEW = 256  # tokens on which a compiled block is counted

ADAPTERS = {"LoRA": estimate_lora, "QLoRA": estimate_qlora}

# --- the settings -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What was trained, and how, in bf16.

    `states` is "bf16", "8-bit" or "paged 8-bit". `targets` are the layers that have adapters.
    `offload` is that of the checkpoints: the inputs of the blocks go to the host.
    """

    model: str
    rows: int
    tokens: int
    method: str = "full"
    rank: int = 8
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    checkpointing: bool = True
    compiled: bool = True
    loss_in_chunks: bool = True
    in_backward: bool = False
    offload: bool = False
    states: str = "bf16"


def predict(setting: Setting) -> Budget:
    """The budget of one step of this setting."""
    model = model_without_data(setting.model)
    shape = Shape(batch=setting.rows, seq=setting.tokens)
    plan = budget_of(model, shape)
    if setting.method != "full":
        plan = ADAPTERS[setting.method](
            plan,
            model,
            shape,
            rank=setting.rank,
            dropout=setting.dropout,
            target_modules=list(setting.targets),
        )
    if setting.loss_in_chunks:
        plan = plan.change(loss=chunked_loss_bytes(plan, model, shape))
    if setting.compiled and not setting.checkpointing:
        plan = with_compiled_blocks(plan, model, shape, setting)
    if setting.checkpointing:
        plan = estimate_activation_checkpointing(plan, model, shape)
    if setting.offload:
        plan = _with_inputs_on_the_host(plan, model, shape)
    if setting.states != "bf16":
        paged = setting.states.startswith("paged")
        plan = estimate_eight_bit_adam(plan, model, shape, embedding_bits=8, paged=paged)
    if setting.in_backward:
        plan = estimate_optimizer_in_backward(plan, model, shape)
    return plan


def model_without_data(name: str) -> Any:
    """A model of a public shape in bf16, on "meta"."""
    if name != "llama-2-7b":
        return model_of_shape(name, dtype=torch.bfloat16, device="meta")
    config = LlamaConfig(  # the default sizes of LlamaConfig are those of this model
        vocab_size=32000, pad_token_id=None, bos_token_id=None, eos_token_id=None
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def chunked_loss_bytes(budget: Budget, model: Any, shape: Shape) -> int:
    """Bytes of torchtune's chunked loss, compiled, which is another one than ours.

    It keeps the logits of all chunks in 16 bits, and makes the gradient of one chunk at a time, in
    16 bits as well: what is computed in fp32 stays inside of the kernel. The gradient of the
    layer's weight is a sum, and beside it there is the part of one chunk.
    """
    logits = 2 * shape.tokens * model.config.vocab_size
    gradient = logits // CHUNKS
    of_weight = 0
    if head_trains(budget, model):
        of_weight = 2 * tensor_bytes(head_of(model))
    return logits + gradient + of_weight


def with_compiled_blocks(plan: Budget, model: Any, shape: Shape, setting: Setting) -> Budget:
    """The budget when blocks keep what PyTorch's partitioner chooses.

    It is counted on one block with weights and few tokens: what a block keeps grows with them
    evenly, for flash attention keeps no scores.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    config.vocab_size = FEW
    one = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if setting.method != "full":
        one = apply_lora(one, rank=setting.rank, target_modules=list(setting.targets))
    few = compiled_block_bytes(one, Shape(batch=1, seq=FEW), dtype=None)
    kept = few * shape.tokens // FEW
    outside = saved_outside_the_blocks(plan, model)
    return plan.change(activations=model.config.num_hidden_layers * kept + outside, one_block=kept)


def _with_inputs_on_the_host(plan: Budget, model: Any, shape: Shape) -> Budget:
    """Offload beside checkpoints: of the inputs of all blocks, one is on the GPU."""
    blocks = model.config.num_hidden_layers
    one_input = 2 * shape.tokens * model.config.hidden_size
    return plan.change(activations=plan.activations - (blocks - 1) * one_input)


# --- what was published -------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """One published peak in GiB, its source, and why the prediction may be another.

    `guess` is what the source does not say of the setting.
    """

    name: str
    setting: Setting
    gib: float
    source: str
    reason: str = ""
    guess: str = ""


@dataclass(frozen=True)
class Compared:
    """A published peak, and ours: the predicted GiB, and their difference to the published."""

    published: Published
    predicted: float

    @property
    def difference(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.published.gib - 1

    @property
    def reason(self) -> str:
        """Why they differ, if by more than LARGE.

        Raises ValueError where such a row has no reason: the table would be of no use.
        """
        if abs(self.difference) <= LARGE:
            return ""
        if not self.published.reason:
            raise ValueError(
                f"{self.published.name}: {self.difference:+.0%} and no reason; find it, and write "
                f"it into benchmarks/published_peaks.py"
            )
        return self.published.reason


def compare(published: Published) -> Compared:
    """Predict the setting of a published peak."""
    return Compared(published, predict(published.setting).peak / GIB)


# --- the rows -----------------------------------------------------------------------------------

TORCHTUNE = "https://github.com/pytorch/torchtune/blob"
MEMORY_TABLE = f"{TORCHTUNE}/0031bfb080bd35ec533c412df883cf2bf7bf7fe4/README.md"
LADDER = f"{TORCHTUNE}/a9ea6d5bf023ebebca7a8ec7981099b03696c67a/README.md"
ANSWER_AI = (
    "https://github.com/AnswerDotAI/fsdp_qlora/blob/"
    "23fafdfb4af403d0808038adafbfd74de265d33a/benchmarks_03_2024.md"
)

QUERY_AND_VALUE = ("q_proj", "v_proj")
GATED_MLP = ("gate_proj", "up_proj", "down_proj")
ALL_BUT_KEYS = ("q_proj", "v_proj", "o_proj", *GATED_MLP)
ALL_LINEAR = ("k_proj", *ALL_BUT_KEYS)
ALL_BUT_OUTPUT = ("q_proj", "k_proj", "v_proj", *GATED_MLP)

EIGHT_B = Setting("llama-3.1-8b", rows=2, tokens=2048)
EIGHT_B_FULL = replace(EIGHT_B, in_backward=True, states="paged 8-bit")
EIGHT_B_LORA = replace(EIGHT_B, method="LoRA", targets=QUERY_AND_VALUE)
THREE_B = Setting("llama-3.2-3b", rows=2, tokens=4096)
THREE_B_PLAIN = replace(THREE_B, checkpointing=False, compiled=False, loss_in_chunks=False)
THREE_B_LORA = replace(THREE_B, method="LoRA", rank=64, targets=ALL_BUT_KEYS, offload=True)
SEVEN_B = Setting(
    "llama-2-7b",
    rows=8,
    tokens=2048,
    method="QLoRA",
    rank=64,
    dropout=0.1,
    targets=ALL_BUT_OUTPUT,
    compiled=False,
    loss_in_chunks=False,
)

FP32_ADAPTERS = (
    "Our adapters are those of peft, in fp32; torchtune's have 16 bits. Their weights, gradients "
    "and averages take twice as much here, and so do the inputs that they cast."
)
RESERVED = (
    "The source gives reserved bytes, and the prediction is of allocated ones. For one of its runs "
    "it gives both: 9.16 GiB allocated and 10.22 reserved. transformers of that time also kept the "
    "logits in fp32 twice, as they are and without the last token: one more [tokens, vocabulary]."
)

Q_AND_V = "adapters on q and v"
NO_CHECKPOINTS = "no checkpoints on the larger card"

PUBLISHED = (
    Published("8B, full, RTX 4090", EIGHT_B_FULL, 18.9, MEMORY_TABLE),
    Published(
        "8B, full, A6000",
        replace(EIGHT_B_FULL, checkpointing=False),
        37.4,
        MEMORY_TABLE,
        guess=NO_CHECKPOINTS,
    ),
    Published("8B, LoRA, RTX 4090", EIGHT_B_LORA, 16.2, MEMORY_TABLE, guess=Q_AND_V),
    Published(
        "8B, LoRA, A6000",
        replace(EIGHT_B_LORA, checkpointing=False),
        30.3,
        MEMORY_TABLE,
        guess=f"{Q_AND_V}, {NO_CHECKPOINTS}",
    ),
    Published(
        "8B, QLoRA, RTX 4090",
        replace(EIGHT_B, method="QLoRA", targets=ALL_LINEAR),
        7.4,
        MEMORY_TABLE,
        FP32_ADAPTERS,
    ),
    Published(
        "3B, full",
        replace(THREE_B_PLAIN, tokens=512),
        25.5,
        LADDER,
        guess="rows of 512 tokens; shorter ones have the same peak",
    ),
    Published("3B, and packed to 4,096 tokens", THREE_B_PLAIN, 60.0, LADDER),
    Published("3B, and compiled", replace(THREE_B_PLAIN, compiled=True), 51.0, LADDER),
    Published("3B, and loss in chunks", replace(THREE_B, checkpointing=False), 42.9, LADDER),
    Published("3B, and checkpoints", THREE_B, 24.9, LADDER),
    Published("3B, and step in backward", replace(THREE_B, in_backward=True), 23.1, LADDER),
    Published("3B, and offload", replace(THREE_B, in_backward=True, offload=True), 21.8, LADDER),
    Published(
        "3B, and 8-bit AdamW",
        replace(THREE_B, in_backward=True, offload=True, states="8-bit"),
        17.6,
        LADDER,
    ),
    Published("3B, LoRA", THREE_B_LORA, 8.5, LADDER, FP32_ADAPTERS),
    Published("3B, QLoRA", replace(THREE_B_LORA, method="QLoRA"), 4.6, LADDER, FP32_ADAPTERS),
    Published("7B, QLoRA, 8 rows, one of two ranks", SEVEN_B, 20.94, ANSWER_AI, RESERVED),
    Published(
        "7B, LoRA, 4 rows, one of two ranks",
        replace(SEVEN_B, rows=4, method="LoRA"),
        22.04,
        ANSWER_AI,
        RESERVED,
    ),
)

# --- the command --------------------------------------------------------------------------------


def main() -> None:
    """Predict every row, and print it."""
    for row in map(compare, PUBLISHED):
        published = row.published
        print(f"{published.name}: {published.gib:.1f} GiB, predicted {row.predicted:.1f}")


if __name__ == "__main__":
    main()
