"""The search, driven by made-up devices: plain numbers in, plain numbers out."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoaccum._records import Trial
from autoaccum._sizing.offline_search import Line, line_through, next_size

LIMIT = 1_000_000
MAX_SIZES = st.integers(1, 100_000)
# No search took more than 22 trials over 80,000 random devices; far more means that it crawls.
MOST_TRIALS = 30


def affine(fixed, per_sample):
    return lambda size: fixed + per_sample * size


def stepwise(fixed, per_sample, step):
    """As an allocator that rounds up, or a kernel that changes its algorithm."""
    return lambda size: fixed + per_sample * -(-size // step) * step


def noisy(fixed, per_sample, noise):
    """Up to 2 % off the line, up and down, the same at each call."""
    return lambda size: int((fixed + per_sample * size) * (1 + noise[size % len(noise)] / 1000))


def search(peak_of, max_size, *, limit=LIMIT, told_limit=LIMIT, counts=True):
    """Every trial until the search ends by itself."""
    trials = []
    while (size := next_size(trials, max_size, told_limit)) is not None:
        assert 1 <= size <= max_size
        assert size not in [trial.size for trial in trials], "a size was tried twice"
        assert len(trials) < 100, "the search does not end"
        peak = peak_of(size)
        fits = peak <= limit
        trials.append(Trial(size, fits, peak if fits and counts else None, 0.1))
    return trials


def answer(trials):
    return max((trial.size for trial in trials if trial.fits), default=None)


def truth(peak_of, max_size):
    """The largest size that fits of a device whose peaks never fall, by bisection."""
    low, high = 0, max_size + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak_of(middle) <= LIMIT else (low, middle)
    return low


def assert_near_enough(found, right):
    if right == 0:
        assert found is None
    else:
        assert found <= right
        assert found >= 0.97 * right


devices = st.one_of(
    st.builds(affine, st.integers(0, LIMIT), st.floats(0.1, LIMIT)),
    st.builds(stepwise, st.integers(0, LIMIT), st.floats(0.1, LIMIT), st.integers(2, 64)),
)


@given(peak_of=devices, max_size=MAX_SIZES)
def test_answer_is_within_three_percent_of_the_truth(peak_of, max_size):
    trials = search(peak_of, max_size)

    assert_near_enough(answer(trials), truth(peak_of, max_size))
    assert len(trials) <= MOST_TRIALS


@given(peak_of=devices, max_size=MAX_SIZES, told_limit=st.one_of(st.none(), st.integers(1, 3 * LIMIT)))
def test_limit_that_is_wrong_or_unknown_costs_trials_and_never_correctness(peak_of, max_size, told_limit):
    trials = search(peak_of, max_size, told_limit=told_limit)

    assert_near_enough(answer(trials), truth(peak_of, max_size))
    assert len(trials) <= MOST_TRIALS


@given(peak_of=devices, max_size=MAX_SIZES)
def test_device_that_does_not_count_is_searched_all_the_same(peak_of, max_size):
    trials = search(peak_of, max_size, counts=False)

    assert_near_enough(answer(trials), truth(peak_of, max_size))
    assert len(trials) <= MOST_TRIALS


@given(
    fixed=st.integers(0, LIMIT // 2),
    per_sample=st.floats(1, LIMIT // 4),
    noise=st.lists(st.integers(-20, 20), min_size=1, max_size=50),
    max_size=MAX_SIZES,
)
def test_noise_in_the_peaks_does_not_keep_the_search_from_ending(fixed, per_sample, noise, max_size):
    peak_of = noisy(fixed, per_sample, noise)

    trials = search(peak_of, max_size)

    assert answer(trials) is None or peak_of(answer(trials)) <= LIMIT
    assert len(trials) <= MOST_TRIALS


@given(fixed=st.integers(0, LIMIT // 2), right=st.integers(10, 5000), max_size=st.integers(1, 100_000))
def test_line_takes_at_most_eight_trials(fixed, right, max_size):
    assume(right < max_size)

    trials = search(affine(fixed, (LIMIT - fixed) / right), max_size)

    assert len(trials) <= 8


def test_answer_is_found_in_five_trials_of_which_one_fails_where_memory_is_a_line():
    trials = search(affine(100_000, 20_500), 100)

    assert [(t.size, t.fits) for t in trials] == [(2, True), (8, True), (30, True), (45, False), (43, True)]


def test_prediction_that_is_far_too_high_costs_trials_and_not_the_answer():
    trials = search(lambda size: 20_500 * size + (60_000 if size > 40 else 0), 100)

    assert [(t.size, t.fits) for t in trials] == [
        (2, True),
        (8, True),
        (33, True),
        (50, False),
        (48, False),
        (46, False),
        (39, True),
        (42, True),
        (44, True),
    ]


def test_memory_beyond_the_limit_that_was_told_is_found_in_growing_steps():
    trials = search(affine(0, 1), 20_000, told_limit=500)

    assert answer(trials) == 20_000
    assert len(trials) <= 16


def test_batch_that_fits_whole_takes_three_trials():
    assert [trial.size for trial in search(affine(0, 1), 100)] == [2, 8, 100]


@pytest.mark.parametrize(("fitting", "tried"), [(0, [2, 1]), (1, [2, 1])])
def test_less_than_two_samples_are_tried_as_one(fitting, tried):
    trials = search(affine(0, LIMIT / (fitting + 0.5)), 100)

    assert [trial.size for trial in trials] == tried
    assert answer(trials) == (fitting or None)


@pytest.mark.parametrize("max_size", [1, 2, 3, 8, 9])
def test_small_batch_is_answered_with_its_whole_length(max_size):
    trials = search(affine(0, 1), max_size)

    assert answer(trials) == max_size


def test_line_goes_through_the_largest_size_and_one_well_below_it():
    peaks = {2: 900, 8: 180, 31: 500, 32: 420}
    trials = [Trial(size, True, peak, 0.1) for size, peak in peaks.items()]
    trials.append(Trial(64, False, None, 0.1))

    line = line_through(trials)

    assert line == Line(fixed_bytes=100.0, bytes_per_sample=10.0)
    assert line.largest_within(1100) == 100
    assert line.largest_within(50) == 0


@pytest.mark.parametrize(
    "trials",
    [
        [],
        [Trial(2, True, 100, 0.1)],
        [Trial(2, True, None, 0.1), Trial(8, True, 100, 0.1)],
        [Trial(2, True, 100, 0.1), Trial(8, True, 100, 0.1)],
        [Trial(2, True, 100, 0.1), Trial(2, True, 200, 0.1)],
        [Trial(2, True, 200, 0.1), Trial(8, True, 100, 0.1)],
    ],
    ids=["nothing", "one point", "one known peak", "flat", "one size twice", "falling"],
)
def test_points_that_make_no_rising_line_make_none(trials):
    assert line_through(trials) is None
