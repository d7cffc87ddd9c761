"""The fault harness sees what it is there to see: each of these breaks the library on purpose."""

from contextlib import nullcontext

import pytest
import torch
from autoaccum._engine.micro_batches import MicroBatches
from autoaccum._engine.separate_gradients import Aside
from autoaccum._snapshot import Mark, OptimizerSnapshot, RandomState

from autoaccum import _oom
from autoaccum._data.batches import Window
from autoaccum._engine.forward_backward import TrainingStep
from autoaccum._engine.optimizer_step import _Written
from autoaccum._system import signals
from autoaccum.errors import StateDamagedError
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


def _without_buffers(mark):
    mark.random.put_back()


def _without_random_state(mark, put_back=Mark.put_back):
    now = torch.get_rng_state()
    put_back(mark)
    torch.set_rng_state(now)


def _half_abandoned(step):
    if step.precision.scaler is not None:
        step.precision.scaler._per_optimizer_states.clear()


def _stage_kept(step):
    step.clear_gradients()


def _mark_of_the_first(mark, take=Mark.take, **options):
    if mark._earlier is None or mark.random._states is None:
        take(mark, **options)


def _overlapping(window, start, stop, cut=Window.cut):
    return cut(window, start - 1, stop - 1) if start else cut(window, start, stop)


def _hooks_kept(aside):
    aside._hooks = []


def _damage(_):
    raise StateDamagedError("sabotage")


_kept_errors = []


SABOTAGES = {
    "random state is not put back": (RICH, Mark, "put_back", _without_random_state, {"memory": 20}),
    "no generator is put back": (RICH, RandomState, "put_back", _nothing, {"memory": 20}),
    "buffers are not put back": (RICH, Mark, "put_back", _without_buffers, {"memory": 20}),
    "a micro-batch is not put back": (RICH, MicroBatches, "_put_back_micro_batch", _nothing, {"memory": 20}),
    "a micro-batch goes back too far": (RICH, Mark, "take", _mark_of_the_first, {"memory": 20}),
    "micro-batches overlap": (PLAIN, Window, "cut", _overlapping, {"memory": 20}),
    "gradients are not cleared": (RICH, TrainingStep, "abandon", _half_abandoned, {"memory": 20}),
    "the scaler keeps its stage": (RICH, TrainingStep, "abandon", _stage_kept, {"errors": 40}),
    "half-added gradients pass for whole": (RICH, MicroBatches, "_is_intact", lambda _: True, {"memory": 40}),
    "hooks stay behind": (RICH, Aside, "drop", _hooks_kept, {"troubled": 10}),
    "the first update is not taken back": (PLAIN, OptimizerSnapshot, "undo", lambda _: True, {"first": 60}),
    "half an update passes for none": (PLAIN, _Written, "undo", lambda _: True, {"memory": 60}),
    "errors are kept with their frames": (PLAIN, _oom, "let_go", _kept_errors.append, {"counted": 20}),
    "interrupts are not held": (PLAIN, signals, "held", nullcontext, {"interrupts": 60}),
    "damage is told of what is whole": (PLAIN, MicroBatches, "refuse_written_parameters", _damage, {"memory": 20}),
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
