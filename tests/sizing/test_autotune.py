"""The tempo: settles near the fastest size, in few windows, at little cost. Simulated device, simulated clock."""

import copy
import math
import pickle
import random
import statistics

import pytest

from autoaccum._sizing.autotune import MOST_WINDOWS, Autotune

SMOOTH = ("fixed cost", "saturating", "out of cache", "ever dearer")
JUMPS = ("one jump", "two jumps")
TARGETS = (32, 100, 128, 256, 512, 1000, 1024, 2048)


def micro_step(chance, kind):
    """Return a function: seconds of a micro-step over its size, a sample's least being 1."""
    fixed = 10 ** chance.uniform(-2, 2)
    at, second = (10 ** chance.uniform(0.3, 3) for _ in range(2))
    dearer, more = chance.uniform(0.05, 1.5), chance.uniform(0.05, 0.5)
    power = chance.uniform(1, 4)
    return {
        "fixed cost": lambda size: fixed + size,
        "saturating": lambda size: fixed + (size**4 + at**4) ** 0.25,
        "out of cache": lambda size: fixed + size * (1 + dearer * (size / at) ** power / (1 + (size / at) ** power)),
        "ever dearer": lambda size: fixed + size * (1 + dearer * (size / at) ** 0.3),
        "one jump": lambda size: fixed + size * (1 + dearer * (size > at)),
        "two jumps": lambda size: fixed + size * (1 + dearer * (size > at) + more * (size > second)),
    }[kind]


def quiet(chance):
    return 1.0


def steady(chance):
    return 1 + abs(chance.gauss(0, 0.01))


def shared(chance):
    """Return how much longer on a machine that others use: 3 %, and every tenth window 30 % on average."""
    return 1 + abs(chance.gauss(0, 0.03)) + (chance.expovariate(1 / 0.3) if chance.random() < 0.1 else 0)


def crowded(chance):
    return 1 + abs(chance.gauss(0, 0.06)) + (chance.expovariate(1 / 0.5) if chance.random() < 0.2 else 0)


