"""What to train, written down so that a command can start it: jobs and the recipes that make them."""

from autoaccum._launch.job import Job
from autoaccum._launch.recipe import load_recipe

__all__ = ["Job", "load_recipe"]
