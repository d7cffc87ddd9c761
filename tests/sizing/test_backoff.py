"""The pace: smaller after a failure, larger again when it is over, and no see-saw. Pure."""

import random

import pytest

from autoaccum._sizing.backoff import FIRST_WAIT_WINDOWS, Backoff


def windows_until_larger(pace, most=10_000):
    for count in range(1, most + 1):
        larger = pace.succeed()
        if larger is not None:
            return count, larger
    return None


def test_each_failure_of_a_size_doubles_its_wait():
    pace = Backoff(100, 50)
    waits = []
    for _ in range(4):
        pace.fail(50)
        count, larger = windows_until_larger(pace)
        waits.append(count)
        pace.grow(larger)

    assert waits == [FIRST_WAIT_WINDOWS * factor for factor in (1, 2, 4, 8)]


def test_size_that_has_held_is_forgiven():
    pace = Backoff(100, 50)
    for _ in range(3):
        pace.fail(50)
        pace.grow(windows_until_larger(pace)[1])
    for _ in range(4 * FIRST_WAIT_WINDOWS):
        pace.succeed()

    pace.fail(50)

    assert windows_until_larger(pace) == (FIRST_WAIT_WINDOWS, 50)


def test_growth_without_memory_waits_for_another_stretch():
    pace = Backoff(100, 50)
    pace.fail(50)
    windows_until_larger(pace)

    pace.stay()

    assert pace.size == 34
    assert windows_until_larger(pace) == (FIRST_WAIT_WINDOWS, 50)


def simulate(free_at, *, windows=10_000, target=256, largest=128):
    """Run windows in which a micro-batch of n fits where n <= free_at(window); return failures and sizes used."""
    pace = Backoff(target, largest)
    failures, used = 0, []
    for window in range(windows):
        failed = False
        while pace.size > free_at(window):
            failures += 1
            failed = True
            assert pace.fail(pace.size) is not None
        used.append(pace.size)
        if not failed and (larger := pace.succeed()) is not None:
            pace.grow(larger)  # whether there is room is not known: it is tried
    return failures, used


def test_size_that_never_fits_fails_a_few_times_in_ten_thousand_windows():
    failures, used = simulate(lambda _: 90)

    assert failures <= 25
    assert sum(size == 86 for size in used) > 0.99 * len(used)  # 256 in 3 is 86, 85, 85


@pytest.mark.parametrize("seed", range(5))
def test_free_memory_that_changes_at_random_makes_no_see_saw(seed):
    chance = random.Random(seed)  # noqa: S311 - no secret
    levels, level = [], 128
    for _ in range(10_000):
        if chance.random() < 0.004:  # a neighbour comes or goes every 250 windows
            level = chance.choice([20, 40, 60, 90, 128])
        levels.append(level)

    failures, used = simulate(levels.__getitem__)

    best = [min(level, 128) for level in levels]
    assert failures < 0.02 * len(used)
    assert sum(used) > 0.6 * sum(best)
