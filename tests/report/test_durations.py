"""How long a job may take, as people and Slurm say it."""

import time

import pytest

from autoaccum._report.durations import left_by_slurm, seconds_in
from autoaccum.errors import InvalidInputError

HOUR = 3600


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12h", 12 * HOUR),
        ("1.5 h", 1.5 * HOUR),
        ("1h 30min", 1.5 * HOUR),
        ("90m", 1.5 * HOUR),
        ("2d", 48 * HOUR),
        ("30s", 30),
        ("12:00:00", 12 * HOUR),
        ("1-12:00:00", 36 * HOUR),
        ("2-6", 54 * HOUR),
        ("90:30", 90 * 60 + 30),
    ],
)
def test_times_are_read_as_people_and_slurm_write_them(text, seconds):
    assert seconds_in(text, name="--time") == seconds


@pytest.mark.parametrize("text", ["", "12", "soon", "0h", "-3h", "12h later", "1:2:3:4"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(InvalidInputError, match=r"--time=.*'12h'"):
        seconds_in(text, name="--time")


def test_slurm_says_when_the_job_ends():
    left = left_by_slurm({"SLURM_JOB_END_TIME": str(int(time.time()) + HOUR)})

    assert HOUR - 60 < left <= HOUR
    assert left_by_slurm({}) is None
    assert left_by_slurm({"SLURM_JOB_END_TIME": "unknown"}) is None
    assert left_by_slurm({"SLURM_JOB_END_TIME": "17"}) == 0
