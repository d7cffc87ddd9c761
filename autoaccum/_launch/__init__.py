"""Starts trainings: as commands that are restarted (`run.py`), as jobs of a Slurm cluster (`slurm.py`), from recipes.

A command goes in and its exit code comes out, after as many starts with smaller micro-batches as necessary. A recipe's
path goes in and a `Job` comes out, for `autoaccum report` (`recipe.py`, `job.py`). May import `_training`, `_report`
and everything below them; only `_cli` imports it. `run.py` and `slurm.py` do not import torch.
"""
