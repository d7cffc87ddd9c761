"""The simulation of many ranks: small cases by hand, and what has to be larger where more is asked."""

import importlib.util
import sys
from dataclasses import replace

import numpy as np
import pytest

from folders import ROOT

PATH = ROOT / "benchmarks" / "simulate_ranks.py"


@pytest.fixture(scope="module")
def simulation():
    spec = importlib.util.spec_from_file_location("simulate_ranks", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate_ranks"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["simulate_ranks"]


def test_collectives_of_four_ranks_take_what_they_take_by_hand(simulation):
    # 1 s a message and 100 bytes a second: a ring of 4 passes 3 times on, a tree has 2 rounds of 1 and 2 messages.
    assert simulation.all_gather_s(4, 200, 1.0, 100.0) == 3 * (1.0 + 2.0)
    assert simulation.all_gather_s(4, 200, 1.0, 100.0, tree=True) == (1.0 + 2.0) + (1.0 + 4.0)
    assert simulation.all_reduce_s(4, 200, 1.0, 100.0) == 2 * 3 * (1.0 + 0.5)
    assert simulation.all_reduce_s(4, 200, 1.0, 100.0, tree=True) == 2 * 2 * (1.0 + 2.0)


def test_ranks_without_any_difference_lose_only_what_they_say(simulation):
    world = simulation.World(lasting=0.0, passing=0.0, small_share=0.0, micro_step_ms=0.0, samples=32, sample_ms=10.0)

    found = simulation.simulate(8, world, by_speed=False)

    said = simulation.agreement_s(8, world) + simulation.reduction_s(8, world)
    assert found.work_s == pytest.approx(0.32)
    assert found.waiting_s == pytest.approx(0.0, abs=1e-12)
    assert found.efficiency == pytest.approx(0.32 / (0.32 + said))


def test_rank_with_less_memory_works_longer_by_its_micro_steps(simulation):
    took = simulation.work_s(np.array([32, 32]), np.array([8, 5]), np.array([0.01, 0.01]), 0.1)

    assert took == pytest.approx([0.32 + 4 * 0.1, 0.32 + 7 * 0.1])


def test_reduction_is_cut_into_buckets_of_which_each_waits(simulation):
    world = simulation.World(gradient_mb=60.0, bucket_mb=25.0, latency_us=1000.0, bandwidth_gb_s=1.0)

    # 60 MB are two buckets of 25 MB and a rest; 2 (P - 1) messages each, then 2 (P - 1) / P of all bytes.
    assert simulation.reduction_s(3, world) == pytest.approx(3 * 4 * 1e-3 + 4 / 3 * 0.06)


@pytest.mark.parametrize("by_speed", [False, True])
def test_more_ranks_are_never_more_efficient(simulation, by_speed):
    world = simulation.World(windows=50)

    found = [simulation.simulate(ranks, world, by_speed=by_speed).efficiency for ranks in (2, 8, 64, 1000)]

    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("more", [{"lasting": 0.3}, {"passing": 0.2}, {"micro_step_ms": 20.0}, {"latency_us": 500.0}])
def test_whatever_is_worse_makes_updates_slower(simulation, more):
    world = simulation.World(windows=50)

    before, after = (simulation.simulate(64, one, by_speed=False) for one in (world, replace(world, **more)))

    assert after.efficiency < before.efficiency


def test_shares_by_speed_help_against_lasting_differences_and_not_against_passing_ones(simulation):
    unequal = simulation.World(lasting=0.3, passing=0.0, windows=5)
    noisy = simulation.World(lasting=0.0, passing=0.3, small_share=0.0, windows=50)

    lasting, passing = (
        [simulation.simulate(64, world, by_speed=by_speed).efficiency for by_speed in (False, True)]
        for world in (unequal, noisy)
    )

    assert lasting[1] > 1.2 * lasting[0]
    assert passing[1] == pytest.approx(passing[0], rel=0.01)


def test_exchange_by_sums_costs_a_thousand_ranks_less(simulation):
    world = simulation.World()

    assert simulation.agreement_by_sums_s(1000, world) < simulation.agreement_s(1000, world, tree=True)
    assert simulation.agreement_s(1000, world, tree=True) < simulation.agreement_s(1000, world) / 10
