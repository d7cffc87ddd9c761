"""Counts, cuts, joins and moves batches, and records the position in a loader.

From a loader's batches, it makes windows of the target batch, micro-batches on the device, and positions for
checkpoints. May import `_memory`, `_system` and the modules in the package's root.
"""
