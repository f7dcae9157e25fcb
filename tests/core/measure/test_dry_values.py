"""Integers keep their values in a dry run, and what hangs on others says so."""

from functools import partial

import pytest
import torch

from recipes_lib.core.data.tokens_and_labels import IGNORED
from recipes_lib.core.measure import dry_run
from recipes_lib.core.measure.dry_values import values_of
from recipes_lib.core.predict import predict
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from tests.core.predict.recipes import Recipe, batch_of, build_of, plain_step


def test_what_is_computed_of_integers_is_known():
    """The mistake: a mask without values, where a recipe asks whether rows are packed."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with dry_run():
        begins = (positions == 0).nonzero()
        documents = (positions == 0).sum().item()
        mask = torch.arange(6)[:, None] >= torch.arange(6)
        assert begins.shape == (2, 2) and documents == 2
        assert torch.equal(values_of(mask), torch.ones(6, 6).tril().bool())


def test_a_tensor_that_is_written_to_has_the_new_values():
    """The mistake: the values before the change, or those of what they were written over with."""
    given = torch.tensor([1, 2, 3])
    with dry_run():
        labels = given.clone()
        labels[0] = -100
        assert values_of(labels).tolist() == [-100, 2, 3]
        labels.copy_(torch.zeros(3).long() + torch.rand(3).argsort())
        assert values_of(labels) is None, "nobody knows them"
    assert given.tolist() == [1, 2, 3]


def test_floats_are_not_known():
    """The mistake: a loss that looks like a number, and stops a run early."""
    with dry_run():
        assert torch.rand(3).sum().item() == 1.0


def test_a_decision_by_a_value_says_where():
    """The mistake: a branch that a real step does not take."""

    def deciding(batch):
        def step(model, optimizer):
            loss = model(**batch).loss
            if loss > 3:
                loss.backward()

        return step

    with pytest.raises(ValueError, match=r"test_dry_values\.py:\d+ decides by the values"):
        predict(build_of("llama", Recipe(step=deciding)))


def test_tokens_that_are_not_trained_on_have_no_logits():
    """The mistake: a loss in chunks counts all tokens, or none."""
    one_chunk = partial(apply_chunked_cross_entropy, chunk_size=128)
    peaks = []
    for trained in (64, 32):
        batch = batch_of()
        batch["labels"][:, trained:] = IGNORED

        def step(ignored, batch=batch):
            return plain_step(batch)

        build = build_of("llama", Recipe((one_chunk,), step=step), vocab_size=8192)
        peaks.append(predict(build).peak)
    assert peaks[1] < peaks[0]


def test_the_batch_does_not_count():
    """The mistake: bytes that were there before, and that a measurement leaves out."""
    batch = torch.zeros(1000, dtype=torch.long)

    def build():
        model = torch.nn.Linear(4, 4, bias=False)

        def step(model, optimizer):
            model(torch.ones(2, 4) * batch[:1]).sum().backward()

        return model, None, step

    assert predict(build).peak < 1000
