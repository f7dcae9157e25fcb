"""Small models of any family of transformers, with random weights and without special tokens."""

import torch
import transformers

IDS = torch.arange(1, 25).view(2, 12)  # two rows of tokens [B, S]

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def small_config(family, **options):
    """The configuration of a family ("Llama"), with these options, too."""
    return getattr(transformers, f"{family}Config")(**SIZES | options)


def small_model(family, **options):
    """A causal LM of a family, in eval mode."""
    config = small_config(family, **options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def as_if_trained(model, *, mean=0.0):
    """Let norms and biases be no longer the ones and zeros of a new model. Returns `model`.

    As long as they are, a technique that forgets a bias or the weight of a norm changes nothing.
    One that forgets to centre changes little as long as the means are near 0: for that is `mean`.
    """
    for parameter in model.parameters():
        parameter.add_(mean + 0.05 * torch.randn_like(parameter))
    return model


def train_a_little(model, *, std=0.05):
    """Give B of each adapter values of its own, as training does: it begins at zero."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    return model
