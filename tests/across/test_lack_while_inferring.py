"""Memory that runs out while the reduction of a loss is inferred: it is inferred again, and not half."""

import pytest

import tagging
from faults import FailAt

SHARES = 12


@pytest.mark.parametrize("share", [0, *(pytest.param(share, marks=pytest.mark.sweep) for share in range(1, SHARES))])
def test_lack_of_memory_at_any_operator_leaves_the_gradient_of_the_whole_window(share):
    points, wrong = tagging.losses_with(FailAt, share, SHARES)

    assert len(points) >= 8
    assert not wrong
