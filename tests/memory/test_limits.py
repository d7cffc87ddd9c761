"""A memory limit as people write it."""

import pytest

from autoaccum._memory.limits import format_bytes, parse_limit
from autoaccum._memory.simulated import Simulated

TOTAL = 1000 * 2**20


@pytest.fixture
def backend():
    return Simulated(TOTAL)


@pytest.mark.parametrize(
    ("limit", "n_bytes"),
    [
        (629145600, 629145600),
        ("12GiB", 12 * 2**30),
        ("600 MiB", 600 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("800M", 800 * 2**20),
        ("2k", 2048),
        ("3 TB", 3 * 10**12),
        (".5GiB", 2**29),
        (0.5, TOTAL // 2),
        ("0.5", TOTAL // 2),
        ("50%", TOTAL // 2),
        ("12.5 %", TOTAL // 8),
    ],
)
def test_limit_is_read_as_people_write_it(backend, limit, n_bytes):
    assert parse_limit(limit, backend) == n_bytes


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (1023, "1023 B"),
        (2**20 - 1, "1.0 MiB"),
        (int(9.1 * 2**30), "9.1 GiB"),
        (-600 * 2**20, "-600.0 MiB"),
        (5 * 2**60, "5120.0 PiB"),
    ],
)
def test_bytes_are_shown_in_the_unit_that_reads_best(n_bytes, text):
    assert format_bytes(n_bytes) == text
