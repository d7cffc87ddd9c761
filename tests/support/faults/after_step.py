"""Trainings in which memory runs out after the optimizer has stepped: at one call of Python code, or at one operator.

The optimizer counts its steps, so that one too many shows; it and the scheduler draw random numbers, so that a
checkpoint of half a moment, or with the random state of another one, shows where a run goes on from it.
"""

import contextlib
import gc
import io
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoaccum

WINDOWS, TARGET = 4, 4
_LIBRARY = str(Path(autoaccum.__file__).parent)
_SCHEDULERS = str(Path(torch.optim.lr_scheduler.__file__))


class Fault(TorchDispatchMode):
    """Runs out of memory at a point after the optimizer's step of a window, and before the model runs again.

    Args:
        window: The window, from 1.
        point: Which of the points, from 1; None only counts them.
        kind: "call": calls of Python code in the library and in the scheduler; "operator": those of PyTorch.
        lasts: Whether every later point fails too.
    """

    def __init__(self, window, point, kind, *, lasts=False):
        super().__init__()
        self.window, self.point, self.kind, self.lasts = window, point, kind, lasts
        self.count = self.hits = 0
        self.where = ""
        self.in_step = False
        self.is_armed = self.has_moved = False

    def arm(self):
        self.is_armed, self.has_moved = True, False
        if self.kind == "call":
            self._former = sys.gettrace()
            sys.settrace(self._called)

    def disarm(self):
        if self.is_armed and self.kind == "call":
            sys.settrace(self._former)
        self.is_armed = False

    def _called(self, frame, event, _argument):
        if event == "call" and self.is_armed:
            name = frame.f_code.co_filename
            is_scheduler = name == _SCHEDULERS or frame.f_code.co_qualname.startswith("Drawing.")
            # To put handlers of signals back is a method in Python, and fails no sooner than a statement `finally`.
            is_library = name.startswith(_LIBRARY) and frame.f_code.co_qualname != "deferred.__exit__"
            if is_scheduler or is_library:
                self._note(frame.f_code.co_qualname)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if self.is_armed and self.kind == "operator" and not operator.is_view:
            self._note(str(operator))
        return operator(*args, **(kwargs or {}))

    def _note(self, what):
        self.count += 1
        if self.point is None or not (self.count == self.point or (self.lasts and self.count > self.point)):
            return
        self.hits += 1
        if self.hits == 1:
            self.where = what
            self.in_step = not self.has_moved
        if not self.lasts:
            self.disarm()
        raise MemoryError(f"injected at {what}")


class Counting(torch.optim.SGD):
    """Counts its steps, and rounds by chance as low-precision optimizers do."""

    def __init__(self, parameters, fault, *, draws):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.steps, self.fault, self.draws = 0, fault, draws

    def step(self, closure=None):
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.rand(()) if self.draws else torch.ones(()), alpha=1e-3)
        self.steps += 1
        if self.steps == self.fault.window:
            self.fault.arm()


class Drawing(torch.optim.lr_scheduler.StepLR):
    """Draws what it multiplies the rate by, so that each of its moves counts."""

    def __init__(self, optimizer, *, draws):
        self.draws = draws
        super().__init__(optimizer, step_size=1, gamma=0.9)

    def step(self, *arguments):
        self.gamma = self._drawn()
        super().step(*arguments)
        self.optimizer.fault.has_moved = True

    def _drawn(self):
        drawn = torch.rand(64)
        return 0.5 + 0.5 * float(drawn.mean()) if self.draws else 0.9


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))


@dataclass
class Played:
    error: str | None  # what ended it, as "type: message"
    kind: str  # the error's type
    named: int | None  # the update that an `StepCompleteError` names
    steps: int  # that the optimizer made
    told: int  # steps that `fit` told of; -1 where it raised
    is_as_planned: bool  # whether no window was repeated in smaller micro-batches
    parameters: list  # in the end
    rate: float  # of learning, in the end
    fault: dict  # what failed


def play(window=0, point=None, kind="call", *, lasts=False, model=None, draws=True, **options):
    """Train once; window 0 is none, and what ranks draw differs."""
    fault = Fault(window, point, kind, lasts=lasts)
    if model is None:
        torch.manual_seed(0)
        model = net()
    optimizer = Counting(model.parameters(), fault, draws=draws)
    scheduler = Drawing(optimizer, draws=draws)
    dataset = torch.utils.data.TensorDataset(torch.randn(WINDOWS * TARGET, 3), torch.arange(WINDOWS * TARGET) % 2)
    loader = torch.utils.data.DataLoader(dataset, batch_size=TARGET, shuffle=True)
    arguments = {"loss": nn.CrossEntropyLoss(), "device": "cpu", "progress": False} | options
    error, told, is_as_planned = None, -1, True
    model.register_forward_pre_hook(lambda *_: fault.disarm())
    with (
        fault,
        contextlib.redirect_stderr(io.StringIO()),
        # Or the number of calls would depend on time.
        mock.patch.multiple(time, perf_counter=lambda: 0.0, monotonic=lambda: 0.0),
    ):
        try:
            result = autoaccum.fit(
                model, loader, TARGET, optimizer=optimizer, scheduler=scheduler, max_steps=WINDOWS, micro_batch=2,
                **arguments,
            )  # fmt: skip
            told = result.steps
            is_as_planned = all(max(report.micro_batches) == 2 for report in result.history)
        except Exception as raised:  # noqa: BLE001 - it is judged
            error = raised
        finally:
            fault.disarm()
    return Played(
        error=None if error is None else f"{type(error).__name__}: {error}",
        kind="" if error is None else type(error).__name__,
        named=getattr(error, "step", None),
        steps=optimizer.steps,
        told=told,
        is_as_planned=is_as_planned,
        parameters=[parameter.detach().clone() for parameter in model.parameters()],
        rate=optimizer.param_groups[0]["lr"],
        fault={name: getattr(fault, name) for name in ("count", "hits", "where", "in_step")},
    )


