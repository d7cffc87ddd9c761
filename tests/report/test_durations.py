"""How long a job may take, as Slurm says it."""

import time

from autoaccum._report.durations import left_by_slurm

HOUR = 3600


def test_slurm_says_when_the_job_ends():
    left = left_by_slurm({"SLURM_JOB_END_TIME": str(int(time.time()) + HOUR)})

    assert HOUR - 60 < left <= HOUR
    assert left_by_slurm({}) is None
    assert left_by_slurm({"SLURM_JOB_END_TIME": "unknown"}) is None
    assert left_by_slurm({"SLURM_JOB_END_TIME": "17"}) == 0
