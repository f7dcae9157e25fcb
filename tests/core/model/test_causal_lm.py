import pytest
import torch
import transformers

from recipes_lib.core.model.causal_lm import (
    decoder_blocks,
    longest_text,
    require_causal_lm,
    trunk,
    without_adapters,
)
from recipes_lib.fine_tuning.lora import apply_lora
from tests.core.refusal import refusal
from tests.small_models import small_config, small_model


def test_others_are_refused_with_their_reason():
    """BERT has an output layer over the vocabulary, and still reads in both directions."""
    reasons = {
        transformers.T5ForConditionalGeneration(small_config("T5")): "an encoder and a decoder",
        transformers.BertLMHeadModel(small_config("Bert")): "reads in both directions",
        transformers.LlamaForSequenceClassification(small_config("Llama")): "has no output layer",
        torch.nn.Linear(8, 8): "is no Hugging Face model",
    }
    for model, reason in reasons.items():
        told = refusal(require_causal_lm, model)
        assert told.startswith(type(model).__name__) and reason in told
        assert "decoder-only model" in told


def test_adapters_around_it_pass(llama):
    """peft's wrapper is no PreTrainedModel: a check of the outermost class would refuse it."""
    adapted = apply_lora(llama, rank=1)
    require_causal_lm(adapted)
    assert without_adapters(adapted) is llama and without_adapters(llama) is llama
    assert decoder_blocks(adapted) is llama.model.layers and trunk(adapted) is llama.model


def test_lists_inside_of_blocks_are_no_blocks():
    """More heads, experts or parts of a block than blocks: the longest list is another one."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    normed = small_model("StableLm", qk_layernorm=True, **sizes)
    assert len(normed.model.layers[0].self_attn.q_layernorm.norms) == 4
    assert decoder_blocks(normed) is normed.model.layers
    assert trunk(normed) is normed.model
    with torch.device("meta"):
        # One block with lists of two attentions, two MLPs and two norms.
        paired = transformers.LongcatFlashForCausalLM(
            transformers.LongcatFlashConfig(vocab_size=64, hidden_size=32, num_layers=1)
        )
    assert decoder_blocks(paired) is paired.model.layers
    mixture = small_model("Llama", num_hidden_layers=1)
    experts = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(8))
    mixture.model.layers[0].mlp.experts = experts
    assert decoder_blocks(mixture) is mixture.model.layers


LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "rope_theta": 1e4}

# As their files say it: family, positions, angles, and what the model was trained for.
LENGTHS = {
    "Llama 3.1": ("Llama", 131_072, LLAMA_3 | {"factor": 8.0}, 131_072),
    "DeepSeek-V3": (
        "DeepseekV3",
        163_840,
        YARN | {"factor": 40.0, "original_max_position_embeddings": 4096},
        163_840,
    ),
    "Qwen3 with YaRN": (
        "Qwen3",
        40_960,
        YARN | {"factor": 4.0, "original_max_position_embeddings": 32_768},
        131_072,
    ),
    "dynamic": ("Llama", 4096, {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 8192),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_how_long_a_text_may_be(name):
    """The mistakes: a factor that the positions count already (Llama 3.1 would read a million), and
    one that they do not count (Qwen with YaRN would refuse texts that it can read)."""
    family, positions, rope, expected = LENGTHS[name]
    kind = getattr(transformers, f"{family}Config")
    config = kind(max_position_embeddings=positions, rope_parameters=dict(rope))
    assert longest_text(config) == expected
