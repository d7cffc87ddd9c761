"""The fault harness sees what it is there to see: each of these breaks the library on purpose."""

from contextlib import nullcontext

import pytest
import torch

from autoaccum._data.batches import Window
from autoaccum._data.random_state import RandomState
from autoaccum._engine import lack_of_memory
from autoaccum._engine.forward_backward import TrainingStep
from autoaccum._engine.optimizer_step import OptimizerCopy, _Written
from autoaccum._engine.savepoint import Savepoint
from autoaccum._system import signals
from fault_cases import Case
from fault_sweep import Budget, Sweep
from fault_training import warm_up

NOTHING = Budget(memory=0, first=0, troubled=0, twice=0, smallest=0, errors=0, interrupts=0, counted=0, lines=0)
PLAIN = Case("mlp", "fp32", "Adam, loop")
RICH = Case("own buffers", "fp16", "AdamW, loop", sizes=(4, 4, 4), clip=0.5, pieces=(7, 5))


@pytest.fixture(scope="module", autouse=True)
def warm():
    warm_up()


def _nothing(*_):
    return None


def _without_buffers(savepoint):
    savepoint._made = set()
    savepoint.random.put_back()


def _without_random_state(savepoint, restore=Savepoint.restore):
    now = torch.get_rng_state()
    restore(savepoint)
    torch.set_rng_state(now)


def _half_abandoned(step):
    if step.precision.scaler is not None:
        step.precision.scaler._per_optimizer_states.clear()


def _stage_kept(step):
    step.clear_gradients()


def _of_the_first_window(savepoint, take=Savepoint.take, **options):
    if not savepoint._has_looked:
        take(savepoint, **options)


def _overlapping(window, start, stop, cut=Window.cut):
    return cut(window, start - 1, stop - 1) if start else cut(window, start, stop)


_kept_errors = []


SABOTAGES = {
    "torch's random state is not restored": (RICH, Savepoint, "restore", _without_random_state, {"troubled": 20}),
    "no generator is restored": (RICH, RandomState, "put_back", _nothing, {"troubled": 20}),
    "buffers are not restored": (RICH, Savepoint, "restore", _without_buffers, {"memory": 20}),
    "a window goes back too far": (RICH, Savepoint, "take", _of_the_first_window, {"memory": 60}),
    "micro-batches overlap": (PLAIN, Window, "cut", _overlapping, {"memory": 20}),
    "gradients are not cleared": (RICH, TrainingStep, "abandon", _half_abandoned, {"memory": 20}),
    "the scaler keeps its stage": (RICH, TrainingStep, "abandon", _stage_kept, {"errors": 40}),
    "the first update is not taken back": (PLAIN, OptimizerCopy, "undo", lambda _: True, {"first": 60}),
    "half an update passes for none": (PLAIN, _Written, "undo", lambda _: True, {"memory": 60}),
    "errors are kept with their frames": (PLAIN, lack_of_memory, "let_go", _kept_errors.append, {"counted": 20}),
    "interrupts are not held": (PLAIN, signals, "held", nullcontext, {"interrupts": 60}),
    "damage is told of what is whole": (PLAIN, Savepoint, "damage", lambda _: ["all"], {"memory": 20}),
}


class SeenError(Exception):
    """The harness has found something that is not as promised."""


class Sooner(Sweep):
    """Goes through the same operators, the last first, and ends with the first mismatch.

    Most of what is not put back is there only when much of the window has run.
    """

    def _chosen(self, phases, most):
        return [*super()._chosen(phases, most)][::-1]

    def _wrong(self, where, what):
        raise SeenError(f"{where}: {what}")


@pytest.mark.parametrize("name", SABOTAGES)
def test_harness_sees_a_library_that_is_broken_on_purpose(name, monkeypatch):
    case, owner, attribute, replacement, budget = SABOTAGES[name]
    monkeypatch.setattr(owner, attribute, replacement)

    with pytest.raises(SeenError):
        Sooner(case).run(Budget(**vars(NOTHING) | budget))

    _kept_errors.clear()
