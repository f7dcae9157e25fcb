"""Measure techniques beside the plain step, and beside the libraries that do the same.

run           one technique and the plain step on one batch: `python -m recipes_lib bench <name>`
techniques    one entry per technique: its shortest use in a training step
kernels       losses and norms in all ways that are here: seconds, bytes, error
small_models  small models trained side by side: norm, gate, heads of keys, tied tables
"""
