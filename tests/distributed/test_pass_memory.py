"""The memory of passes that all ranks make together: asked for before one begins, by what earlier ones took."""

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._distributed.pass_memory import PassMemory
from support.ranks.cached import Cached
from support.ranks.sharded import spread
from support.ranks.training import net


@pytest.fixture
def device():
    memory = autoaccum.Simulated(10_000)
    with memory.limited(None):
        yield memory


@pytest.fixture
def passes(device):
    return PassMemory(device, [nn.Linear(2, 2)])


def made(passes, elements, taken, *, has_gradients=True, is_least=False):
    """Make a pass that takes so many bytes, and gives them back."""
    passes.enter(elements, has_gradients=has_gradients, is_least=is_least)
    kept = torch.empty(taken, dtype=torch.uint8)
    del kept
    passes.leave(elements, had_gradients=has_gradients)


def asked(passes, device, elements, **of_pass):
    """Return the bytes that are asked for before a pass."""
    found = []
    ensure, device.ensure = device.ensure, found.append
    passes.enter(elements, **{"has_gradients": True, "is_least": False} | of_pass)
    device.ensure = ensure
    return found[0]


def test_pass_takes_what_its_tensors_take_where_an_allocator_keeps_what_was_freed():
    memory = Cached(10_000)
    with memory.limited(None):
        passes = PassMemory(memory, [nn.Linear(2, 2)])
        for taken in (6000, 2000, 2000):  # the first of all, and then with a cache that is warm
            made(passes, taken, taken)

        assert memory.peak_bytes() == 6000
        assert [asked(passes, memory, elements) for elements in (2000, 6000)] == [2000, 6000]
        kept = torch.empty(5000, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            passes.enter(6000, has_gradients=True, is_least=False)
        del kept


def test_first_pass_of_all_asks_for_nothing(passes, device):
    assert asked(passes, device, 10) == 0


def test_pass_asks_for_what_the_smallest_one_of_as_many_elements_took(passes, device):
    for elements, taken in ((10, 1000), (20, 2000), (40, 4000)):
        made(passes, elements, taken)

    assert [asked(passes, device, elements) for elements in (5, 10, 15, 40)] == [500, 1000, 2000, 4000]


def test_larger_pass_asks_for_more_than_the_line_through_smaller_ones(passes, device):
    made(passes, 10, 1500)
    assert asked(passes, device, 20) == 3000  # of one alone, all may be of the samples

    made(passes, 20, 2000)
    assert asked(passes, device, 40) == 2000 + 1.25 * 50 * 20
    assert asked(passes, device, 40, is_least=True) == 2000


def test_pass_that_makes_gradients_is_another_than_those_after_it(passes, device):
    made(passes, 10, 3000, has_gradients=False)
    assert asked(passes, device, 10) == 3000

    made(passes, 10, 1000)
    assert asked(passes, device, 10) == 1000
    assert asked(passes, device, 10, has_gradients=False) == 3000


def test_pass_that_does_not_fit_says_so_before_it_begins(passes, device):
    made(passes, 10, 6000)
    kept = torch.empty(5000, dtype=torch.uint8)

    with pytest.raises(torch.OutOfMemoryError):
        passes.enter(10, has_gradients=True, is_least=False)
    del kept
    passes.enter(10, has_gradients=True, is_least=False)


def test_as_many_sizes_as_there_are_are_no_more_than_are_remembered(passes, device):
    for elements in range(1, 200):
        made(passes, elements, 10 * elements)

    assert [asked(passes, device, elements) for elements in (1, 199)] == [10, 1990]
    assert asked(passes, device, 100) >= 1000  # what stands for those forgotten is larger


def kept_back(rank, size):
    """Return the bytes that a first pass asks for: of the largest layer in double precision."""
    memory, found = autoaccum.Simulated("1GiB"), []
    passes = PassMemory(memory, [spread(net(0))])
    memory.ensure = found.append
    passes.enter(1, has_gradients=False, is_least=False)
    return found[0]


def test_largest_layer_that_is_gathered_is_kept_back(rank_pool):
    assert rank_pool.run("distributed.test_pass_memory:kept_back", size=2) == [8 * (6 * 8 + 8)] * 2
