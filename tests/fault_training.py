"""Trains a case of `fault_cases` for a few windows, with faults or without, and keeps what there is to be judged."""

import contextlib
import gc
import sys
from dataclasses import dataclass, field

import torch

import autoaccum
from autoaccum._memory._storages import StorageWatch
from autoaccum._memory.base import MemoryBackend
from autoaccum._snapshot import Mark
from fault_cases import SAMPLES, Case
from faults import FailAt, state_of
from helpers import live_tensors

# In which a micro-batch is worked on, so that a smaller one helps.
WORK = ("set aside", "transfer", "forward", "backward")


class Listing(FailAt):
    """Raises nothing; lists the phases of the operators."""

    def __init__(self):
        super().__init__()
        self.phases = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.phases.append(self.runner._step.phase)
        return super().__torch_dispatch__(operator, types, args, kwargs)


class FailInTurn(FailAt):
    """Raises once in every attempt at a window; what is put back between two attempts is let through.

    Args:
        points: For each attempt the operator at which it raises, counted from 1 while micro-batches are worked on; the
            last one holds for all further attempts if there is no None at the end.
    """

    def __init__(self, *points):
        super().__init__()
        self.turns = list(points)
        self.attempt()

    def attempt(self):
        """Begin to count anew."""
        self.count = 0
        self.points = {self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if self.points and self.runner._step.phase in WORK and not _is_running(Mark.put_back):
            return super().__torch_dispatch__(operator, types, args, kwargs)
        return operator(*args, **(kwargs or {}))

    def fail(self):
        self.points = set()  # until the next attempt
        super().fail()


class Peak:
    """No fault: notes the most that is allocated on a simulated device."""

    hits = 0

    def __init__(self, device, peaks):
        self._device, self._peaks = device, peaks

    def __enter__(self):
        self._device.reset_peak()

    def __exit__(self, *_):
        self._peaks.append(self._device.peak_bytes())


class Faults:
    """Several faults at once; what is asked of them is answered by the last."""

    def __init__(self, *faults):
        self._faults = faults

    def __enter__(self):
        for fault in self._faults:
            fault.runner = self.runner
            fault.__enter__()

    def attempt(self):
        for fault in self._faults:
            if hasattr(fault, "attempt"):
                fault.attempt()

    def __exit__(self, *error):
        for fault in reversed(self._faults):
            fault.__exit__(*error)

    @property
    def hits(self):
        return sum(fault.hits for fault in self._faults)

    @property
    def where(self):
        return self._faults[-1].where


def _is_running(function):
    frame = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


@dataclass
class Played:
    """What a training of a few windows left behind.

    Attributes:
        states: Before the first window, and after each.
        cuts: The cut of each window that became an update.
        figures: What the reports say of them; None where an interrupt came in its place.
        events: By window, how often memory ran out.
        recomputed: By window, the samples that were worked on and thrown away.
        uses: By window, the gradients of the samples' own entries, as the optimizer was given them.
        order: Samples in the order in which the model noted them.
        error: What was raised, if anything was.
        finished: Whether its window had become an update all the same.
        left: The state then.
        phase: What was being done then.
        fell: Phase, size of the micro-batch and the plan's, each time that memory ran out.
        said: The runner's notices.
        alive_before: Bytes of tensors before each window, where they were counted.
        alive_between: The same after each release of memory, and whether gradients were being kept.
        alive_after: Tensors and bytes at the end, beyond those at the beginning.
    """

    states: list = field(default_factory=list)
    cuts: list = field(default_factory=list)
    figures: list = field(default_factory=list)
    events: list = field(default_factory=list)
    recomputed: list = field(default_factory=list)
    uses: dict = field(default_factory=dict)
    order: list = field(default_factory=list)
    error: BaseException | None = None
    finished: bool = False
    left: dict | None = None
    phase: str = ""
    fell: list = field(default_factory=list)
    said: tuple = ()
    alive_before: list = field(default_factory=list)
    alive_between: list = field(default_factory=list)
    alive_after: tuple = ()


def play(case, faults=None, *, cuts=(), windows=3, device="cpu", limit_bytes=None, again=False, counted=False):
    """Train a case for a few windows.

    Args:
        case: The case.
        faults: By window, a mode to run it under, once.
        cuts: The cuts of the first windows; afterwards, or without, as the runner chooses.
        windows: How many windows.
        device: As for `Runner`; a backend that can be limited is.
        limit_bytes: To what.
        again: Whether a window that raised is given once more; else the training ends there.
        counted: Whether to count what is alive.
    """
    before = live_tensors() if counted else 0
    with StorageWatch("cpu") if counted else contextlib.nullcontext() as watch:
        training = _Training(case, dict(faults or {}), device, watch)
        with device.limited(limit_bytes) if isinstance(device, MemoryBackend) else contextlib.nullcontext():
            training.run(cuts, windows, again=again)
        played = training.played
        if counted:
            played.alive_after = live_tensors() - before, watch.live_bytes
    return played


class _Training(autoaccum.Callback):
    """The loop of `play`."""

    def __init__(self, case, faults, device, watch):
        self.played = Played()
        self._data, self._faults, self._watch = case.windows(), faults, watch
        self._model, self._runner, self._notices = case.runner(device=device, callbacks=(self,))
        self._witness = next(module for module in self._model.modules() if hasattr(module, "noted"))
        self._runner.optimizer.register_step_pre_hook(self._note_uses)
        self._fault = None

    def run(self, cuts, windows, *, again):
        played = self.played
        played.states.append(self._state())
        while len(played.cuts) < windows:
            number = len(played.cuts)
            if number < len(cuts):
                self._runner.plan = autoaccum.Plan(SAMPLES, cuts[number])
            if self._watch is not None:
                played.alive_before.append(self._watch.live_bytes)
            self._fault = self._faults.pop(number, None)
            report = self._step(self._data[number])
            if report is not None or played.finished:
                self._note(report)
            elif not again:
                break
            again = again and report is not None
        played.order, played.said = self._witness.noted(), self._notices.texts

    def on_oom(self, event, *, step):
        self.played.fell.append((event.phase, event.size, self._runner.plan.micro_batch))
        if self._watch is not None:
            _empty_ready_queue()
            keeps = any(parameter.grad is not None for parameter in self._model.parameters())
            self.played.alive_between.append((self._watch.live_bytes, keeps))
        if hasattr(self._fault, "attempt"):
            self._fault.attempt()

    def _step(self, window):
        runner, played = self._runner, self.played
        done = runner.windows_done
        if self._fault is not None:
            self._fault.runner = runner
        try:
            with self._fault or contextlib.nullcontext():
                return runner.step(window)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and (self._fault is None or not self._fault.hits):
                raise  # a person's own
            played.error, played.phase = error, runner._step.phase
            played.finished, played.left = runner.windows_done > done, self._state()
            return None

    def _note(self, report):
        played = self.played
        played.cuts.append(self._runner._work.sizes if report is None else report.micro_batches)
        played.events.append(report and report.oom_events)
        played.recomputed.append(report and report.recomputed_samples)
        figures = report and (report.loss, dict(report.losses), report.grad_norm, report.skipped, report.samples)
        played.figures.append(figures and repr(figures))
        played.states.append(self._state())

    def _note_uses(self, *_):
        self.played.uses[len(self.played.cuts)] = self._witness.uses.grad.tolist()

    def _state(self):
        return state_of(self._model, self._runner.optimizer, self._runner._step.precision.scaler)


def warm_up():
    """Play once, and keep what that imported out of garbage collections: memory is released thousands of times."""
    play(Case("mlp"), {1: FailAt(1)})
    gc.collect()
    gc.freeze()


def _empty_ready_queue():
    """Let go of gradients that wait in autograd's queue of this thread.

    After a backward pass that failed PyTorch keeps them until the next one begins.
    """
    torch.zeros((), requires_grad=True).backward()
