"""Adapt a pretrained model: the techniques of notebook 05 in one run.

settings     what a run is, checked
data         pairs read, checked, and a part of them held out
base_model   whole on each device or in parts over them; loaded, and adapted
shards       a model in parts over ranks: loaded on the first, trained on all, saved from one
loop         train, step by step; keep checkpoints, and go on from one
evaluation   the held-out loss before and after, and the README.md of the result
command      from a file of pairs to a saved and proven adapter
axolotl      the same run for Axolotl
"""
