import pytest

from autoaccum._estimate.allocation_trace import Category, Storage, Timeline, between


def made(size, *sizes):
    return Timeline(size, [Storage(size_bytes, Category.MADE, "op") for size_bytes in sizes])


def test_peak_is_the_moment_at_which_most_is_held():
    timeline = made(1, 100, 50, 70)
    timeline.events = [0, 1, ~0, 2, ~1, ~2]

    peak = timeline.peak()

    assert (peak.index, peak.live_bytes, peak.alive) == (1, 150, (0, 1))


def test_what_was_made_in_forward_and_outlived_it_was_kept_for_backward():
    timeline = made(1, 10, 20, 30)
    timeline.phases += [(0, "forward"), (3, "backward")]
    timeline.events = [0, 1, ~0, 2, ~1, ~2]

    assert timeline.kept_for_backward() == {1}
    assert timeline.phase_at(2) == "forward"
    assert timeline.phase_at(3) == "backward"


def test_two_sizes_tell_a_third_where_storages_are_fixed_or_proportional():
    low, high = made(2, 20, 7), made(10, 100, 7)
    low.events = high.events = [0, 1, ~0, ~1]

    told = between(low, high, 5)

    assert told is not None
    assert [storage.size_bytes for storage in told.storages] == [50, 7]


@pytest.mark.parametrize("grown", [180, 101], ids=["with the square", "with a fixed part"])
def test_two_sizes_do_not_tell_a_third_where_a_storage_grows_otherwise(grown):
    low, high = made(2, 20), made(10, grown)
    low.events = high.events = [0, ~0]

    assert between(low, high, 5) is None


def test_two_sizes_do_not_tell_a_third_where_they_go_different_ways():
    low, high = made(2, 20, 20), made(10, 100, 100)
    low.events, high.events = [0, 1, ~0, ~1], [0, ~0, 1, ~1]

    assert between(low, high, 5) is None


def test_what_is_held_all_the_time_is_in_every_peak():
    timeline = made(1, 100)
    timeline.phases.append((0, "forward"))
    timeline.events = [0, ~0]

    held = timeline.with_held(11)

    assert held.peak().live_bytes == 111
    assert held.phases == [(0, "before"), (1, "forward")]
