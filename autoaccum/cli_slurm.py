"""Former name of what `autoaccum slurm` submits, which jobs that wait in a Slurm queue have pickled."""

from autoaccum._cli.slurm import TaskWithExitCodes

__all__ = ["TaskWithExitCodes"]
