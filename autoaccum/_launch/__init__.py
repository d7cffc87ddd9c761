"""Starts trainings: from recipes, as commands that are restarted (`autoaccum run`), and as jobs of a Slurm cluster.

A recipe's path goes in and a `Job` comes out, which holds the arguments of one call of `fit` (`recipe.py`, `job.py`). A
command goes in and its exit code comes out, after as many starts with smaller cuts as lack of memory makes necessary
(`run.py`). Submission to Slurm is in `slurm/`. May import `_training`, `_report` and everything below them; only `_cli`
imports it.
"""

from autoaccum._launch.job import Job
from autoaccum._launch.recipe import load_recipe

__all__ = ["Job", "load_recipe"]
