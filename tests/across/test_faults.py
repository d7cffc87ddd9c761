"""Whatever fails at any point of a step changes nothing but the cut, or nothing at all: a part of scripts/faults.py."""

import pytest

from support.faults.cases import SMALL, Case, pairs
from support.faults.sweep import Budget, Sweep
from support.faults.training import warm_up

NOTHING = Budget(memory=0, first=0, troubled=0, twice=0, smallest=0, errors=0, interrupts=0, counted=0, lines=0)
# By turns, so that each pair of a model and a precision, and so on, meets a few faults of each kind.
A_FEW = (
    Budget(**vars(NOTHING) | {"memory": 3, "troubled": 2, "smallest": 1}),
    Budget(**vars(NOTHING) | {"memory": 1, "first": 5, "errors": 1, "interrupts": 1, "twice": 1}),
)
RICH = Case("own buffers", "fp16", "AdamW, loop", sizes=(4, 4, 4), clip=0.5, pieces=(7, 5))


@pytest.fixture(scope="module", autouse=True)
def warm():
    warm_up()


@pytest.mark.parametrize("model", SMALL)
def test_fault_at_any_operator_changes_nothing_but_the_cut(model):
    # Of a model's ten cases one, the next model's with faults of the other kind.
    number, case = [each for each in enumerate(pairs()) if each[1].model == model][5 * (list(SMALL).index(model) % 2)]

    tally = Sweep(case, shift=number).run(A_FEW[number % len(A_FEW)])

    assert tally.mismatches == []
    assert tally.survived > 2
    assert tally.refused >= 1


@pytest.mark.parametrize("case", [RICH, Case("checkpoint", "bf16", "SGD, foreach", sizes=(6, 6))], ids=str)
def test_memory_that_ran_out_leaves_no_tensor_alive(case):
    tally = Sweep(case).run(Budget(**vars(NOTHING) | {"counted": 3}))

    assert tally.mismatches == []
    assert tally.injected > 1


@pytest.mark.parametrize("case", [RICH, Case("several losses", "fp32", "SGD, loop", sizes=(6, 6))], ids=str)
def test_interrupt_between_any_two_lines_leaves_the_window_undone_or_done(case):
    tally = Sweep(case).run(Budget(**vars(NOTHING) | {"lines": 4}))

    assert tally.mismatches == []
    assert tally.finished > 0
    assert tally.refused > 4
