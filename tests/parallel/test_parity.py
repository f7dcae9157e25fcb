"""The reference of the parity tests would see the mistakes that they look for."""

import torch

from tests.parallel import parity


def test_a_mean_of_means_is_another_loss():
    """The mistake of every other trainer: each rank divides by its own number of tokens."""
    model = parity.tiny_model()
    for step in range(4):
        batch = parity.global_batch(step)
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits
        sums, counts = [], []
        for rows in (slice(0, 4), slice(4, 8)):
            sums.append(parity.loss_sum(logits[rows], batch["labels"][rows]).item())
            counts.append(parity.counted_tokens(batch["labels"][rows]))
        assert min(counts) > 0 and counts[0] != counts[1]
        mean = sum(sums) / sum(counts)
        mean_of_means = (sums[0] / counts[0] + sums[1] / counts[1]) / 2
        assert abs(mean - mean_of_means) > 20 * parity.TOLERANCE
