"""Trains a case of `fault_cases` for a few windows, with faults or without, and keeps what there is to be judged."""

import contextlib
import gc
import io
from dataclasses import dataclass, field
from unittest import mock

import torch

import autoaccum
from support.faults.cases import SAMPLES, Case
from support.faults.modes import FailAt, state_of
from support.models.small import live_tensors

# The parts of a window, as hooks on the model and the optimizer tell them apart.
BEGIN, FORWARD, BACKWARD, UPDATE = "begin", "forward", "backward", "update"
# In which the model is called beside, to look into its loss; what fails there may be left out.
QUESTION = "question"
# Operators that take no memory: copies into tensors that are there, by which state is put back, and marks of the
# profiler, which newer versions of PyTorch dispatch like operators.
_TAKE_NO_MEMORY = ("aten.copy_.default", "aten._foreach_copy_.default", "profiler.")


class LackAt(FailAt):
    """Runs out of memory at given operators, of those that may take some.

    Attributes:
        training: What it is used in, which knows what part of a window is gone through.
        asked: How often it has raised where a loss may have been looked into.
    """

    asked = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if str(operator).startswith(_TAKE_NO_MEMORY):
            return operator(*args, **(kwargs or {}))
        self.asked += self.count + 1 in self.points and self.training.may_be_asking
        return super().__torch_dispatch__(operator, types, args, kwargs)


class Listing(LackAt):
    """Raises nothing; lists the parts of the window in which the operators are."""

    def __init__(self):
        super().__init__()
        self.parts = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.parts += [self.training.part] * (not str(operator).startswith(_TAKE_NO_MEMORY))
        return super().__torch_dispatch__(operator, types, args, kwargs)


