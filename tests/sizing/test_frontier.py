"""Limits of micro-batches of unlike width: few failures, few micro-batches, whatever comes first."""

import json

from hypothesis import given
from hypothesis import strategies as st

from autoaccum._sizing.frontier import Frontier

MIB = 2**20
POINTS = st.lists(st.tuples(st.booleans(), st.integers(1, 64), st.integers(1, 64), st.integers(1, 64)), max_size=30)


@given(POINTS)
def test_what_fitted_is_believed_and_what_failed_is_not_tried(points):
    frontier = Frontier()
    seen = []
    for fits, samples, *widths in points:
        point = samples, tuple(widths)
        if fits:
            frontier.note(*point)
        else:
            frontier.fail(*point)
        seen.append((fits, *point))
    if not seen:
        return
    fits, samples, widths = seen[-1]
    if fits:
        assert frontier.largest(widths, 0, 64) >= samples
        assert frontier.surely(tuple(width - 1 for width in widths)) >= samples
    else:
        assert frontier.surely(widths) < samples
    again = Frontier.of_state(json.loads(json.dumps(frontier.state())))
    assert again.surely(widths) == frontier.surely(widths)


def test_forgiven_failures_are_tried_again():
    frontier = Frontier()
    frontier.note(2, (8,))
    frontier.measure(2, (8,), 2 * 8 * MIB)
    frontier.fail(8, (8,))
    assert frontier.largest((8,), 1000 * MIB, 64) == 7

    frontier.forgive()

    assert frontier.largest((8,), 1000 * MIB, 64) > 7
