"""Chooses how large micro-batches are.

From the target batch, trials, memory readings and window times, it computes plans and the next size to use. It caches
plans in files for later runs, and tells callbacks what has changed. Calls no model. May import
`_loss`, `_data`, `_memory`, `_system` and the modules in the package's root.
"""
