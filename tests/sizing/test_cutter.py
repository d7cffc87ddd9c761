"""Windows of samples of unlike width are cut by what micro-batches cost, where that is known."""

import autoaccum
from autoaccum._sizing.costs import Costs
from autoaccum._sizing.cutter import Cutter
from autoaccum._sizing.cutting import Cutting, SizingOptions
from autoaccum._sizing.events import Events

RUNS = [(2, (100,)), (6, (10,))]


def costs_of(fixed):
    """Costs of a second for each element, and of so many for each micro-batch."""
    sizes = [(1, 10), (8, 10), (2, 100), (4, 100), (1, 1000)]
    return Costs.of_state([[samples, width, float(fixed + samples * width)] for samples, width in sizes])


def cut(runs, costs, **options):
    memory = autoaccum.Simulated("1GiB")
    plan = autoaccum.plan(8, 8)
    cutting = Cutting.of_state(Cutting(plan, plan, costs=costs).state())  # as a run that goes on has it
    cutter = Cutter(memory, list, cutting, SizingOptions(**{"by_width": True} | options), Events(memory))
    cutter.frontier.note(8, (1000,))
    cutter.begin([runs], is_learning=False)
    return cutter.cut()


def test_samples_are_apart_where_padding_costs_more_than_another_micro_batch():
    assert cut(RUNS, costs_of(100)) == (2, 6)
    assert cut(RUNS, costs_of(1000)) == (8,)


def test_as_many_as_fit_go_together_where_nothing_was_measured_or_sizes_are_given():
    assert cut(RUNS, Costs()) == (8,)
    assert cut(RUNS, costs_of(100), by_width=False) == (8,)
    assert cut(RUNS, costs_of(100), is_uniform=True) == (8,)


def test_no_more_than_fit_go_together():
    assert max(cut([(4, (1000,)), (4, (999,))], costs_of(10**6), most=3)) == 3


def test_samples_in_another_order_are_cut_in_turn():
    assert cut(RUNS[::-1], costs_of(100)) == (8,)
