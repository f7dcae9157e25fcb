"""Chunked cross-entropy: output layer and loss of a few hundred tokens at a time.

Problem    The logits and their gradients are the largest tensors of a step: 12 bytes x T x V.
Idea       The loss is a scalar, so the gradient of a chunk's logits is known at once, up to a factor:

               for h in chunks of hidden:      [C, D]   rows without a target are left out
                   x  = h W^T                  [C, V]   loss += sum(logsumexp(x) - x[target])
                   x  = softmax(x) - onehot    in place
                   dh = x W,  dW += x^T h      [C, D], [V, D]      backward multiplies by the incoming gradient
Saves      12 T V bytes become 4 C V (2 C V in 16 bits), the gradient of hidden, and that of W if it trains.
Costs      No arithmetic, but the output has no logits. 16-bit W: its gradient is summed in fp32, 6 V D bytes in all
           (a bf16 one of up to 16 chunks in bf16, 2 V D); a CPU without bf16 units multiplies with an fp32 copy.
Use when   T V is large: long sequences, large vocabularies, few targets. Not when training needs the logits.
In production   `TrainingArguments(use_liger_kernel=True)`; `F.linear_cross_entropy(…, options=…)`; TRL has its own.
Source     Hsu et al., "Liger Kernel", arXiv 2410.10989; Wijmans et al., "Cut Your Losses", arXiv 2411.09009.
Shapes     T tokens, D hidden, V vocabulary, C rows of a chunk, B batch, S sequence.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.machine import machine
from recipes_lib.core.measure import dry
from recipes_lib.core.plain_step import final_norm_bytes

BLOCK = 2**22  # logits that are worked on at a time between the products: few, because in fp32
FEW = 16  # chunks: a bf16 sum of so many is off by 0.5 %, one in fp32 by the 0.25 % of the bf16 products in it


def apply_chunked_cross_entropy(model: Any, *, chunk_size: int | None = None, label_smoothing: float = 0.0,
                                z_loss: float = 0.0) -> Any:  # fmt: skip
    """Let a Hugging Face causal LM (adapters or not) compute its loss in chunks. Returns `model`.

    With `labels=` in training mode, or `skip_logits=True` in eval mode, the output has `loss` and no logits. Raises
    ValueError for wrong arguments and a model that computes its loss itself; its forward does, if the logits are more
    than a linear layer and the soft cap of the configuration.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    causal = getattr(model, "get_base_model", lambda: model)()
    if hasattr(causal, "chunked_loss"):
        raise ValueError(
            "the loss is chunked already: call remove_chunked_cross_entropy(model) first"
        )
    calls = inspect.unwrap(type(causal).forward).__code__.co_names
    if "loss_function" not in calls or causal.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{type(causal).__name__} is no Hugging Face causal LM whose loss is ForCausalLMLoss"
        )
    options = {"chunk_size": chunk_size, "label_smoothing": label_smoothing, "z_loss": z_loss}
    chunked_cross_entropy(
        torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1).long(), **options
    )  # are they right?
    causal.__class__, causal.chunked_loss = _chunked_class(type(causal)), options
    return model


def remove_chunked_cross_entropy(model: Any) -> Any:
    """Give the causal LM its own class back. Raises ValueError if there is nothing to remove."""
    causal = getattr(model, "get_base_model", lambda: model)()
    if causal.__dict__.pop("chunked_loss", None) is None:
        raise ValueError("this model has no loss that apply_chunked_cross_entropy() has changed")
    causal.__class__ = type(causal).__base__
    return model


