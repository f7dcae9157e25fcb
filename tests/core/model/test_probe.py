"""A technique that breaks its promise is undone, and the model is what it was."""

import copy

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from recipes_lib.attention.head_groups import apply_head_groups
from recipes_lib.core.measure import dry_run
from recipes_lib.core.model import load_model, model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks, trunk
from recipes_lib.core.model.marks import ONE_DOCUMENT_UNDER, marked
from recipes_lib.core.model.mixins import mix_in
from recipes_lib.core.model.probe import TOKENS, proves
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from tests.snapshots import assert_unchanged, snapshot


class Scaled:
    """What is mixed into an MLP: its output, times `factor`; its gradient, times `backward`."""

    factor = 1.0
    backward = 1.0

    def forward(self, hidden):
        out = super().forward(hidden) * self.factor
        return Turned.apply(out, self.backward)


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, backward):
        ctx.backward = backward
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.backward, None


def scaled(promise, **promises):
    @proves(promise, **promises)
    def apply_scaled(model, *, factor=1.0, backward=1.0):
        mix_in(decoder_blocks(model)[-1].mlp, Scaled, factor=factor, backward=backward)
        return model

    return apply_scaled


@proves("exact")
def apply_nothing(model):
    return model


def refuses(apply, model, match, **options):
    """Refused in one line that names the model, and the model is as it was."""
    before = snapshot(model)
    config = str(model.config)
    with pytest.raises(ValueError, match=match) as error:
        apply(model, **options)
    assert "\n" not in str(error.value)
    assert type(model).__name__ in str(error.value)
    assert_unchanged(model, before)
    assert str(model.config) == config


# --- the promises, each broken once ---------------------------------------------------------------


def test_exact_sees_a_backward_that_is_wrong_alone(llama):
    """Loss and logits are right: a comparison of forwards would pass."""
    refuses(scaled("exact"), llama, "gradient of .* is off", backward=0.5)


def test_exact_sees_that_nothing_has_changed(llama):
    """A recipe that reaches nothing in this family saves nothing, in silence."""
    refuses(apply_nothing, llama, "nothing in the model has changed")


def test_function_leaves_the_tables_out_and_nothing_else(llama):
    """An untied table's gradient was a sum of two; the rest must be as before."""

    @proves("function")
    def apply_untied(model, *, also=1.0):
        output = model.get_output_embeddings()
        output.weight = nn.Parameter(output.weight.detach().clone())
        mix_in(decoder_blocks(model)[-1].mlp, Scaled, backward=also)
        return model

    refuses(apply_untied, llama, "gradient of", also=0.5)
    apply_untied(llama)


def test_grows_sees_a_weight_that_gets_no_gradient(llama):
    @proves("grows")
    def apply_beside(model):
        model.beside = nn.Linear(2, 2)  # nobody calls it
        return model

    refuses(apply_beside, llama, "no gradient of beside")


def test_rounds_sees_too_much_and_nothing_at_all(llama):
    refuses(scaled("rounds", bound=0.01), llama, "is off", factor=2.0)
    refuses(scaled("rounds", bound=0.01), llama, "no number has changed")
    scaled("rounds", bound=0.5)(llama, factor=1.01)


def test_changes_sees_what_is_not_finite_and_what_is_equal(llama):
    refuses(scaled("changes"), llama, "not finite", factor=float("inf"))
    refuses(scaled("changes"), llama, "no number has changed")
    scaled("changes")(llama, factor=2.0)


def test_a_bound_of_the_loss_sees_in_bf16_what_a_bound_of_logits_does_not():
    """A router's loss that is forgotten is 3e-4 of the loss: 16 bits hide it among the logits."""
    model = model_of_shape("tiny-llama", device="cpu").to(torch.bfloat16)
    scaled("exact")(copy.deepcopy(model), factor=1.05)
    refuses(scaled("exact", loss_bound=1e-6), model, "loss is off", factor=1.05)


def test_sharing_between_blocks_is_kept(llama):
    """Equal weights give equal numbers until the first step of an optimizer."""
    first, last = decoder_blocks(llama)
    last.mlp.up_proj.weight = first.mlp.up_proj.weight

    @proves("exact")
    def apply_unshared(model):
        last.mlp.up_proj.weight = nn.Parameter(first.mlp.up_proj.weight.detach().clone())
        return model

    refuses(apply_unshared, llama, "shared a weight no longer do")


# --- options that stand in, kernels and documents -------------------------------------------------


def test_options_stand_in_while_it_proves_itself(llama):
    apply = scaled("exact", tried_with={"factor": 1.0})
    apply(llama, factor=2.0)
    assert decoder_blocks(llama)[-1].mlp.factor == 2.0  # the user's own remain
    refuses(scaled("exact", tried_with={"factor": 2.0}), model_of_shape("tiny-llama"), "is off")


