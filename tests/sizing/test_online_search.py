"""What fits is learned in the first windows: few failures, nothing that was not tried, the largest cut in the end."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum._sizing.online_search import OnlineSearch


@dataclass
class Device:
    """A device and a model on it: bytes of gradients, optimizer state, and of a micro-batch of each size."""

    capacity: int
    per_sample: int = 10
    fixed: int = 0
    gradients: int = 0
    state: int = 0
    steps: int = 1  # memory comes in such pieces
    used: int = 0
    has_state: bool = False
    failures: list = field(default_factory=list)
    sizes: list = field(default_factory=list)

    def of(self, size):
        return -(-(self.fixed + self.per_sample * size) // self.steps) * self.steps

    @property
    def base(self):
        return self.state if self.has_state else 0

    def bears(self, steps, target):
        """Whether an even cut runs through, window after window."""
        first, second = -(-target // steps), -(-target // steps) if target % steps != 1 else target // steps
        later = self.gradients + self.of(second) if steps > 1 else 0
        return self.state + max(self.of(first), self.gradients, later) <= self.capacity

    def fewest(self, target):
        return next((steps for steps in range(1, target + 1) if self.bears(steps, target)), None)

    def window(self, learning, target):
        """Run one window as a runner does; return the sizes of which it was made."""
        done, held, sizes = 0, self.base, []
        while done < target:
            is_first = not done
            size = learning.next_size(target - done, self.capacity - held, is_first=is_first)
            assert 1 <= size <= target - done
            extra = max(self.of(size), self.gradients) if is_first else self.of(size)
            if held + extra > self.capacity:
                self.failures.append(size)
                if learning.fail(size) is None:
                    return None
                continue
            if is_first:
                held += self.gradients
            done += size
            sizes.append(size)
            learning.note(size, extra, is_first=is_first, is_whole=size == target, gradient_bytes=self.gradients)
        self.has_state = True
        self.sizes.append(sizes)
        learning.end_window(self.capacity - self.base)
        return sizes

    def learn(self, target, **options):
        learning = OnlineSearch(target, **options)
        while not learning.is_done:
            if self.window(learning, target) is None:
                return None
        return learning


def steps_of(learning, target):
    return -(-target // learning.largest)


def test_document_000_is_learned_in_two_windows_without_a_failure():
    device = Device(capacity=1000, per_sample=16, gradients=60, state=120)

    learning = device.learn(100)

    assert steps_of(learning, 100) == device.fewest(100) == 2
    assert device.failures == []
    assert len(device.sizes) == 2
    assert len(device.sizes[0]) <= 5
    assert device.sizes[1] == [50, 50]


def test_window_that_fits_as_a_whole_is_learned_in_two_windows():
    device = Device(capacity=10**6, gradients=60, state=120)

    learning = device.learn(64)

    assert learning.largest == 64
    assert device.failures == []
    assert device.sizes[-1] == [64]
    assert len(device.sizes) == 2


def test_size_that_is_known_is_confirmed_by_the_first_window():
    device = Device(capacity=1000, per_sample=16, gradients=60, state=120)

    learning = device.learn(100, begins_with=50)

    assert device.sizes == [[50, 50]]
    assert learning.largest == 50


def test_size_that_is_known_but_does_not_fit_any_more_is_learned_anew():
    device = Device(capacity=500, per_sample=16, gradients=60, state=120)

    learning = device.learn(100, begins_with=50)

    assert steps_of(learning, 100) == device.fewest(100)


def test_where_not_one_sample_fits_nothing_is_left_to_try():
    assert Device(capacity=9).learn(100) is None


@pytest.mark.parametrize("target", [1, 2, 3, 5, 7])
def test_small_windows_are_learned(target):
    learning = Device(capacity=1000).learn(target)

    assert learning.largest == target


@settings(max_examples=200, deadline=None)
@given(
    target=st.integers(1, 3000),
    fits=st.integers(1, 3000),
    per_sample=st.integers(1, 1000),
    fixed=st.floats(0, 3),
    gradients=st.floats(0, 5),
    state=st.floats(0, 5),
    clean=st.booleans(),
)
def test_on_a_line_the_fewest_steps_are_found_with_few_failures(
    target, fits, per_sample, fixed, gradients, state, clean
):
    of_samples = per_sample * fits
    device = Device(
        capacity=0,
        per_sample=per_sample,
        fixed=int(fixed * of_samples),
        gradients=int(gradients * of_samples),
        state=int(state * of_samples),
    )
    device.capacity = device.fixed + device.gradients + device.state + of_samples
    # A whole window stands beside no other's gradients, so it may fit where no even cut of it does; that is not sought.
    best = next(steps for steps in range(min(2, target), target + 1) if device.bears(steps, target))

    learning = device.learn(target, fails_cleanly=clean)

    assert device.bears(steps_of(learning, target), target)
    assert steps_of(learning, target) <= best * 1.04 + 1
    assert len(device.failures) <= (3 if fits > 4 else 5)  # two or three samples are tried twice
    assert len(device.sizes) <= 8
    assert sum(map(len, device.sizes)) <= (1.2 * best + 8) * len(device.sizes)


def test_whole_window_that_took_little_sets_right_what_small_sizes_had_shown():
    learning = OnlineSearch(100)
    for size, extra in ((2, 90), (3, 100), (10, 900)):  # of which most was a kernel's first time
        learning.note(size, extra, is_first=size == 2, is_whole=False, gradient_bytes=0)

    learning.note(100, 2000, is_first=True, is_whole=True, gradient_bytes=0)

    assert learning.line.at(100) <= 2000
    assert learning.line.bytes_per_sample < 25


def test_when_sizes_that_fitted_fail_because_memory_becomes_less_a_few_steps_lead_down():
    learning = OnlineSearch(100)
    learning.note(3, 300, is_first=True, is_whole=False, gradient_bytes=0)
    learning.note(34, 3400, is_first=False, is_whole=False, gradient_bytes=0)

    tried = [34]
    while (size := learning.fail(tried[-1])) is not None:
        tried.append(size)

    assert tried[-1] == 1
    assert len(tried) < 10, tried


def test_first_micro_batch_that_took_no_memory_to_be_seen_gives_no_line_without_a_slope():
    search = OnlineSearch(16)

    search.note(8, 0, is_first=True, is_whole=False, gradient_bytes=64)
    for size, taken in ((2, 4096), (3, 8192)):
        search.note(size, taken, is_first=False, is_whole=False, gradient_bytes=64)

    assert search.line.bytes_per_sample > 0
