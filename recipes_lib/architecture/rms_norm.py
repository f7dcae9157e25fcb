"""RMSNorm instead of LayerNorm: divide by the length of the hidden state, and leave its mean alone.

Problem    LayerNorm needs two sums over the hidden state, subtracts the mean and adds a bias.
           Experiments found that neither makes it work.
Idea       LayerNorm    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
           RMSNorm      y =  x            / sqrt(mean(x²) + eps) * weight

           The two are equal where mean(x) = 0. In a pre-norm model all norms read one residual
           stream x, and everything that is added to it comes from the embedding or from the last
           projection of attention or MLP. Subtract from each column of those matrices its mean over
           the features of the stream, and from their biases theirs: then mean(x) is 0 for ever. And
           LayerNorm never saw the mean that is gone.

               with centred writers    LayerNorm(x) = RMSNorm(x) + bias, exactly
               without                 another model, which has to be trained
Saves      A subtraction and a sum per norm. What saves time is one kernel for the whole formula: a
           norm is limited by the bytes that it reads and writes, the same in both.
Costs      Centred: nothing, but a table of its own for a tied output layer, which must not be
           centred with the embedding. Not centred: training.
Use when   A new model is designed, as nearly all since Llama. Or code for decoding, compression
           (SliceGPT) or rotation of weights (QuaRot) wants RMSNorm, and the model has LayerNorm.
Not when   Post-norm models and those with a norm behind the embedding (BLOOM): no weights can be
           centred there. Weights in 16 bits, which centring rounds: model.float() first. The goal
           is speed on a CPU: LayerNorm is one kernel there, and `torch.nn.functional.rms_norm` is
           as slow as the plain formula until it is compiled.
In production   `torch.nn.RMSNorm`; Liger `LigerRMSNorm`; vLLM's and TensorRT-LLM's fused
           "add + RMSNorm".
Source     Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467). The exact
           case: Jiang et al., "Pre-RMSNorm and Pre-CRMSNorm Transformers" (arXiv 2305.14858), and
           SliceGPT (arXiv 2401.15024), section 3.2.

Shapes: B batch, S sequence, N = B*S rows, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.model.causal_lm import decoder_blocks, trunk, without_adapters
from recipes_lib.core.model.linears import features, is_linear
from recipes_lib.core.model.probe import Limits, proves

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row of x [..., D] by its root mean square, and scale the features.

    The sum is in fp32, because bf16 loses the small squares beside the large ones.
    """
    wide = x.float()
    mean_square = wide.pow(2).mean(dim=-1, keepdim=True)  # [..., 1]
    normalised = wide * torch.rsqrt(mean_square + eps)  # [..., D]
    return (normalised * weight.float()).to(x.dtype)


def centred(weight: Tensor, *, dim: int) -> Tensor:
    """`weight` without its mean over the `dim` features of the residual stream, for RMSNorm.

    What the matrix adds to the stream has the mean 0 then, whatever its input is.
    """
    return weight - weight.mean(dim=dim, keepdim=True)


# --- the technique --------------------------------------------------------------------------------

# How far the logits may be off, relative to their length. Rounding in fp32 is 1e-6 or so. A writer
# that is not centred costs a part of 1 / sqrt(D), 0.01 or more.
TOLERANCE = 1e-4

# The last projection of attention and of the MLP, by the names that families give them. The proof
# finds out whether these are all that write into the residual stream.
LAST_PROJECTIONS = {"o_proj", "out_proj", "c_proj", "dense", "dense_4h_to_h", "down_proj"}
LAST_PROJECTIONS |= {"fc2", "fc_out"}


def _promise_of_rms_norm(*, exact: bool = True, keep_bias: bool = True) -> Limits:
    return Limits("rounds", TOLERANCE) if exact else Limits("changes")


