"""Part of gpu.py: memory really runs out in every phase of a step, and the resulting state is compared bit for bit.

A training of a few windows in which memory runs out (under a tight limit; because something takes all of it at a chosen
moment; or by an error injected at an operator) is compared with one that uses the reported cuts from the start and has
no failure: parameters, buffers, optimizer, scaler and every random state, after each window.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from dataclasses import dataclass, field

import torch
from gpu_common import MIB, run_part, settle
from gpu_common import size as in_words
from gpu_models import Work, be_deterministic, whole_state
from gpu_sabotage import MOMENTS, Hog

import autoaccum
from autoaccum._memory import Simulated, backend_for
from autoaccum._oom import let_go
from autoaccum._system.notices import Notices
from faults import FailAt, differences

WINDOWS = 3
PRECISIONS = ("fp32", "bf16", "fp16")
_OPTIMIZERS = {
    "Adam, foreach": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=True),
    "Adam, loop": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=False),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
}
_INJECTED = 8  # operators of a case at which an error is injected


@dataclass
class Played:
    """The record of a training: states before the first window and after each, cuts, and the error raised."""

    states: list = field(default_factory=list)
    cuts: list = field(default_factory=list)
    events: int = 0
    peak_bytes: int = 0
    order: list = field(default_factory=list)
    phases: list = field(default_factory=list)
    error: Exception | None = None
    left: dict | None = None


@dataclass(frozen=True)
class Case:
    """A training to run."""

    work: Work
    precision: str
    optimizer: str

    def __str__(self):
        return f"{self.work.body}, {self.precision}, {self.optimizer}"


class Phases(autoaccum.Callback):
    """Records the phase in which memory ran out."""

    def __init__(self, phases):
        self._phases = phases

    def on_oom(self, event, *, step):  # noqa: ARG002 - as the base has it
        """Note it."""
        self._phases.append(event.phase)


class Bench:
    """Plays cases on one device.

    Args:
        device: "cuda" or "cpu"; a simulated device replaces a missing card.
    """

    def __init__(self, device):
        self._is_card = device.type == "cuda"
        self.memory = backend_for(device) if self._is_card else Simulated("1GiB")

    def play(self, case, *, cuts=(), limit_bytes=None, hog=None, fault=None):
        """Train a few windows, the second under the mode `fault`."""
        self.memory.release()
        played = Played()
        with self.memory.limited(limit_bytes):
            self._train(case, cuts, played, hog, fault)
        if hog is not None:
            hog.give()
        gc.collect()
        return played

    def reserved_bytes(self):
        """Return the memory held between two trainings, which a limit also counts."""
        self.memory.release()
        return self.memory.reading().used_bytes

    def _train(self, case, cuts, played, hog, fault):
        windows = case.work.batches()
        model = case.work.model()
        half = case.work.samples // 2
        runner = autoaccum.Runner(
            model,
            _OPTIMIZERS[case.optimizer],
            autoaccum.plan(case.work.samples, half),
            loss=torch.nn.CrossEntropyLoss(),
            precision=case.precision,
            device=self.memory,
            callbacks=[Phases(played.phases), *([hog] if hog else [])],
            notices=Notices(silent=True),
        )
        scaler = runner._step.precision.scaler
        if hog is not None:
            hog.hang_on(model, runner)

        def state():
            return whole_state(model, runner.optimizer, scaler)

        played.states.append(state())
        for number, window in enumerate(windows):
            if number < len(cuts):
                runner.plan = autoaccum.Plan(case.work.samples, tuple(cuts[number]))
            if hog is not None:
                hog.now = number
            try:
                with fault if fault is not None and number == 1 else contextlib.nullcontext():
                    report = runner.step(window)
            except Exception as error:  # noqa: BLE001 - it is what is looked at
                let_go(error)
                played.error, played.left = error, state()
                break
            played.cuts.append(report.micro_batches)
            played.events += report.oom_events
            played.peak_bytes = max(played.peak_bytes, report.peak_bytes or 0)
            played.states.append(state())
        played.order = model.noted()


class Judge:
    """Compares trainings in which memory ran out with those in which it did not."""

    def __init__(self, bench):
        self._bench = bench
        self._clean = {}

    def clean(self, case, cuts):
        """Return the training with these cuts from the start, without a failure."""
        key = case, tuple(cuts)
        if key not in self._clean:
            self._clean[key] = self._bench.play(case, cuts=cuts)
        return self._clean[key]

    def wrong(self, case, played):
        """Return the broken promises, as text; an empty list if none."""
        wrong = []
        if isinstance(played.error, autoaccum.StateDamagedError):
            return wrong  # reported, never silent: the only exception
        if played.error is not None:
            names = differences(played.states[-1], played.left)
            if not isinstance(played.error, autoaccum.DoesNotFitError):
                wrong.append(f"raised {type(played.error).__name__}: {played.error}")
            if names:
                wrong.append(f"{type(played.error).__name__} left changed: {names[:6]}")
            return wrong
        reference = self.clean(case, played.cuts)
        if reference.events or reference.error is not None:
            return [f"the training that it is held against failed itself: {reference.error}"]
        for number, (one, other) in enumerate(zip(reference.states, played.states, strict=True)):
            names = differences(one, other)
            if names:
                wrong.append(f"window {number} differs in {len(names)} of {len(one)}: {names[:6]}")
        if played.order != case.work.all_ids():
            wrong.append("samples were not used once each, in order")
        return wrong


def failures(findings, options):
    """Run the cases, most important first."""
    be_deterministic()
    device = torch.device(options.device)
    bench = Bench(device)
    judge = Judge(bench)
    # Large enough that a tensor has its own allocator segment.
    sizes = {"layers": (48, 256, 768), "attention": (48, 256, 768), "convolutions": (48, 64, 256)}
    works = {body: Work(body, *((8, 6, 16) if options.tiny else size), WINDOWS) for body, size in sizes.items()}
    kinds = list(_OPTIMIZERS)[: 2 if options.tiny else 3]
    cases = [Case(works["layers"], precision, kinds[n % len(kinds)]) for n, precision in enumerate(PRECISIONS)]
    cases += [Case(works["attention"], precision, kinds[(n + 1) % 2]) for n, precision in enumerate(PRECISIONS)]
    cases += [Case(works["convolutions"], precision, kinds[0]) for precision in PRECISIONS[:2]]
    gc.collect()
    gc.freeze()
    for case in cases:
        if findings.left_s() < 5:
            findings.add(str(case), "not run: the time is over")
            continue
        if not repeats(findings, bench, case):
            continue
        seized(findings, bench, judge, case)
        tight(findings, bench, judge, case)
        injected(findings, bench, judge, case)
        settle(device)
    persistent(findings, bench, judge, cases[0])


def repeats(findings, bench, case):
    """Whether the same training gives the same bits twice; otherwise nothing can be compared."""
    one, other = (bench.play(case) for _ in range(2))
    if one.error is not None:
        findings.add(f"{case}: undisturbed", f"{type(one.error).__name__}: {one.error}", ok=False)
        return False
    same = not any(differences(a, b) for a, b in zip(one.states, other.states, strict=True))
    if not same:
        findings.add(f"{case}: undisturbed, twice", "not the same bits twice, so nothing is compared")
    return same


def seized(findings, bench, judge, case):
    """Something takes all memory in each phase of a step, in the first window and in a later one."""
    room = _generous(bench, judge, case)
    fell, wrong, missed, damaged = Counter(), [], [], 0
    for moment in MOMENTS:
        for window in (0, 1):
            hog = Hog(bench.memory, moment, window)
            played = bench.play(case, limit_bytes=room, hog=hog)
            fell.update(played.phases)
            damaged += isinstance(played.error, autoaccum.StateDamagedError)
            if not played.phases and played.error is None:
                missed.append(f"{moment} of window {window}")
            wrong += [f"{moment}, window {window}: {text}" for text in judge.wrong(case, played)]
    found = _said(fell, wrong, damaged) + (f"; nothing failed in {', '.join(missed)}" if missed else "")
    findings.add(f"{case}: all memory taken at a moment", found, ok=not wrong, phases=fell, wrong=wrong, missed=missed)


def tight(findings, bench, judge, case):
    """Limits under which the whole window at once does not fit, and half of it does."""
    samples = case.work.samples
    held = bench.reserved_bytes()
    whole = bench.play(case, cuts=[(samples,)] * WINDOWS).peak_bytes
    half = bench.play(case, cuts=[(samples // 2,) * 2] * WINDOWS).peak_bytes
    if whole <= half:
        findings.add(f"{case}: tight limit", f"the whole window takes no more than half: {whole}, {half}")
        return
    fell, wrong, damaged, gave_up = Counter(), [], 0, 0
    for part in (0.85, 0.5, 0.2):
        limit = int(half + part * (whole - half))
        # The first cut is the whole window; how the others are cut is the runner's choice.
        played = bench.play(case, cuts=[(samples,)], limit_bytes=max(limit, held + 1))
        fell.update(played.phases)
        damaged += isinstance(played.error, autoaccum.StateDamagedError)
        gave_up += isinstance(played.error, autoaccum.DoesNotFitError)
        wrong += [f"{in_words(limit)}: {text}" for text in judge.wrong(case, played)]
    found = f"{_said(fell, wrong, damaged)}; the whole takes {in_words(whole)}, half of it {in_words(half)}"
    found += f"; {gave_up} gave up" if gave_up else ""
    findings.add(f"{case}: tight limit", found, ok=not wrong, phases=fell, wrong=wrong)


def injected(findings, bench, judge, case):
    """An error of the allocator's kind at operators all over the second window."""
    counting = FailAt()
    bench.play(case, fault=counting)
    points = sorted({1 + number * (counting.count - 1) // (_INJECTED - 1) for number in range(_INJECTED)})
    fell, wrong, damaged, hits = Counter(), [], 0, 0
    for point in points:
        if findings.left_s() < 2:
            break
        fault = FailAt(point)
        played = bench.play(case, fault=fault)
        fell.update(played.phases)
        hits += fault.hits
        damaged += isinstance(played.error, autoaccum.StateDamagedError)
        wrong += [f"operator {point} ({fault.where}): {text}" for text in judge.wrong(case, played)]
    found = f"{_said(fell, wrong, damaged)}; {hits} errors at {counting.count} operators"
    findings.add(f"{case}: injected", found, ok=not wrong, phases=fell, wrong=wrong)


def persistent(findings, bench, judge, case):
    """The memory stays taken: an error says so, and everything is as before the window."""
    room = _generous(bench, judge, case)
    for moment in MOMENTS:
        hog = Hog(bench.memory, moment, 1, keeps=True)
        played = bench.play(case, limit_bytes=room, hog=hog)
        names = [] if played.left is None else differences(played.states[-1], played.left)
        raised = "nothing was raised" if played.error is None else f"{type(played.error).__name__}: {played.error}"
        changed = f"; changed: {names[:6]}" if names else "; nothing changed"
        # If the rest fits in memory freed meanwhile by others, continuing is right.
        good = not judge.wrong(case, played)
        findings.add(f"{case}: taken in {moment} for good", raised[:300] + changed, ok=good)


def _generous(bench, judge, case):
    """Return a limit far above the need of an undisturbed training."""
    undisturbed = judge.clean(case, ())
    return bench.reserved_bytes() + 2 * undisturbed.peak_bytes + (64 * MIB if bench.memory.device.type == "cuda" else 0)


def _said(fell, wrong, damaged):
    phases = ", ".join(f"{number} in {phase}" for phase, number in sorted(fell.items())) or "memory never ran out"
    bits = f"NOT THE SAME: {wrong[:3]}" if wrong else "every bit the same"
    return f"{phases}; {bits}" + (f"; {damaged} told as damage" if damaged else "")


if __name__ == "__main__":
    run_part(failures, __doc__)
