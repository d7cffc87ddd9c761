"""Former name of the task, which jobs that wait in a Slurm queue have pickled."""

from autoaccum._launch.slurm.task import Task

__all__ = ["Task"]