class FailInTurn(LackAt):
    """Runs out of memory once in every attempt at a window.

    Args:
        points: For each attempt the operator at which it raises, counted from 1 while micro-batches are worked on; the
            last one holds for all further attempts if there is no None at the end.
    """

    def __init__(self, *points):
        super().__init__()
        self.turns = list(points)
        self.attempt()

    def attempt(self):
        self.count = 0
        self.points = {self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if self.points and self.training.part in (FORWARD, BACKWARD):
            return super().__torch_dispatch__(operator, types, args, kwargs)
        return operator(*args, **(kwargs or {}))

    def fail(self):
        self.points = set()  # until the next attempt
        super().fail()


@dataclass
class Played:
    """What a training of a few windows left behind."""

    states: list = field(default_factory=list)  # before the first window, and after each
    cuts: list = field(default_factory=list)  # the cut of each window that became an update
    # By window what its report says, how often memory ran out and how many samples were done again; None where an
    # interrupt came in the report's place.
    figures: list = field(default_factory=list)
    events: list = field(default_factory=list)
    recomputed: list = field(default_factory=list)
    error: BaseException | None = None  # what was raised, if anything was
    finished: bool = False  # whether its window had become an update all the same
    left: dict | None = None  # the state then
    part: str = ""  # the part of its window that was gone through then
    # Size of the micro-batch and the plan's, each time that memory ran out.
    fell: list = field(default_factory=list)
    # Bytes of tensors, where they are counted: before each window; after each release of memory, and whether gradients
    # were being kept; with the number of tensors at the end, beyond those at the beginning.
    alive_before: list = field(default_factory=list)
    alive_between: list = field(default_factory=list)
    alive_after: tuple = ()


def play(case, faults=None, *, cuts=(), windows=3, again=False, counted=False):
    """Train a case for a few windows.

    Args:
        case: The case.
        faults: By window, one or a list of modes to run it under, once.
        cuts: The cuts of the first windows; afterwards, or without, as the runner chooses.
        windows: How many windows.
        again: Whether a window that raised is given once more; else the training ends there.
        counted: Whether to count what is alive.
    """
    before, meter = (live_tensors(), autoaccum.Simulated("1TiB")) if counted else (0, None)
    with contextlib.redirect_stderr(io.StringIO()):
        training = _Training(case, dict(faults or {}), meter)
        training.run(cuts, windows, again=again)
    played = training.played
    if counted:
        played.alive_after = live_tensors() - before, meter.reading().used_bytes
    return played


class _Training(autoaccum.Callback):
    def __init__(self, case, faults, meter):
        self.played, self.part = Played(), BEGIN
        self._case, self._data, self._by_window, self._meter = case, case.windows(), faults, meter
        self._faults, self._scalers, self._passes = [], [], 0

        class Scaler(torch.amp.GradScaler):
            def __init__(scaler, *arguments, **options):  # noqa: N805
                super().__init__(*arguments, **options)
                self._scalers.append(scaler)

            def step(scaler, optimizer):  # noqa: N805
                self._go_to(UPDATE)  # its own operators come before the optimizer's hooks
                return super().step(optimizer)

        with mock.patch.object(torch.amp, "GradScaler", Scaler):
            self._model, self._runner = case.runner(device=meter or "cpu", callbacks=(self,))
        self._runner.optimizer.register_step_pre_hook(lambda *_: self._go_to(UPDATE))
        self._model.register_forward_pre_hook(self._begin_forward)
        self._model.register_forward_hook(self._end_forward)

    def run(self, cuts, windows, *, again):
        played = self.played
        played.states.append(self._state())
        while (number := len(played.cuts)) < windows:
            if number < len(cuts):
                self._runner.plan = autoaccum.Plan(SAMPLES, cuts[number])
            if self._meter is not None:
                played.alive_before.append(self._meter.reading().used_bytes)
            faults = self._by_window.pop(number, [])
            self._faults = faults if isinstance(faults, list) else [faults]
            report = self._step(self._data[number])
            if report is not None or played.finished:
                self._note(report)
            elif not again:
                break
            again = again and report is not None

    def on_oom(self, event, *, step):
        self._go_to(BEGIN)
        self.played.fell.append((event.size, self._runner.plan.micro_batch))
        if self._meter is not None:
            # After a backward pass that failed PyTorch keeps gradients in this thread's queue until the next begins.
            torch.zeros((), requires_grad=True).backward()
            keeps = any(parameter.grad is not None for parameter in self._model.parameters())
            self.played.alive_between.append((self._meter.reading().used_bytes, keeps))
        for fault in self._faults:
            if hasattr(fault, "attempt"):
                fault.attempt()

    def _step(self, window):
        runner, played = self._runner, self.played
        done = runner._runner.events.windows
        self._go_to(BEGIN)
        try:
            with contextlib.ExitStack() as stack:
                for fault in self._faults:
                    fault.training = self
                    stack.enter_context(fault)
                return runner.step(window)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not any(fault.hits for fault in self._faults):
                raise  # a person's own
            played.error, played.part = error, self.part
            played.finished, played.left = runner._runner.events.windows > done, self._state()
            return None

    def _note(self, report):
        played, passes = self.played, int(self._model.passes)
        noted = tuple(self._model.sizes[self._passes : passes : self._case.kind.forwards].tolist())
        self._passes = passes
        played.cuts.append(noted if report is None else report.micro_batches)
        played.events.append(report and report.oom_events)
        played.recomputed.append(report and report.recomputed_samples)
        figures = report and (report.loss, dict(report.losses), report.grad_norm, report.skipped, report.samples)
        played.figures.append(figures and repr(figures))
        played.states.append(self._state())

    def _go_to(self, part):
        self.part = part

    @property
    def may_be_asking(self):
        is_early = len(self.played.cuts) < (2 if self._case.kind.is_found_out else 1)
        return self.part == QUESTION or (is_early and self.part != UPDATE)

    def _begin_forward(self, model, _):
        self._go_to(FORWARD if model.training and torch.is_grad_enabled() else QUESTION)

    def _end_forward(self, *_):
        if self.part == FORWARD:
            self._go_to(BACKWARD)

    def _state(self):
        return state_of(self._model, self._runner.optimizer, *self._scalers)


def warm_up():
    """Play once, and keep what that imported out of garbage collections: memory is released thousands of times."""
    play(Case("mlp"), {1: FailAt(1)})
    gc.collect()
    gc.freeze()
