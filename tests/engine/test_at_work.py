"""A model is free after a call on it, also where an interrupt came at any line."""

import sys
import threading

import pytest
from torch import nn

from autoaccum._engine import at_work  # the lines of which are interrupted


def interrupted(call, number):
    """Call with an interrupt before so many lines of the module have run; return whether it came."""
    left = [number]

    def follow(frame, event, _):
        # At the first line of __exit__ nothing can be caught yet.
        if frame.f_code.co_filename != at_work.__file__ or frame.f_code.co_name == "__exit__":
            return None
        if event == "line":
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("nests", [False, True])
def test_no_interrupt_leaves_a_model_at_work(nests):
    model = nn.Linear(1, 1)
    work = at_work.AtWork("step", model, nests=nests)

    def call():
        with work:
            pass

    number = 1
    while interrupted(call, number):
        call()
        other = threading.Thread(target=call)
        other.start()
        other.join()
        number += 1
    assert number > 5
