"""The sum of the losses of a batch, and models whose own loss is another one."""

import pytest
import transformers
from torch import nn

from recipes_lib.core.model.loss import require_shifted_loss, sum_of_losses
from tests.conftest import make_batch
from tests.small_models import small_model


def test_a_loss_that_does_not_move_the_labels_is_seen():
    """Bart's decoder learns from labels that are moved already: ours would be another loss."""
    require_shifted_loss(small_model("Llama"))
    require_shifted_loss(nn.Linear(1, 1))
    bart = transformers.BartConfig(
        vocab_size=16, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16
    )
    with pytest.raises(ValueError, match="from labels that are moved already"):
        require_shifted_loss(transformers.BartForCausalLM(bart))


def test_an_auxiliary_loss_is_not_dropped_silently():
    """The mistake: a mixture trains without the loss of its router."""
    sizes = {"num_local_experts": 2, "num_key_value_heads": 2, "output_router_logits": True}
    with pytest.raises(ValueError, match="auxiliary loss"):
        sum_of_losses(small_model("Mixtral", **sizes), make_batch())
