"""Counts, cuts, joins and moves batches, and records the position in a loader.

Takes a loader's batches and returns windows of the target batch, micro-batches on the device, and positions that a
checkpoint can keep. May import `_memory`, `_system` and the modules in the package's root.
"""
