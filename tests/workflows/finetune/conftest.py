"""A base and pairs, as files that a process of its own can read."""

import json

import pytest

from recipes_lib.core.measure.machine import seed_everything
from recipes_lib.core.model import load_tokenizer, model_of_shape


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """A random model with the real tokenizer, as a folder: a process of its own can load it."""
    folder = tmp_path_factory.mktemp("model")
    seed_everything(0)
    model = model_of_shape("smollm2-135m", layers=1, device="cpu")
    small = model.config
    small.hidden_size = 36
    small.intermediate_size = 64
    small.head_dim = 4
    type(model)(small).save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    lines = [
        {"prompt": f"What is {i} plus {i}?", "completion": f"It is {2 * i}, of course."}
        for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path
