"""RMSNorm instead of LayerNorm: divide by the length of the hidden state, and leave its mean alone.

Problem    LayerNorm needs two sums over the hidden state, for its mean and for its variance. It
           subtracts the mean and adds a bias. Experiments found that neither makes it work.
Idea       LayerNorm    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
           RMSNorm      y =  x            / sqrt(mean(x²) + eps) * weight

           The two are equal where mean(x) = 0. In a pre-norm model all norms read one residual
           stream x, and everything that is added to it comes from the embedding or from the last
           projection of attention or MLP. Subtract from each column of those matrices its mean over
           the features of the stream, and from their biases theirs: then mean(x) is 0 for ever. And
           LayerNorm never saw the mean that is gone.

               with centred writers    LayerNorm(x) = RMSNorm(x) + bias, exactly
               without                 another model, which has to be trained
Saves      A subtraction and a sum per norm. Whether that is time depends on the kernel: a norm is
           limited by the bytes that it reads and writes, and both norms read and write the same.
           What saves time is one kernel for the whole formula.
Costs      Centred: nothing, but a table of its own for a tied output layer, which must not be
           centred with the embedding. Not centred: training.
Use when   A new model is designed, as nearly all since Llama. Or code for decoding, compression
           (SliceGPT) or rotation of weights (QuaRot) wants RMSNorm, and the model has LayerNorm.
Not when   Post-norm models and those with a norm behind the embedding (BLOOM): no weights can be
           centred there. The goal is speed on a CPU: LayerNorm is one kernel there, and
           `torch.nn.functional.rms_norm` is as slow as the plain formula until it is compiled.
In production   `torch.nn.RMSNorm`; Liger `LigerRMSNorm`; vLLM's and TensorRT-LLM's fused
           "add + RMSNorm".
Source     Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467). The exact
           case: Jiang et al., "Pre-RMSNorm and Pre-CRMSNorm Transformers" (arXiv 2305.14858), and
           SliceGPT (arXiv 2401.15024), section 3.2.

Shapes: B batch, S sequence, N = B*S rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import check_flag, check_number, check_whole
from recipes_lib.core.model.causal_lm import (
    decoder_blocks,
    require_causal_lm,
    trunk,
    without_adapters,
)
from recipes_lib.core.predict.plain_step import features, is_linear

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
    """`weight` without its mean over the features of the residual stream, which are `dim`.

    What the matrix adds to the stream has the mean 0 then, whatever its input is.
    """
    return weight - weight.mean(dim=dim, keepdim=True)


# --- the technique --------------------------------------------------------------------------------

# How far the logits of the probe may be off, relative to their length. Rounding in fp32 is 1e-6 or
# so. A writer that is not centred costs a part of 1 / sqrt(D), 0.01 or more.
TOLERANCE = 1e-4
PROBE_TOKENS = 16


def apply_rms_norm(model: Any, *, exact: bool = True, keep_bias: bool = True) -> Any:
    """Replace every LayerNorm of the residual stream by an RMSNorm, in place; returns `model`.

    Weights and epsilons stay. Norms of queries and keys stay as they are.

    With `exact` the writers of the stream are centred, and the model computes the same. That is
    tried on a few random tokens before anything changes. A tied output layer gets weights of its
    own. What `save_pretrained` writes then loads as a model with LayerNorm, and that computes the
    same, too. Training goes another way than with LayerNorm, because its gradients move the mean.

    Without `exact` no weight changes and the model is another one: train it. Its file loads as a
    model with LayerNorm, which is another model again: apply this to the loaded one once more.

    Args:
        exact: centre the writers and keep what the model computes.
        keep_bias: without `exact`, whether the biases of the norms stay. A new design has none.
    Raises ValueError for a model without LayerNorm; for norms with a formula of their own
    (Nemotron, Cohere); and, with `exact`, where the probe shows that no centring makes them equal
    (post-norm models, BLOOM), for dropped biases and for weights that are not in fp32 or fp64.
    """
    check_flag(exact=exact, keep_bias=keep_bias)
    require_causal_lm(model)
    causal = without_adapters(model)
    norms = _layer_norms(causal)
    if exact:
        _check_exact(causal, keep_bias=keep_bias)
        writers = _writers(causal)
        _check_probe(causal, norms, writers)
        _give_output_layer_its_own_weights(causal)
        for writer in writers:
            _centre(writer)
    for name, norm in norms.items():
        parent, _, child = name.rpartition(".")
        setattr(causal.get_submodule(parent), child, _rms_norm_like(norm, keep_bias=keep_bias))
    return model


class RMSNorm(nn.Module):
    """RMSNorm in one call of PyTorch, with a bias if the LayerNorm that it replaces had one.

    Attributes:
        weight: [D], or None. bias: [D], or None.
    """

    def __init__(self, hidden: int, *, eps: float = 1e-6, bias: bool = False) -> None:
        check_flag(bias=bias)
        check_whole(hidden=hidden)
        check_number(eps=eps, least=0)
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.zeros(hidden))
        self.hidden = hidden
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D], in its dtype; inside it is summed in fp32."""
        y = nn.functional.rms_norm(x, (self.hidden,), self.weight, self.eps)
        if self.bias is not None:
            y = y + self.bias
        return y

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.hidden}, eps={self.eps}, bias={self.bias is not None}"