def test_narrow_must_change_something(llama):
    """A pattern that is accepted and ignored is exact at every width."""
    refuses(scaled("exact", tried_with={}, narrow={}), llama, "no number has changed")
    scaled("exact", tried_with={}, narrow={"factor": 2.0})(llama)


def test_a_kernel_must_have_been_called():
    """The configuration names it, and the model's own attention runs on."""
    AttentionInterface.register("counted_here", sdpa_attention_forward)

    @proves("exact", kernel=True)
    def apply_name(model, *, ignored=False):
        model.config._attn_implementation = "counted_here"
        for block in decoder_blocks(model):
            if ignored:
                block.self_attn.config = copy.copy(model.config)
                block.self_attn.config._attn_implementation = "sdpa"
        return model

    qwen = model_of_shape("tiny-qwen3", device="cpu")
    refuses(apply_name, qwen, "no layer calls", ignored=True)
    apply_name(qwen)


def test_a_model_whose_documents_leak_refuses_positions_that_restart(llama):
    """Before and after are equal when both leak, so comparing these sees nothing."""

    class Leaks:
        def forward(self, hidden):
            return super().forward(hidden) + hidden.cumsum(dim=1)

    ids = torch.arange(TOKENS)[None]
    restart = {"input_ids": ids, "position_ids": ids % 5, "use_cache": False}
    apply = scaled("exact", tried_with={}, narrow={"factor": 2.0})
    apply(llama)
    llama(**restart)
    leaking = model_of_shape("tiny-llama", device="cpu")
    mix_in(decoder_blocks(leaking)[0].mlp, Leaks)
    leaking = copy.deepcopy(apply(leaking))
    assert marked(trunk(leaking), ONE_DOCUMENT_UNDER)
    leaking(ids)
    with pytest.raises(ValueError, match="give one document per row"):
        leaking(**restart)
    leaking.set_attn_implementation("eager")  # it takes the technique off
    leaking(**restart)


# --- the undo -------------------------------------------------------------------------------------


def test_what_raises_half_way_is_undone(llama):
    """Classes, hooks, attributes, configuration, what trains: all that a recipe may touch."""
    with_a_hook = decoder_blocks(llama)[0]
    with_a_hook.register_forward_hook(lambda *_: None)

    @proves("exact")
    def apply_half(model):
        first = decoder_blocks(model)[0]
        mix_in(first.mlp, Scaled)
        first._forward_hooks.clear()
        first.register_forward_pre_hook(lambda *_: None)
        first.mlp.up_proj = nn.Identity()
        model.config.vocab_size = 3
        model.lm_head.weight.requires_grad_(False)
        model.lm_head.weight.marked = True
        raise KeyError("no such layer")

    refuses(apply_half, llama, "KeyError: 'no such layer'")


def test_the_probe_leaves_no_trace(llama):
    """Gradients, buffers, modes and random numbers are those of before."""
    llama.register_buffer("count", torch.zeros(1))
    llama.register_forward_pre_hook(lambda model, _: model.count.add_(1) and None)
    llama.eval()
    decoder_blocks(llama)[0].train()
    state = torch.get_rng_state()
    scaled("exact")(llama)
    assert torch.equal(torch.get_rng_state(), state)
    assert llama.count == 0
    assert all(parameter.grad is None for parameter in llama.parameters())
    assert [block.training for block in decoder_blocks(llama)] == [True, False]


def test_dropout_is_off_while_it_compares():
    """Every technique that runs twice would be refused on GPT-2."""
    model = model_of_shape("tiny-gpt2", device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    model.config.attn_pdrop = 0.5
    scaled("exact")(model)


# --- who is not probed ----------------------------------------------------------------------------


def test_models_without_data_are_not_run():
    scaled("exact")(model_of_shape("tiny-llama").to("meta"), factor=2.0)
    with dry_run():
        scaled("exact")(model_of_shape("tiny-llama", device="cpu"), factor=2.0)


def test_rounding_of_a_pretrained_model_is_no_broken_promise():
    """Refused on an AMD EPYC: sums in another order, whose terms cancel in a gradient."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        apply_chunked_cross_entropy(load_model("smollm2"))
        apply_head_groups(load_model("smollm2", dtype=torch.bfloat16))
    finally:
        torch.set_num_threads(threads)


def test_a_gradient_that_is_off_by_half_a_percent_is_refused():
    model = model_of_shape("tiny-llama")
    refuses(scaled("exact"), model, "gradient of .* is off by 5.0e-03", backward=1.005)
