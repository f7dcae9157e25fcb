"""What the techniques share. Nothing here imports a technique.

machine    what am I running on: device, memory, native bf16, versions, tier
model      SmolLM2 without a login, random models of public shapes
corpus     Python's own standard library as text and as instruction pairs
data       pairs and conversations as tokens and labels, from the corpus, a file or the hub
budget     predict the peak bytes of a training step from shapes
measure    seconds per step and peak bytes of tensors
ladder     the table of a notebook: predicted beside measured; `show` prints source
"""
