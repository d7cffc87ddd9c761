"""Memory that runs out while a question looks at targets, or doubts what is left: it is asked again."""

import sys

import pytest

import tagging
from faults import FailAt


class FailInQuestion(FailAt):
    """Raises at operators of those by which a question looks at targets, or doubts what is left."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name not in ("_doubt", "watch"):
            frame = frame.f_back
        if frame is None:
            return operator(*args, **(kwargs or {}))
        return super().__torch_dispatch__(operator, types, args, kwargs)


SHARES = 12


@pytest.mark.parametrize("share", [0, *(pytest.param(share, marks=pytest.mark.sweep) for share in range(1, SHARES))])
def test_lack_of_memory_within_a_question_leaves_the_gradient_of_the_whole_window(share):
    points, wrong = tagging.losses_with(FailInQuestion, share, SHARES)

    assert len(points) >= 8
    assert not wrong
