"""A causal LM up to its output layer, on families that make their logits in several ways."""

from functools import partial

import pytest
import torch
import transformers

from recipes_lib.core.model import output_layer as module
from recipes_lib.core.model.output_layer import (
    makes_plain_logits,
    output_layer_of,
    run_to_the_output_layer,
)

SMALL = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def stopped(model, batch):
    """Output and hidden states of a forward without labels."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return run_to_the_output_layer(model, partial(model, **inputs, use_cache=False))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Cohere", {"logit_scale": 0.3}),
        ("Granite", {"logits_scaling": 8.0}),
        ("MiniCPM3", {"dim_model_base": 16, "num_key_value_heads": 4}),
    ],
)
def test_a_factor_of_the_logits_is_in_the_hidden_states(family, options, batch):
    """Cohere multiplies, Granite divides, and MiniCPM3 divides in front of its output layer."""
    config = getattr(transformers, f"{family}Config")(**SMALL | options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.randn(128))
    output, hidden = stopped(model, batch)
    layer = output_layer_of(model)
    logits = torch.nn.functional.linear(hidden, layer.weight, layer.bias)
    torch.testing.assert_close(logits, model(**batch).logits)
    assert makes_plain_logits(output, hidden, layer)


def test_logits_that_are_more_than_a_layer(batch, monkeypatch):
    # A cap of 30 under another name. These logits are small: the cap shows in those of 64 times
    # the token only.
    config = transformers.RecurrentGemmaConfig(**SMALL, lru_width=64)
    model = transformers.AutoModelForCausalLM.from_config(config)
    output, hidden = stopped(model, batch)
    assert not makes_plain_logits(output, hidden, output_layer_of(model))
    # A factor that its configuration has, and nobody has told us of.
    config = transformers.CohereConfig(**SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr(module, "logit_factor", lambda model: 1)
    output, hidden = stopped(model, batch)
    assert not makes_plain_logits(output, hidden, output_layer_of(model))