@proves(_promise_of_rms_norm)
def apply_rms_norm(model: Any, *, exact: bool = True, keep_bias: bool = True) -> Any:
    """Replace every LayerNorm of the residual stream by an RMSNorm, in place; returns `model`.

    Weights and epsilons stay, and so do norms of queries and keys. Make the optimizer after this:
    writers have new weights, and a tied output layer one of its own.

    Args:
        exact: centre the writers and keep what the model computes. Its file loads as a model with
            LayerNorm that computes the same. Trained, it goes another way than with LayerNorm,
            because its gradients move the mean. Without, the model is another one: train it, and
            apply this again to what was loaded.
        keep_bias: without `exact`, whether the biases of the norms stay. A new design has none.
    """
    if exact and not keep_bias:
        raise ValueError("keep_bias=False changes what the model computes: give exact=False, too")
    causal = without_adapters(model)
    if exact:
        _centre_writers(causal)
    names = {module: name for name, module in causal.named_modules()}
    norms = _layer_norms(causal)
    if not norms:
        raise ValueError(
            f"{type(causal).__name__} has no LayerNorm that reads the hidden states: most families "
            f"since Llama have RMSNorm already, and some have a formula of their own"
        )
    for norm in norms:
        parent, _, child = names[norm].rpartition(".")
        setattr(causal.get_submodule(parent), child, _rms_norm_like(norm, keep_bias=keep_bias))
    return model


def _centre_writers(causal: Any) -> None:
    """Centre all that writes to the stream, so that RMSNorm computes what LayerNorm did."""
    embedding = causal.get_input_embeddings()
    tied = causal.get_output_embeddings().weight is embedding.weight
    for writer in _writers(causal):
        _centre_writer(writer)
    if tied:
        # The output layer keeps the table as it was. Under a configuration that says "tied",
        # transformers would tie them again.
        causal.config.tie_word_embeddings = False
        causal.all_tied_weights_keys = causal.get_expanded_tied_weights_keys(all_submodels=True)


class RMSNorm(nn.Module):
    """RMSNorm in one call of PyTorch, with a bias if the LayerNorm that it replaces had one."""

    def __init__(self, hidden: int, *, eps: float = 1e-6, bias: bool = False) -> None:
        """An RMSNorm of `hidden` features before training: weight 1, and bias 0 if there is one."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.zeros(hidden))
        self.hidden = hidden
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.rms_norm(x, (self.hidden,), self.weight, self.eps)
        if self.bias is not None:
            y = y + self.bias
        return y


def _rms_norm_like(norm: nn.LayerNorm, *, keep_bias: bool) -> RMSNorm:
    with torch.device("meta"):
        replacement = RMSNorm(norm.normalized_shape[0], eps=norm.eps)
    replacement.weight = norm.weight
    if keep_bias:
        replacement.bias = norm.bias
    return replacement.train(norm.training)


def _layer_norms(causal: Any) -> list[nn.LayerNorm]:
    """The LayerNorms that read the residual stream: directly in a block, or beside the blocks."""
    hidden = causal.config.get_text_config().hidden_size
    parts = [*trunk(causal).children()]
    for block in decoder_blocks(causal):
        parts += block.children()
    # A subclass may have a formula of its own, such as 1 + weight.
    layer_norms = [part for part in parts if type(part) is nn.LayerNorm]
    return [norm for norm in layer_norms if norm.normalized_shape == (hidden,)]


def _writers(causal: Any) -> list[nn.Module]:
    """What is centred for RMSNorm: embeddings, and projections whose output the stream gets."""
    hidden = causal.config.get_text_config().hidden_size
    writers = [module for module in causal.modules() if isinstance(module, nn.Embedding)]
    for block in decoder_blocks(causal):
        for name, module in block.named_modules():
            last = name.rpartition(".")[2] in LAST_PROJECTIONS
            if last and is_linear(module) and features(module)[1] == hidden:
                writers.append(module)
    return writers


@torch.no_grad()
def _centre_writer(writer: nn.Module) -> None:
    """What a layer adds to the residual stream gets a mean of zero, as RMSNorm wants it."""
    # A Linear stores [out, in]. An embedding stores [V, D], and GPT-2's Conv1D [in, out].
    dim = 0 if isinstance(writer, nn.Linear) else 1
    for name, parameter in list(writer.named_parameters(recurse=False)):
        features_are = dim if name == "weight" else 0
        value = centred(parameter, dim=features_are)
        setattr(writer, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
