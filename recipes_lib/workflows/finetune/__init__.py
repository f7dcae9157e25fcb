"""Adapt a pretrained model: the techniques of notebook 05 in one run.

settings       what a run is, checked
data           pairs read, checked, and a part of them held out
checks         what a run is refused before it computes anything
base_model     whole on each device or in parts over them; loaded, and adapted
shards         a model in parts over ranks: loaded on the first, trained on all, saved from one
loop           train, step by step
checkpoints    when one is kept, which file it is, and which run it belongs to
step_log       a printed line for each step, and its numbers for the tracker
held_out_loss  before and after, and the difference with its interval
result         the folder of the adapters, or of the whole model
model_card     the README.md of the result
command        all of it, from a file of pairs to a saved and proven adapter
axolotl        the same run for Axolotl
"""
