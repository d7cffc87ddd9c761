import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum._estimate.allocation_trace import Category, Storage, Timeline
from autoaccum._estimate.cuda_allocator import MIB, CachingAllocator, replay_step


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # What is left of a large segment is split off only where it is more than 1 MiB.
        (11 * MIB, 12 * MIB, 12 * MIB),
    ],
)
def test_sizes_are_rounded_and_come_from_segments_of_their_kind(asked, allocated, reserved):
    allocator = CachingAllocator()

    allocator.allocate(asked)

    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_best_fit_takes_the_smallest_block_that_does():
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    allocator.free(large)
    allocator.free(small)

    block = allocator.allocate(19 * MIB + 512)

    assert block.size == 20 * MIB


def test_free_neighbours_join():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(40 * MIB))
    parts = [allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)]
    for part in parts:
        allocator.free(part)

    allocator.allocate(40 * MIB)

    assert allocator.reserved_bytes == 40 * MIB


def test_cache_is_given_back_before_memory_runs_out():
    allocator = CachingAllocator(50 * MIB)
    allocator.free(allocator.allocate(40 * MIB))

    allocator.allocate(50 * MIB)

    assert allocator.reserved_bytes == 50 * MIB


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64 * MIB)), max_size=60), st.booleans())
def test_books_balance_whatever_comes_and_goes(steps, expandable):
    allocator = CachingAllocator(expandable=expandable)
    held = []
    for takes, size in steps:
        if takes or not held:
            held.append(allocator.allocate(size))
        else:
            allocator.free(held.pop(size % len(held)))

        assert allocator.allocated_bytes == sum(block.size for block in held)
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    for block in held:
        allocator.free(block)
    allocator.release_cached()

    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


def test_timeline_is_served_within_what_it_needs_and_not_within_less():
    storages = [Storage(30 * MIB, Category.PARAMETERS), Storage(40 * MIB, Category.MADE)]
    timeline = Timeline(1, storages, [0, 1, ~1], [(0, "before"), (1, "forward")])

    assert replay_step(timeline).peak_reserved_bytes == 70 * MIB
    assert replay_step(timeline, 70 * MIB) is not None
    assert replay_step(timeline, 69 * MIB) is None


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("setting", "reserved"),
    [
        ("max_split_size_mb:512, expandable_segments: True", 100 * MIB),  # pools that grow by 20 MiB
        ("expandable_segments:False", (30 + 40 + 66) * MIB),  # no segment is large enough for the last
    ],
)
def test_expandable_segments_are_replayed_where_the_environment_sets_them(monkeypatch, variable, setting, reserved):
    storages = [Storage(size * MIB, Category.MADE) for size in (30, 40, 65)]
    timeline = Timeline(1, storages, [0, 1, ~1, 2, ~2], [(0, "before"), (1, "forward")])

    monkeypatch.setenv(variable, setting)

    assert replay_step(timeline).peak_reserved_bytes == reserved
