"""The clock compares three sizes, and takes the fastest."""

import pytest

from autoaccum._sizing.clock import Autotune


def drive(tempo, seconds):
    """Run windows that take `seconds(size)` until the search has settled; return their sizes."""
    used = []
    while not tempo.is_stable:
        used.append(tempo.size)
        tempo.note(seconds(tempo.size))
    return used


def test_largest_is_taken_where_each_micro_batch_has_a_cost_of_its_own():
    tempo = Autotune(1024, 512)

    used = drive(tempo, lambda size: 1024 / size * (100 + size))

    assert tempo.size == 512
    assert used == [512] * 4 + [256] * 4  # which is slower, so that 128 is not run


def test_first_window_and_a_disturbed_one_do_not_decide():
    tempo, windows = Autotune(512, 512), []

    def seconds(size):
        windows.append(size)
        number = windows.count(size)
        return (512 / size) * (9 if number == 1 else 1.5 if number == 3 else 1)

    drive(tempo, seconds)

    assert tempo.size == 512


def test_windows_with_more_work_are_no_slower():
    tempo, work = Autotune(512, 256), 1.0
    while not tempo.is_stable:
        work = work % 3 + 1
        tempo.note((50 + tempo.size) / tempo.size * work, work=work)

    assert tempo.size == 256


@pytest.mark.parametrize(("target", "largest", "sizes"), [(100, 40, {34, 20, 10}), (3, 3, {3, 1}), (7, 9, {7, 3, 1})])
def test_sizes_cut_evenly_and_fit(target, largest, sizes):
    assert set(drive(Autotune(target, largest), lambda _: 1.0)) <= sizes
