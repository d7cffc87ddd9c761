"""Cuts by cost: as few micro-batches as filling them makes, none above the bound but a single sample, and even."""

from hypothesis import given
from hypothesis import strategies as st

from autoaccum._sizing.by_cost import cut_by_cost


def costs_of(sizes, costs):
    start, found = 0, []
    for size in sizes:
        found.append(size * costs[start])
        start += size
    return found


@given(
    costs=st.lists(st.floats(0.01, 1000), min_size=1, max_size=60).map(lambda each: sorted(each, reverse=True)),
    most=st.floats(0.01, 3000),
    largest=st.none() | st.integers(1, 20),
)
def test_no_micro_batch_costs_more_than_allowed_unless_it_is_one_sample(costs, most, largest):
    filled = cut_by_cost(costs, most, largest=largest, fills=True)
    even = cut_by_cost(costs, most, largest=largest)

    for sizes in (filled, even):
        assert sum(sizes) == len(costs)
        assert all(
            size == 1 or cost <= most * (1 + 1e-9) for size, cost in zip(sizes, costs_of(sizes, costs), strict=True)
        )
        assert largest is None or max(sizes) <= largest
    assert len(even) == len(filled)
    assert max(costs_of(even, costs)) <= max(costs_of(filled, costs)) * (1 + 1e-9)


def test_costs_are_even_rather_than_the_last_one_small():
    assert cut_by_cost([10.0] * 8 + [1.0] * 10, 60, fills=True) == [6, 6, 6]
    assert cut_by_cost([10.0] * 8 + [1.0] * 10, 60) == [4, 4, 10]
    assert cut_by_cost([1.0] * 10, 8) == [5, 5]
    assert cut_by_cost([1.0] * 10, 8, fills=True) == [8, 2]