def _rms_norm_like(norm: nn.LayerNorm, *, keep_bias: bool) -> RMSNorm:
    """An RMSNorm that shares the parameters of this LayerNorm."""
    with torch.device("meta"):
        replacement = RMSNorm(norm.normalized_shape[0], eps=norm.eps)
    replacement.weight = norm.weight
    if keep_bias:
        replacement.bias = norm.bias
    return replacement.train(norm.training)


# --- Hugging Face glue and guards -----------------------------------------------------------------

# The last projection of attention and of the MLP, by the names that families give them. The probe
# finds out whether these are all that write into the residual stream.
LAST_PROJECTIONS = {
    "o_proj",
    "out_proj",
    "c_proj",
    "dense",
    "dense_4h_to_h",
    "down_proj",
    "fc2",
    "fc_out",
}


def _layer_norms(causal: Any) -> dict[str, nn.LayerNorm]:
    """The LayerNorms that read the residual stream: as wide as the hidden states, by name."""
    hidden = causal.config.get_text_config().hidden_size
    direct_parts = {id(module) for module in _direct_parts(causal)}
    found = {}
    for name, module in causal.named_modules():
        if "LayerNorm" not in type(module).__name__ or id(module) not in direct_parts:
            continue
        # A subclass may add 1 to its weight, and other classes have other formulas.
        if type(module) is not nn.LayerNorm or tuple(module.normalized_shape) != (hidden,):
            raise ValueError(
                f"{name} is a {type(module).__name__} with a formula of its own: only "
                f"torch.nn.LayerNorm over the hidden states is replaced"
            )
        found[name] = module
    if not found:
        raise ValueError(
            f"{type(causal).__name__} has no LayerNorm that reads the hidden states: most families "
            f"since Llama have RMSNorm already"
        )
    return found


def _direct_parts(causal: Any) -> Iterator[nn.Module]:
    """What stands directly in a block or beside the blocks: no norms of queries or keys."""
    yield from trunk(causal).children()
    for block in decoder_blocks(causal):
        yield from block.children()


def _check_exact(causal: Any, *, keep_bias: bool) -> None:
    if not keep_bias:
        raise ValueError("keep_bias=False changes what the model computes: give exact=False, too")
    dtypes = {parameter.dtype for parameter in causal.parameters()}
    if not dtypes <= {torch.float32, torch.float64}:
        raise ValueError(
            f"weights in {', '.join(sorted(map(str, dtypes)))} cannot be centred without rounding: "
            f"call model.float() first, and go back to 16 bits after this"
        )


def _writers(causal: Any) -> list[nn.Module]:
    """The modules whose output is added to the residual stream: embeddings, last projections."""
    hidden = causal.config.get_text_config().hidden_size
    writers = [m for m in causal.modules() if isinstance(m, nn.Embedding)]
    for block in decoder_blocks(causal):
        for name, module in block.named_modules():
            last = name.rpartition(".")[2] in LAST_PROJECTIONS
            if last and is_linear(module) and features(module)[1] == hidden:
                writers.append(module)
    return writers


