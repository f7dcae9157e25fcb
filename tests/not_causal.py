"""Models that are no decoder-only causal LM, each as small as it can be, built once."""

import functools

import torch
import transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def llama_config():
    return transformers.LlamaConfig(num_key_value_heads=2, pad_token_id=0, **SIZES)


def bert_config():
    return transformers.BertConfig(max_position_embeddings=32, **SIZES)


def encoder_decoder():
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
    )
    return transformers.T5ForConditionalGeneration(config)


def encoder():
    return transformers.BertModel(bert_config())


def encoder_with_a_head():
    """It has an output layer over the vocabulary, and still reads in both directions."""
    return transformers.BertLMHeadModel(bert_config())


def classifier():
    return transformers.LlamaForSequenceClassification(llama_config())


def bare_trunk():
    return transformers.LlamaModel(llama_config())


def linear_layer():
    return torch.nn.Linear(8, 8)


BUILDERS = [
    encoder_decoder,
    encoder,
    encoder_with_a_head,
    classifier,
    bare_trunk,
    linear_layer,
]
NAMES = [builder.__name__ for builder in BUILDERS]


@functools.cache
def not_causal(name):
    """The model of this name. It is shared: a test that changes it has found a mistake."""
    torch.manual_seed(0)
    [builder] = [each for each in BUILDERS if each.__name__ == name]
    return builder()
