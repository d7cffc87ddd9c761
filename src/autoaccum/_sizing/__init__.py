"""Chooses how large micro-batches are.

Takes the target batch, trials, memory readings and times of windows, and returns plans and the next size to use; keeps
plans for later runs in a cache of files. Calls no model. May import `_loss`, `_data`, `_memory`, `_system` and the
modules in the package's root.
"""
