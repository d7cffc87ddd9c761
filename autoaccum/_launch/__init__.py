"""Starts trainings: as commands that are restarted (`run.py`), as jobs of a Slurm cluster (`slurm.py`), from scripts.

A command goes in and its exit code comes out, after as many starts with smaller micro-batches as necessary. A script's
path goes in and its call of `fit` comes out, for `autoaccum report` (`script.py`). May import `_training`, `_report`
and everything below them; only `_cli` imports it. `run.py` and `slurm.py` do not import torch.
"""