def _stream_dimension(writer: nn.Module) -> int:
    """Which dimension of its weight are the features of the stream."""
    # A Linear stores [out, in]. An embedding stores [V, D], and GPT-2's Conv1D [in, out].
    return 0 if isinstance(writer, nn.Linear) else 1


@torch.no_grad()
def _centre(writer: nn.Module) -> None:
    writer.weight.copy_(centred(writer.weight, dim=_stream_dimension(writer)))
    if getattr(writer, "bias", None) is not None:
        writer.bias.copy_(centred(writer.bias, dim=0))


def _give_output_layer_its_own_weights(causal: Any) -> None:
    """Untie it: the embedding is centred, and the output layer must stay as it is."""
    embedding = causal.get_input_embeddings()
    output = causal.get_output_embeddings()
    if output.weight is not embedding.weight:
        return
    trains = embedding.weight.requires_grad
    output.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=trains)
    # Under a configuration that says "tied", transformers would tie them again.
    causal.config.tie_word_embeddings = False
    causal.all_tied_weights_keys = causal.get_expanded_tied_weights_keys(all_submodels=True)


def _check_probe(causal: Any, norms: dict[str, nn.LayerNorm], writers: list[nn.Module]) -> None:
    """Compute a few logits as they are, and as they will be; nothing of the model changes."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = causal.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, (1, PROBE_TOKENS), generator=generator).to(causal.device)
    was_training = causal.training
    causal.eval()
    try:
        with torch.no_grad():
            expected = causal(input_ids=ids, use_cache=False).logits  # [1, S, V]
            with _as_it_will_be(norms, writers):
                got = causal(input_ids=ids, use_cache=False).logits
    finally:
        causal.train(was_training)
    off = ((got - expected).norm() / expected.norm()).item()
    # Not-a-number is refused as well.
    if not off <= TOLERANCE:
        raise ValueError(
            f"{type(causal).__name__} computes something else with RMSNorm and centred weights "
            f"(logits off by {off:.1e}): it normalises what is no sum of its embedding and its "
            f"projections; with exact=False the norms are replaced, and the model has to be trained"
        )


@contextmanager
def _as_it_will_be(norms: dict[str, nn.LayerNorm], writers: list[nn.Module]) -> Iterator[None]:
    """Let hooks centre what the writers return, and norms return what an RMSNorm would."""
    with ExitStack() as stack:
        for writer in writers:
            handle = writer.register_forward_hook(_centred_output)
            stack.callback(handle.remove)
        for norm in norms.values():
            replacement = _rms_norm_like(norm, keep_bias=True)
            handle = norm.register_forward_hook(partial(_output_of, replacement))
            stack.callback(handle.remove)
        yield


def _centred_output(writer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(
            f"{type(writer).__name__} writes more than one tensor to the residual stream: "
            f"no centring makes the norms equal; pass exact=False"
        )
    return centred(output, dim=-1)


def _output_of(
    replacement: nn.Module, norm: nn.Module, inputs: tuple[Any, ...], output: Tensor
) -> Tensor:
    return replacement(inputs[0])


# --- the arithmetic -------------------------------------------------------------------------------

# How often each way reads or writes [N, D], of which all but the first and the last are in fp32.
# Plain: x² reads and writes, mean reads, x * rsqrt reads and writes, * weight reads and writes.
PASSES = {"plain": 7, "fused": 2}


def predicted_norm_bytes(*, rows: int, hidden: int, itemsize: int, fused: bool) -> int:
    """Bytes that the forward of an RMSNorm reads and writes for x [N, D].

    One kernel reads x and writes y. Plain operators read and write memory between each other, in
    fp32, and convert 16 bits to that and back, which reads and writes as well. The weight and the
    sums are left out: they stay in the cache.
    """
    check_whole(rows=rows, hidden=hidden, itemsize=itemsize)
    check_flag(fused=fused)
    elements = rows * hidden
    if fused:
        return PASSES["fused"] * elements * itemsize
    traffic = PASSES["plain"] * elements * 4
    if itemsize < 4:
        # To fp32: read 2, write 4 bytes. And back.
        traffic += 2 * elements * (itemsize + 4)
    return traffic
