"""Cuts for scripts that cut by themselves: always exact, always smaller, and a poor choice is remarked upon."""

import pytest
from autoaccum._launch.cuts import Cut, cut_within, remark, smaller
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.errors import InvalidInputError


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 6000))
def test_every_cut_is_exact_and_within_what_is_allowed(share, world_size, most):
    cut = cut_within(share * world_size, world_size, most)

    assert cut.micro_batch * cut.accum_steps * cut.world_size == cut.target_batch == share * world_size
    assert cut.micro_batch <= most
    assert not [size for size in range(cut.micro_batch + 1, min(most, share) + 1) if share % size == 0]


@given(st.integers(1, 5000), st.integers(1, 8), st.integers(2, 5000))
def test_after_failures_cuts_get_smaller_until_one_sample_is_left(share, world_size, failed):
    cut = cut_within(share * world_size, world_size)
    sizes = [cut.micro_batch]
    while (cut := smaller(cut, min(failed, cut.micro_batch))) is not None:
        assert cut.micro_batch * cut.accum_steps * cut.world_size == cut.target_batch
        sizes.append(cut.micro_batch)

    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] == 1
    assert all(size < failed or size == share for size in sizes)


def test_sizes_go_down_step_by_step_and_not_by_halves():
    cut, sizes = cut_within(120, 1), []
    while cut is not None:
        sizes.append(cut.micro_batch)
        cut = smaller(cut, cut.micro_batch)

    assert sizes[:5] == [120, 60, 40, 30, 24]


def test_a_prime_has_only_one_sample_left_and_a_better_target_is_named():
    cut = smaller(cut_within(97, 1), 97)

    assert cut == Cut(97, 1, 97, 1)
    assert "--target-batch 96 has a better cut" in remark(cut, 49)


def test_a_good_choice_needs_no_remark():
    assert remark(cut_within(100, 1, 37), 37) is None


def test_ranks_that_cannot_share_equally_are_refused_with_the_targets_that_can():
    with pytest.raises(InvalidInputError, match=r"target_batch=100 .* world_size=3 .* 99 or 102"):
        cut_within(100, 3)


def test_a_target_below_the_ranks_is_refused():
    with pytest.raises(InvalidInputError, match="such as 8"):
        cut_within(5, 8)


def test_a_cut_of_single_samples_is_told_as_such():
    assert str(Cut(4, 1, 4, 1)) == "target batch 4: micro-batches of 1 sample, 4 per update"
