"""Part of gpu.py: during training another process takes most of the card's memory, and later frees it.

Nobody can take what the training's allocator holds, so the training first empties its cache, as an evaluation or
another model in the same process would cause. The neighbour then leaves room for about half a window.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import torch
from gpu_common import MIB, run_part, settle, size, spread, start_child
from gpu_models import Work, be_deterministic, whole_state

import autoaccum
from autoaccum._memory import Simulated, backend_for
from autoaccum._system.notices import Notices
from faults import differences

_TAKEN_AFTER, _GIVEN_AFTER = 16, 40
_ROOM = 0.6  # share of a whole window's memory, excluding parameters


class OtherProcess:
    """A child process that holds memory of the card on command."""

    def __init__(self):
        self._child = start_child(
            "gpu_neighbour.py", "--child", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None
        )
        self.answer = self._hear()

    def take_all_but(self, room_bytes):
        """Make it take all free memory except `room_bytes`; return how much it took."""
        return int(self._ask(f"take {room_bytes}"))

    def give(self):
        """Make it free everything."""
        self._ask("give")

    def end(self):
        """End it."""
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(5)
        self._child.kill()

    def _ask(self, text):
        self._child.stdin.write(text + "\n")
        self._child.stdin.flush()
        return self._hear()

    def _hear(self):
        line = self._child.stdout.readline().strip()
        if not line:
            raise RuntimeError("the neighbour ended")
        return line


def child():
    """Take and free memory on command, until the input ends."""
    torch.zeros(1, device="cuda")
    blocks = []
    print("ready", flush=True)
    for line in sys.stdin:
        order, *number = line.split()
        if order == "give":
            blocks.clear()
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            print("given", flush=True)
            continue
        room = int(number[0])
        for block in (2**30, 128 * MIB, 16 * MIB, 2 * MIB):
            while torch.cuda.mem_get_info()[0] - room >= block:
                try:
                    blocks.append(torch.empty(block, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
        print(sum(block.nbytes for block in blocks), flush=True)


class SameProcess:
    """Replaces the neighbour on a simulated device."""

    def __init__(self, memory):
        self._memory, self._block = memory, None

    def take_all_but(self, room_bytes):
        """Take all free memory except `room_bytes`; return how much that is."""
        taken = max(0, self._memory.reading().free_bytes - room_bytes)
        self._block = torch.empty(taken, dtype=torch.uint8)
        return taken

    def give(self):
        """Free everything."""
        self._block = None

    def end(self):
        """Do nothing."""


class Events(autoaccum.Callback):
    """Starts and ends the neighbour's use, and records every step."""

    def __init__(self, memory, neighbour):
        self._memory, self._neighbour = memory, neighbour
        self.reports = []
        self.seconds = []
        self.taken_bytes = self.room_bytes = 0
        self._last_s = None

    def on_step(self, report, *, epoch):  # noqa: ARG002 - as the base has it
        """Record the step, and let the neighbour act between two."""
        report.loss  # noqa: B018 - waits for the device
        now = time.perf_counter()
        self.seconds.append(None if self._last_s is None else now - self._last_s)
        self.reports.append(report)
        if report.step == _TAKEN_AFTER:
            peak = self._memory.peak_bytes()
            self._memory.release()
            held = self._memory.reading().used_bytes
            self.room_bytes = int(_ROOM * (peak - held))
            self.taken_bytes = self._neighbour.take_all_but(self.room_bytes)
        elif report.step == _GIVEN_AFTER:
            self._neighbour.give()
        self._last_s = time.perf_counter()


def neighbour(findings, options):
    """Train beside a neighbour, then alone with the reported cuts."""
    be_deterministic()
    device = torch.device(options.device)
    is_card = device.type == "cuda"
    sizes = (8, 64, 16) if options.tiny else (64, 128, 1024)
    work = Work("layers", *sizes, 4)
    epochs = 30
    memory = backend_for(device) if is_card else Simulated("1GiB")
    other = OtherProcess() if is_card else SameProcess(memory)
    try:
        events, result, disturbed = _disturbed(work, epochs, memory, other)
    finally:
        other.end()
    reports = events.reports
    findings.add(
        "the neighbour took",
        f"{size(events.taken_bytes)}, and left {size(events.room_bytes)}",
        ok=events.taken_bytes > 0,
    )
    cuts = [report.micro_batches for report in reports]
    spans = {"before": (1, _TAKEN_AFTER), "during": (_TAKEN_AFTER, _GIVEN_AFTER), "after": (_GIVEN_AFTER, len(reports))}
    for name, (begin, end) in spans.items():
        took = [seconds * 1e3 for seconds in events.seconds[begin:end] if seconds is not None]
        ran_out = sum(report.oom_events for report in reports[begin:end])
        seen = list(dict.fromkeys("+".join(map(str, cut)) for cut in cuts[begin:end]))
        expected = {"before": ran_out == 0, "during": ran_out > 0, "after": len(cuts[-1]) == 1}[name]
        findings.add(
            f"{name}: steps {begin + 1} to {end}",
            f"cuts {', '.join(seen)}; {ran_out} times out of memory; {spread(took, ' ms a step')}",
            ok=expected,
            cuts=seen,
            ran_out=ran_out,
        )
    grown = next((report.step for report in reports[_GIVEN_AFTER:] if len(report.micro_batches) == 1), None)
    findings.add(
        "whole windows again", "never" if grown is None else f"{grown - _GIVEN_AFTER} steps after", ok=bool(grown)
    )
    order, state = disturbed
    all_used = order == work.all_ids() * epochs and result.samples == epochs * len(work.all_ids())
    findings.add("samples", f"{result.samples}, each once an epoch, in order: {all_used}", ok=all_used)
    settle(device)
    alone = _alone(work, epochs, memory, cuts)
    names = differences(state, alone)
    found = f"NOT THE SAME: {names[:6]}" if names else "every bit the same"
    findings.add("an undisturbed run with these cuts", found, ok=not names)


def _model(work, epochs):
    model = work.model()
    # Room for every sample of the run; larger than what is copied for every window anyway.
    model.register_buffer("order", torch.full((2 * epochs * work.windows * work.samples,), -1))
    return model


def _adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-4)


def _disturbed(work, epochs, memory, other):
    model = _model(work, epochs)
    optimizer = _adam(model.parameters())
    events = Events(memory, other)
    result = autoaccum.fit(
        model,
        work.batches(),
        work.samples,
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=optimizer,
        epochs=epochs,
        device=memory,
        precision="fp32",
        micro_batch=work.samples,
        callbacks=[events],
        progress=False,
    )
    return events, result, (model.noted(), whole_state(model, optimizer, None))


def _alone(work, epochs, memory, cuts):
    model = _model(work, epochs)
    optimizer = _adam(model.parameters())
    with memory.limited(None):
        runner = autoaccum.Runner(
            model,
            optimizer,
            autoaccum.plan(work.samples, work.samples),
            loss=torch.nn.CrossEntropyLoss(),
            device=memory,
            precision="fp32",
            notices=Notices(silent=True),
        )
        for window, cut in zip(work.batches() * epochs, cuts, strict=True):
            runner.plan = autoaccum.Plan(work.samples, cut)
            runner.step(window)
    return whole_state(model, optimizer, None)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child()
    else:
        run_part(neighbour, __doc__)