class Run:
    """One search on one device: what it lost, and what it took."""

    def __init__(self, seed, kind, noise):
        chance = random.Random(f"{seed} {kind}")  # noqa: S311 - no secret
        self.target = chance.choice(TARGETS)
        self.largest = max(1, min(self.target, int(self.target * 10 ** chance.uniform(-1.3, 0.2))))
        cost = micro_step(chance, kind)
        update_s = chance.choice([0, 0, 0.1]) * self.target
        fewest = -(-self.target // self.largest)
        seconds = {}  # by number of micro-steps: an exhaustive sweep
        for steps in range(fewest, self.target + 1):
            small, larger_ones = divmod(self.target, steps)
            seconds[steps] = (steps - larger_ones) * cost(small) + larger_ones * cost(small + 1) + update_s
        tempo = Autotune(self.target, self.largest)
        self.used = []
        while not tempo.is_settled:
            self.used.append(tempo.size)
            taken = seconds[-(-self.target // tempo.size)] * noise(chance)
            first = 1 + chance.expovariate(2) if self.used.count(tempo.size) == 1 else 1.0  # compiles, allocates
            tempo.note(taken * first)
        best = min(seconds.values())
        self.loss = 1 - best / seconds[-(-self.target // tempo.size)]
        # In windows with the largest size: what it took longer than to stay with that, gains on the way not deducted.
        own = [seconds[-(-self.target // size)] / seconds[fewest] - 1 for size in self.used]
        self.extra_windows = sum(max(0, more) for more in own)


def runs(kinds, noise, count):
    return [Run(seed, kind, noise) for kind in kinds for seed in range(count)]


def drive(tempo, seconds):
    used = []
    while not tempo.is_settled:
        used.append(tempo.size)
        tempo.note(seconds(tempo.size))
    return used


def test_window_that_can_be_cut_in_one_way_only_is_settled_at_once():
    for target, largest in ((1, 1), (1, 9), (100, 1)):
        tempo = Autotune(target, largest)

        assert (tempo.size, tempo.is_settled) == (1, True)


def test_begins_with_the_largest_size_that_cuts_evenly():
    assert Autotune(100, 37).size == 34
    assert Autotune(100, 400).size == 100


def test_every_size_is_the_largest_of_an_even_cut_and_fits():
    for run in runs(SMOOTH + JUMPS, shared, 30):
        even = {-(-run.target // steps) for steps in range(1, run.target + 1)}
        assert set(run.used) <= even
        assert max(run.used, default=1) <= run.largest


def test_quiet_clock_and_smooth_cost_lose_at_most_three_percent_always():
    assert max(run.loss for run in runs(SMOOTH, quiet, 150)) <= 0.03


def test_quiet_clock_and_cost_that_jumps_lose_at_most_three_percent_nearly_always():
    losses = [run.loss for run in runs(JUMPS, quiet, 300)]

    assert sum(loss > 0.03 for loss in losses) <= 0.03 * len(losses)


@pytest.mark.parametrize(
    ("noise", "share", "mean"), [(steady, 0.005, 0.01), (shared, 0.03, 0.01), (crowded, 0.08, 0.015)]
)
def test_noisy_clock_and_smooth_cost_lose_little(noise, share, mean):
    losses = [run.loss for run in runs(SMOOTH, noise, 150)]

    assert sum(loss > 0.03 for loss in losses) <= share * len(losses)
    assert statistics.mean(losses) <= mean


@pytest.mark.parametrize("noise", [quiet, steady, shared, crowded])
def test_search_ends_in_few_windows(noise):
    lengths = [len(run.used) for run in runs(SMOOTH + JUMPS, noise, 60)]

    assert max(lengths) <= MOST_WINDOWS
    assert statistics.mean(lengths) < 0.8 * MOST_WINDOWS


@pytest.mark.parametrize("noise", [quiet, shared])
def test_search_costs_a_few_windows_more_than_staying_with_the_largest(noise):
    extra = sorted(run.extra_windows for run in runs(SMOOTH + JUMPS, noise, 100))

    assert statistics.mean(extra) < 2.5
    assert extra[int(0.95 * len(extra))] < 6


def test_clear_case_is_settled_after_three_sizes():
    tempo = Autotune(1024, 512)

    used = drive(tempo, lambda size: 1024 / size * (100 + size))

    assert tempo.size == 512
    assert len(set(used)) == 3
    assert len(used) == 8


def test_smaller_one_is_chosen_where_both_are_as_fast():
    tempo = Autotune(256, 256)

    drive(tempo, lambda size: 1.0 if size >= 64 else 64 / size)

    assert tempo.size <= 70


def test_first_window_of_a_size_does_not_decide():
    def times(first_takes):
        seen = set()

        def seconds(size):
            first = size not in seen
            seen.add(size)
            return (1 + 20 / size + size / 300) * (first_takes / size if first else 1)  # smaller ones compile longer

        return seconds

    slow, even = Autotune(512, 512), Autotune(512, 512)

    assert drive(slow, times(40_000)) == drive(even, lambda size: 1 + 20 / size + size / 300)
    assert slow.size == even.size < 200


def test_windows_with_more_work_are_no_slower():
    tempo, work = Autotune(512, 256), 1.0
    while not tempo.is_settled:
        work = work % 3 + 1
        tempo.note((50 + tempo.size) / tempo.size * work, work=work)

    alike = Autotune(512, 256)
    drive(alike, lambda size: (50 + size) / size)
    assert tempo.size == alike.size
    assert dict(tempo.seconds) == pytest.approx(dict(alike.seconds))


def test_settled_search_hears_no_more():
    tempo = Autotune(64, 64)
    drive(tempo, lambda size: 1 + 10 / size)
    before = dict(tempo.seconds)

    tempo.note(0.001)

    assert dict(tempo.seconds) == before


def test_search_with_what_was_known_runs_no_window_again():
    first = Autotune(512, 256)
    drive(first, lambda size: 1 + 10 / size + size / 500)

    again = Autotune(512, 256, known=first.seconds)

    assert (again.size, again.is_settled) == (first.size, True)


def test_known_sizes_that_do_not_fit_any_more_are_forgotten():
    tempo = Autotune(512, 64, known={256: 0.1, 128: 0.2, 64: 0.3})

    drive(tempo, lambda size: 0.3 * 64 / size)

    assert tempo.size == 64
    assert set(tempo.seconds) <= set(range(1, 65))


def test_search_can_be_copied_and_saved_halfway():
    tempo = Autotune(512, 256)
    for _ in range(7):
        tempo.note(1 + 10 / tempo.size)
    others = [copy.deepcopy(tempo), pickle.loads(pickle.dumps(tempo))]  # noqa: S301 - made here

    used = drive(tempo, lambda size: 1 + 10 / size)

    assert all(drive(other, lambda size: 1 + 10 / size) == used for other in others)


@pytest.mark.parametrize("taken", [0.0, 1.0, 1e-300, 1e300])
def test_clock_that_always_says_the_same_ends_the_search(taken):
    tempo = Autotune(4096, 4096)

    assert len(drive(tempo, lambda _: taken)) <= MOST_WINDOWS
    assert math.log2(tempo.size) <= 4  # all as fast: the least memory, nearly
