import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.fingerprint import fingerprint


def named(**tensors):
    return list(tensors.items())


def test_every_part_of_a_tensor_counts():
    weight = torch.randn(1000, 8)
    known = {fingerprint(named(w=weight))}
    # A model that has learned new words differs in the last rows of its embedding only.
    later_rows = weight.clone()
    later_rows[500:] += 1
    known.add(fingerprint(named(w=later_rows)))
    known.add(fingerprint(named(w=weight.view(8, 1000))))
    known.add(fingerprint(named(v=weight)))
    known.add(fingerprint(named(w=weight.half())))
    assert len(known) == 5


def test_one_base_in_two_dtypes_is_one_if_both_are_rounded():
    exact = model_of_shape("tiny-llama", device="cpu")
    names = {fingerprint(exact.named_parameters(), rounded_to=torch.bfloat16)}
    own = fingerprint(exact.named_parameters())
    rounded = exact.to(torch.bfloat16)
    names.add(fingerprint(rounded.named_parameters(), rounded_to=torch.bfloat16))
    assert len(names) == 1
    assert fingerprint(rounded.named_parameters()) != own


def test_of_whole_numbers_only_the_shape_counts():
    bits = torch.arange(64, dtype=torch.uint8)
    assert fingerprint(named(w=bits)) == fingerprint(named(w=bits + 1))
    assert fingerprint(named(w=bits)) != fingerprint(named(w=bits[:32]))
