"""Each kind of fault is told by its diagnosis, and the same loop mended is right."""

import pytest

import autoaccum
from support.losses.accumulation_faults import FAULTS
from support.models.small import one_in

STEPS = {
    "wrong_from_the_second_step_on": 2,
    "short_window_divided_by_all": 3,
    "short_window_left_to_the_next": 3,
}


@pytest.mark.parametrize("name", one_in(3, FAULTS))
def test_fault_is_told_and_the_mended_loop_is_right(name):
    train, told = FAULTS[name]

    wrong = autoaccum.verify(lambda micro, steps: train(micro, steps, False), 16, steps=STEPS.get(name, 1))
    right = autoaccum.verify(lambda micro, steps: train(micro, steps, True), 16, steps=STEPS.get(name, 1))

    assert not wrong
    assert told in wrong.splits[0].diagnosis, str(wrong)
    assert not any(split.is_right for split in wrong.splits), str(wrong)
    assert right, str(right)
    assert right.diagnosis == ""
    assert [(split.micro_batch, split.accum_steps) for split in right.splits] == [(8, 2), (4, 4), (2, 8), (1, 16)]
