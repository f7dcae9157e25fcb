"""A plain training step on one batch of random tokens, for tests that measure a step."""

import torch


def training_step(model, *, rows):
    """A function that does forward, backward and AdamW, and leaves no gradient.

    Its first call makes the states of AdamW, so it is not like those that follow.
    """
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(1, 128, (rows, 64))  # [B, S]

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
