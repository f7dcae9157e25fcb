"""Small models of a few families, batches of unequal lengths, and comparisons for all tests."""

import gc
import os
import sys

import pytest
import torch

from recipes_lib.attention.sliding_window import banded as sliding_window_banded
from recipes_lib.core.measure.free_memory import release_memory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.ranks.rank_pool import RankPool


def pytest_configure(config):
    os.environ.setdefault("RECIPES_FAST", "1")
    torch.set_num_threads(1)  # for models this small, threads cost more than they bring
    if (
        config.option.markexpr != "gpu"
    ):  # the same tests give the same answer on a machine with a GPU
        os.environ["RECIPES_TIER"] = "cpu"


def pytest_collection_modifyitems(config, items):
    if config.option.markexpr != "gpu" or not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(
                    pytest.mark.skip(
                        reason="needs a GPU: run `pytest -m gpu` on a machine that has one"
                    )
                )


@pytest.fixture(autouse=True, scope="module")
def freeze_what_is_there():
    """`PeakMemory` walks through all objects, hundreds of times: spare it those of the imports."""
    begin_file()


def begin_file():
    """What is frozen is never collected: a failure of the file before must be gone by then."""
    forget_failure()
    gc.collect()
    gc.freeze()


def forget_failure():
    """The last failure's traceback holds a model, which would count in what is measured next."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)


@pytest.fixture(autouse=True)
def forget_the_last_failure():
    forget_failure()
    if torch.cuda.is_initialized():  # a tensor in a hole that is too large counts as the hole
        release_memory()


@pytest.fixture(autouse=True)
def forget_masks():
    """They stay for the next step, and would count likewise."""
    yield
    sliding_window_banded.block_bias.cache_clear()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def two_ranks():
    """Two processes for all tests: `two_ranks.run(function, **arguments)`; started when used."""
    with RankPool(ranks=2, device="cpu") as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks():
    """Four of them, for what two cannot show."""
    with RankPool(ranks=4, device="cpu") as pool:
        yield pool


@pytest.fixture
def llama():
    return model_of_shape("tiny-llama", device="cpu")


@pytest.fixture
def batch():
    return make_batch()


def make_batch(batch_size=4, seq_len=23, vocab=128):
    """Right-padded rows [B, S] of unequal lengths; no label on padding and on 3 prompt tokens."""
    ids = torch.randint(1, vocab, (batch_size, seq_len))
    lengths = torch.randint(seq_len // 3, seq_len + 1, (batch_size,))
    lengths[0] = seq_len
    mask = (torch.arange(seq_len) < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(got, expected, *, atol=1e-6, rtol=1e-5):
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            got[name], gradient, atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equal(got, expected):
    """To the last bit."""
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def distance(got, expected):
    """In the Euclidean norm, relative to what is expected."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_near(got, expected, tolerance):
    """Each tensor, in the Euclidean norm: a gradient of zeros is as far away as it can be."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] - value).float().norm() <= tolerance * value.float().norm(), name


def run(model, batch, **options):
    """Loss and gradients; the seed makes dropout repeatable."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**batch, **{"use_cache": False} | options).loss
    loss.backward()
    return {"loss": loss.detach()} | gradients(model)


def without_cap(model):
    """Gemma 2 caps its scores; everything else about it fits."""
    for part in (model.config, *model.modules()):
        if hasattr(part, "attn_logit_softcapping"):
            part.attn_logit_softcapping = None
    return model