def after_each_window(**options):
    """The parameters of the undisturbed training after each of its windows, and what became of it."""
    seen = []
    torch.manual_seed(0)
    model = net()

    class Seen(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            seen.append([parameter.detach().clone() for parameter in model.parameters()])

    return seen, play(model=model, callbacks=[Seen()], **options)


def same(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def near(some, others):
    """The same but for rounding, which differs in smaller micro-batches."""
    return all(torch.allclose(one, other, rtol=0.0, atol=1e-7) for one, other in zip(some, others, strict=True))


# --- one process ------------------------------------------------------------------------------------------------------


def judged(folder, window, point, kind, expected, *, lasts=False, checkpoint_every=1):
    """Train with one fault, go on from the checkpoint that is left, and return what is not as promised.

    Args:
        folder: An empty folder.
        window: After whose update memory runs out.
        point: At which point.
        kind: Of which kind.
        expected: What `after_each_window` returned.
        lasts: Whether memory stays out.
        checkpoint_every: Windows between checkpoints.

    Returns:
        The losses, and how it ended: the type of its error, "" for none.
    """
    after, end = expected
    found = play(window, point, kind, lasts=lasts, checkpoint=folder, checkpoint_every=checkpoint_every)
    where = f"window {window}, {kind} {point} ({found.fault['where']})"
    losses = []
    if not found.fault["hits"]:
        losses.append(f"{where}: no fault")
    if found.error is None:
        # The first step of all works on parameters of which there is a copy, and may be taken back and made again.
        alike = same if found.is_as_planned else near
        if not alike(found.parameters, end.parameters) or (found.steps != WINDOWS and window != 1):
            losses.append(f"{where}: {found.steps} steps, told {found.told}, not the parameters of {WINDOWS} windows")
        return losses, ""
    if not same(found.parameters, after[window - 1]):
        losses.append(f"{where}: {found.steps} steps, not the parameters of {window} windows ({found.error})")
    if found.steps != window and window > 1:
        losses.append(f"{where}: {found.steps} steps for {window} windows ({found.error})")
    # Within the optimizer's own method, behind its last write, it may have been half-way for all that can be seen.
    if found.kind != "StateDamagedError" and (
        found.fault["in_step"] and not lasts and (found.kind, found.named) != ("StepCompleteError", window)
    ):
        losses.append(f"{where}: does not name the update ({found.error})")
    more = play(0, checkpoint=folder, checkpoint_every=1)
    if more.error is not None or not same(more.parameters, end.parameters) or more.rate != end.rate:
        losses.append(f"{where}: goes on to another end ({found.error}; {more.error})")
    return losses, found.kind


def points_of(folder, window, kind, *, checkpoint_every=1):
    return play(window, None, kind, checkpoint=folder, checkpoint_every=checkpoint_every).fault["count"]


# --- several ranks ----------------------------------------------------------------------------------------------------


def on_ranks(rank, size, folder, who, tries, *, keeps=True):
    """Train once for each try, a window, a point and a kind, with the fault on one rank; what became of it.

    What one rank leaves unsaid the others must not hear in the next try, so each has a process group of its own.
    """

    def meet(name):
        where, limit = f"file://{folder}/{name}", timedelta(seconds=120)
        distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=limit)

    found = []
    distributed.destroy_process_group()
    for number, (window, point, kind) in enumerate(tries):
        meet(f"meet-{number}")
        mine = window if rank == who else 0
        kept = {"checkpoint": f"{folder}/run-{number}", "checkpoint_every": 2} if keeps else {}
        found.append(play(mine, point, kind, draws=False, shard_data=True, **kept))
        distributed.destroy_process_group()
        gc.collect()  # what holds on to the group keeps its connections open, and the other rank waiting
    meet("end")
    distributed.barrier()  # the pool ends it at once, and another may still connect to it
    return found


def judged_on_ranks(tried, answers, who):
    """Return what is not as promised: `answers` by rank, of each what became of every try."""
    losses = []
    for (window, point, kind), outcomes in zip(tried, zip(*answers, strict=True), strict=True):
        where = f"rank {who}, window {window}, {kind} {point} ({outcomes[who].fault['where']})"
        ends = " | ".join(f"{one.steps} steps, {one.error or 'end'}" for one in outcomes)
        if not all(same(one.parameters, outcomes[0].parameters) for one in outcomes):
            losses.append(f"{where}: parameters differ ({ends})")
        if len({one.error is None for one in outcomes}) > 1:
            losses.append(f"{where}: not all have ended alike ({ends})")
        is_first = window == 1  # whose step may be taken back and made again
        wanted = {WINDOWS} if outcomes[0].error is None else {window}
        if not is_first and {one.steps for one in outcomes} != wanted:
            losses.append(f"{where}: {ends}")
        if outcomes[who].error is not None and any(
            one.kind != "RankFailedError" for rank, one in enumerate(outcomes) if rank != who
        ):
            losses.append(f"{where}: others do not know of it ({ends})")
    return losses
