"""Smaller models made from larger ones.

distillation           train a student on the distribution of a teacher, chunk by chunk
student                a model with fewer blocks, made from a trained one
pruning                small weights become zero and stay zero
channel_pruning        channels of a network for images, taken out of its blocks
"""
