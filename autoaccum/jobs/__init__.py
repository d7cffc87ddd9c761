"""Former names, for what was written before they moved: recipes, and Slurm jobs that wait in a queue.

New code imports `Job` from `autoaccum`.
"""

from autoaccum._launch import Job, load_recipe

__all__ = ["Job", "load_recipe"]
