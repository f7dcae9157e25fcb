"""A model for a device: its links put together, and libraries that do the same.

background        an export in another process, its noise in a log
classify          classifiers of images: logits, accuracy, a short training, multiply-adds
pruning_library   as many channels taken by torch-pruning, for accuracy beside ours
"""