def _chunked_class(base: type) -> type:
    @functools.wraps(base.forward)  # Trainer and generate() read its signature
    def forward(self, *args, skip_logits=None, **kwargs):
        labels, shifted, ignored = (
            kwargs.get("labels"),
            kwargs.get("shift_labels"),
            kwargs.get("ignore_index", -100),
        )
        if labels is None or not (self.training if skip_logits is None else skip_logits):
            return base.forward(self, *args, **kwargs)
        head = (
            self.get_output_embeddings()
        )  # reads one token, and the same far larger: what becomes of these logits?
        read, two = [], head.weight.new_tensor([[1.0], [64.0]])
        with head.register_forward_pre_hook(
            lambda _, inputs: read.append(inputs[0]) or inputs[0][:1, :1] * two
        ):
            output = base.forward(self, *args, **kwargs | {"labels": None, "return_dict": True})
        bias, cap = (
            getattr(head, "bias", None),
            getattr(self.config.get_text_config(), "final_logit_softcapping", None),
        )
        expected = torch.nn.functional.linear(read[0][:1, :1] * two, head.weight, bias).to(
            output.logits.dtype
        )
        expected = cap * torch.tanh(expected / cap) if cap else expected
        adapters = [
            p
            for p in head.parameters()
            if p.requires_grad and p is not head.weight and p is not bias
        ]
        if (
            adapters
            or "aux_loss" in output
            or not (dry() or torch.allclose(output.logits, expected, 0.02, 1e-3, True))
        ):
            raise ValueError(
                f"{base.__name__} scales its logits, has adapters on them or adds a router's loss"
            )
        options = {
            "bias": bias,
            "softcap": cap,
            "num_items": kwargs.get("num_items_in_batch"),
        } | self.chunked_loss
        if shifted is None:  # the model predicts token t + 1 from token t
            shifted = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignored)
        loss = chunked_cross_entropy(
            read[0], head.weight, shifted.to(read[0].device), ignore_index=ignored, **options
        )
        output = type(output)(**dict(output) | {"loss": loss, "logits": None})
        return (
            output
            if kwargs.get("return_dict", self.config.return_dict) is not False
            else output.to_tuple()
        )

    return type(
        base.__name__, (base,), {"forward": forward, "__module__": base.__module__}
    )  # a deep copy has it too


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, bias: torch.Tensor | None = None,
    chunk_size: int | None = None, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, reduction: str = "mean", num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Cross-entropy of `hidden @ weight.T + bias`: hidden [..., D], weight [V, D], labels [...], already shifted.

    `chunk_size`: most rows of logits at a time (default: 64 MiB of them, 128 on a GPU). `z_loss` adds this times the
    squared log-sum-exp, a `softcap` c makes the logits c tanh(logits / c), `num_items` divides the sum: the targets of
    the whole batch. Returns the "mean" or "sum", in fp32 or fp64; backward runs once.
    """
    terms = {"softcap": softcap, "label_smoothing": label_smoothing, "z_loss": z_loss}
    if (
        any(x is not None and x <= 0 for x in (chunk_size, softcap))
        or not 0 <= label_smoothing < 1
        or z_loss < 0
    ):
        raise ValueError(
            f"chunk_size={chunk_size}, {terms}: give sizes above 0, a smoothing in [0, 1), z_loss >= 0"
        )
    if reduction not in ("mean", "sum") or (reduction == "sum" and num_items is not None):
        raise ValueError(
            f"reduction={reduction!r}: choose 'mean' or 'sum', and leave it out with num_items"
        )
    shapes = [tuple(t.shape) for t in (hidden, weight, labels, bias) if t is not None]
    if (
        weight.dim() != 2
        or shapes[0] != (*labels.shape, weight.shape[1])
        or shapes[3:] not in ([], [shapes[1][:1]])
    ):
        raise ValueError(
            f"shapes of hidden, weight, labels, bias: {shapes} are not [..., D], [V, D], [...], [V]"
        )
    rows = torch.arange(labels.numel(), device=labels.device)[
        ... if dry() else labels.flatten() != ignore_index
    ]
    targets = labels.flatten()[rows]  # in a dry run, which has no labels, all of them
    if not dry() and ((targets < 0) | (targets >= len(weight))).any():
        raise ValueError(
            f"a label is neither in the vocabulary of {len(weight)} nor {ignore_index}, the ignored one"
        )
    items = torch.as_tensor(
        num_items if num_items is not None else len(rows) if reduction == "mean" else 1
    ).reshape(())
    if not dry() and items <= 0:
        raise ValueError(
            f"a mean over {items} targets: give labels other than {ignore_index}, or num_items above 0"
        )
    plan, train = _plan(hidden, weight, len(rows), chunk_size), torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):
        return _Loss.apply(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            bias,
            rows,
            targets,
            items,
            plan,
            terms,
            train,
        )


class _Loss(
    torch.autograd.Function
):  # its gradients are the sum's until backward: the mean's would vanish in fp16
    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, targets, items, plan, terms, train):
        (size, product, sums, weight_sums), needs = (
            plan,
            ctx.needs_input_grad if train else (False,) * 3,
        )
        made = zip((hidden, weight, bias), (hidden.dtype, weight_sums, sums), needs)
        gradients = [torch.zeros_like(t, dtype=dtype) if need else None for t, dtype, need in made]
        ctx.items, ctx.gradients, (grad_hidden, grad_weight, grad_bias) = (
            items,
            gradients,
            gradients,
        )
        w, total, step = (
            weight.to(product),
            hidden.new_zeros((), dtype=sums),
            max(1, BLOCK // len(weight)),
        )
        buffer = hidden.new_empty(min(size, len(rows)), len(weight), dtype=product)
        for index, target in zip(rows.split(size), targets[:, None].split(size)):
            h, out = hidden[index].to(product), buffer[: len(index)]  # [C, D], [C, V]
            logits = (
                torch.mm(h, w.t(), out=out)
                if bias is None
                else torch.addmm(bias.to(product), h, w.t(), out=out)
            )
            for block in zip(logits.split(step), target.split(step)):
                total += _loss_and_gradient_(*block, sums, **terms)
            if grad_hidden is not None:
                grad_hidden[index] = (logits @ w).to(hidden.dtype)
            if grad_weight is not None and weight_sums == product:
                grad_weight.addmm_(logits.t(), h)
            elif grad_weight is not None:
                grad_weight += logits.t() @ h
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=sums)
        return total / items

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        if ctx.gradients is None:
            raise RuntimeError(
                "the first backward gave the gradients of this loss away: compute the loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        factor = (grad_output / ctx.items).reshape(
            1
        )  # one dimension: a GPU rounds a scalar to 16 bits first
        return *(None if g is None else g.mul_(factor) for g in gradients), *[
            None
        ] * 6  # autograd casts to the inputs


def _loss_and_gradient_(logits, targets, sums, *, softcap, label_smoothing, z_loss):
    """The sum of the losses of logits [C, V] and targets [C, 1]; the logits become its gradient."""
    x = torch.tanh(logits.to(sums) / softcap).mul_(softcap) if softcap else logits
    p = torch.log_softmax(x, 1, dtype=sums)
    picked = p.gather(1, targets)
    log_sum = x.gather(1, targets) - picked  # log-sum-exp
    mean = p.mean(1, keepdim=True) if label_smoothing else 0
    p.exp_()
    if label_smoothing or z_loss:
        p.mul_(1 + 2 * z_loss * log_sum).sub_(label_smoothing / p.shape[1])
    p.scatter_add_(1, targets, torch.full_like(picked, label_smoothing - 1))
    logits.copy_(p.mul_(x.div_(softcap).square_().neg_().add_(1)) if softcap else p)
    return (
        z_loss * log_sum.square() - (1 - label_smoothing) * picked - label_smoothing * mean
    ).sum()


def _plan(
    hidden, weight, targets, chunk_size
):  # rows of a chunk; dtypes of products, sums, the weight's gradient
    device = (
        machine().device if hidden.is_meta else hidden.device.type
    )  # a meta model is planned for this machine
    product = torch.result_type(hidden, weight)
    product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else product
    sums = torch.promote_types(product, torch.float32)
    if device == "cpu" and not (machine().native_bf16 and product == torch.bfloat16):
        product = sums  # a CPU without these units emulates 16-bit products, tens of times slower
    rows = 2 ** (26 if device == "cpu" else 27) // (len(weight) * product.itemsize) // 64 * 64
    rows = min(
        chunk_size or max(64, rows), (2**31 - 1) // len(weight)
    )  # kernels count elements in 32 bits
    few = weight.dtype == product == torch.bfloat16 and targets <= FEW * rows
    return rows, product, sums, product if few else sums


def estimate_chunked_cross_entropy(budget: Budget, model: Any, *, batch_size: int, seq_len: int,
                                   chunk_size: int | None = None, targets: int | None = None) -> Budget:  # fmt: skip
    """The budget with a chunked loss. `targets` tokens have a label: by default all, but the first of each row."""
    head, tokens = model.get_output_embeddings().weight, batch_size * seq_len
    targets = tokens - batch_size if targets is None else targets
    if min(batch_size, tokens, targets) < 1:
        raise ValueError(
            f"batch_size={batch_size}, seq_len={seq_len}, targets={targets}: each must be 1 or more"
        )
    rows, product, _, weight_sums = _plan(head, head, targets, chunk_size)
    (vocab, width), size, gradient = (
        head.shape,
        head.dtype.itemsize,
        head.requires_grad * head.numel(),
    )
    rows, cap = (
        min(rows, targets),
        getattr(model.config.get_text_config(), "final_logit_softcapping", None),
    )
    block = 4 * min(rows * vocab, BLOCK) * (2 if cap or product.itemsize == 2 else 1)
    added = (
        gradient * product.itemsize * (product != weight_sums)
    )  # the chunk's part of a sum in another dtype
    chunk = product.itemsize * (
        rows * (vocab + 2 * width) + head.numel() * (product != head.dtype)
    ) + max(block, added)
    hidden = (
        size * tokens * width * (2 - head.requires_grad)
    )  # its gradient, and itself if the budget has it not yet
    last_block = budget.block_gradients - tokens * final_norm_bytes(
        model
    )  # while its activations are still there
    return budget.change(loss=gradient * weight_sums.itemsize + max(hidden + chunk, last_block))
