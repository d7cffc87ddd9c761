"""The training loop of `fit`: makes one optimizer step per window and evaluates after each epoch."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import deque
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoaccum._arguments import counted
from autoaccum._data.loaders import keeps_order, unlike_batch_size
from autoaccum._engine import devices
from autoaccum._engine.finiteness import Finiteness
from autoaccum._engine.forward_backward import drop_old_gradients
from autoaccum._engine.optimizers import name_of
from autoaccum._oom import first_line
from autoaccum._records import SAMPLES, FitResult
from autoaccum._system import signals
from autoaccum._training.checkpoints import Checkpoints
from autoaccum._training.interrupts import Interrupts
from autoaccum._training.plan_lifecycle import PlanLifecycle
from autoaccum._training.progress import TrainingProgress
from autoaccum._training.validation import Validation
from autoaccum.errors import DoesNotFitError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from autoaccum._data.batches import Window
    from autoaccum._records import Evaluation, ProbeResult, StepReport
    from autoaccum._sizing.cutting import Cutting
    from autoaccum._training.checkpoint_contents import LoopState
    from autoaccum._training.fit_context import FitContext

# Unread losses stay on the device. Reading them at this interval, in windows, takes a single wait.
_READ_EVERY = 256
# Reports that are kept for `FitResult.history`; each takes some 600 bytes.
_HISTORY = 10_000
# In a forked process: what its parent still trains with. To free it would end the workers of the parent's loader.
_of_parent: list[Training] = []
_NOT_SHUFFLED = (
    "the loader does not shuffle; where its samples are sorted, those of a window are more alike than those of the "
    "data, and the noise scale that is measured is too small; pass shuffle=True"
)


class Training:
    """Trains as one call of `fit` asks for.

    Raises:
        InvalidInputError: A metric cannot be used.
    """

    def __init__(self, call: FitContext) -> None:
        self._call, self._step, self._notices, self._world = call, call.step, call.notices, call.world
        self._progress = TrainingProgress(call)
        self._lifecycle = PlanLifecycle(call, self._progress)
        self._observers = self._lifecycle.observers
        on_nan, world = call.step.options.on_nan, call.world
        self._finiteness = Finiteness(call.step, on_nan, is_first=world.is_main, is_alone=world.is_alone)
        self._checkpoints: Checkpoints | None = None
        if call.saving is not None:
            self._checkpoints = Checkpoints(call, call.saving, self._progress, self._lifecycle, self._finiteness)
        self._interrupts = Interrupts(call, self._progress, self._lifecycle, self._checkpoints)
        self._validation: Validation | None = None
        if call.val_loader is not None:
            observers, progress = self._observers, self._progress  # not `self`, which would hold itself
            self._validation = Validation(
                call, call.val_loader, lambda event: observers.on_oom(event, step=progress.state.windows)
            )
        self._limit = ExitStack()  # holds the memory limit while training runs
        self._holds_data = False  # whether that limit was counted with a window in memory
        self._history: deque[StepReport] = deque(maxlen=_HISTORY)
        self._evaluations: list[Evaluation] = []
        self._resumed_from: int | None = None
        # Seconds of this call, as in its result.
        doing = ("starting up", "search", "computing again", "waiting for data", "evaluations")
        self._spent = dict.fromkeys(doing, 0.0)

    @property
    def windows(self) -> int:
        """Number of windows completed, including those of earlier calls that this one resumes.

        A window counts as soon as its optimizer step is made, even if the scheduler then fails and no checkpoint can
        hold the state after it.
        """
        return max(self._progress.state.windows, self._step.optimizer_steps.made)

    def run(self, started: float) -> FitResult:
        """Train to the end.

        Args:
            started: Start of the call, from `time.perf_counter`.
        """
        call, memory = self._call, self._step.memory
        process, lock = os.getpid(), None if self._checkpoints is None else self._checkpoints.lock
        # Outermost, so that a SIGTERM ends the process only after the callbacks were notified.
        with self._interrupts.watching(), nullcontext() if lock is None else lock.call:
            try:
                self._observers.on_fit_start(
                    epochs=call.epochs, max_steps=call.max_steps, steps_per_epoch=call.steps_per_epoch
                )
                with devices.oom_explained(memory, "what ranks send each other"):
                    self._world.begin(self._step, self._interrupts.requests, self._lifecycle.largest_size)
                begins_with, probed = self._begin()
                with self._limit:
                    self._limit_memory()
                    self._lifecycle.begin(begins_with)
                    if self._checkpoints is not None:
                        self._checkpoints.check()
                        self._finiteness.note()
                    self._lifecycle.tell_beginning(begins_with.plan, probed)
                    self._spent["starting up"] = time.perf_counter() - started - sum(self._spent.values())
                    self._interrupts.run(self._train)
                if call.noise is not None and self._progress.state.windows not in (0, self._resumed_from):
                    own, in_tokens, state = name_of(self._step.optimizer), call.counts != SAMPLES, self._progress.state
                    # Where the target is in tokens, what windows have had on average.
                    samples = max(1, round(state.samples / state.windows)) if in_tokens else call.target_batch
                    self._notices.say(call.noise.summary(samples, own, in_tokens=in_tokens))
                result = self._result(started)
            except BaseException as error:
                if os.getpid() == process:
                    self._leave_result(error, started)
                    self._end(None, error, started)
                else:
                    _of_parent.append(self)
                raise
            self._end(result, None, started)
        return result

    def _limit_memory(self) -> None:
        """Enforce the memory limit, counted from what this process holds now."""
        with devices.oom_explained(self._step.memory, "what training needs in addition to the model"):
            self._limit.close()
            self._limit.enter_context(self._step.memory.limited(self._call.limit_bytes))

    def _leave_result(self, error: BaseException, started: float) -> None:
        """Give an error that ends the call the result so far, which a notebook would otherwise lose at Ctrl-C.

        Interactive sessions, in which it can be read, are told where it is: Python's own prompt and IPython set
        `sys.ps1`.
        """
        try:
            # The result of an earlier call is not the user's own attribute: an instance may be raised again.
            if hasattr(error, "result") and not isinstance(error.result, FitResult):
                return
            error.result = replace(self._result(started), stopped=type(error).__name__)  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001 - the user's own may take no attribute, and nothing here must hide it
            return
        if isinstance(error, KeyboardInterrupt):
            hint = "; sys.last_value.result is the result so far" if hasattr(sys, "ps1") else ""
            if self._checkpoints is None:
                hint += "; nothing is saved, as checkpoint=FOLDER would have done"
            self._notices.say(f"interrupted after step {self._progress.state.windows}{hint}")

    def _end(self, result: FitResult | None, error: BaseException | None, started: float) -> None:
        """Close the loader and notify every callback, whoever raises.

        The first error ends the call, with later ones as notes on it; only an interrupt comes before another error.

        Args:
            result: What `fit` returns; None after an error.
            error: What ended the training; None if it ran to its end.
            started: Start of the call.
        """
        # A traceback may keep this training alive; the loader's workers must end all the same.
        ends = [self._progress.close]
        ends += self._observers.each("on_fit_end", result)
        if self._checkpoints is not None:
            ends.append(self._checkpoints.lock.call.close)
        first = error
        for end in ends:
            try:
                end()
            except BaseException as failure:  # noqa: BLE001 - raised below, or noted
                if first is None or (isinstance(first, Exception) and not isinstance(failure, Exception)):
                    first = failure
                    self._leave_result(failure, started)
                elif failure is not first:
                    what = f"{type(failure).__name__}: {first_line(failure)}"
                    first.add_note(f"autoaccum: while the call ended, another error followed ({what})")
        if first is None:
            try:
                self._world.gather("end of the call", None)  # in place of which a rank reports its error
            except BaseException as failure:  # noqa: BLE001 - raised below
                first = failure
                self._leave_result(failure, started)
        try:
            if first is not None and first is not error:
                raise first
        finally:
            del first  # the traceback has this frame

    def _result(self, started: float) -> FitResult:
        checkpoints = self._checkpoints
        return FitResult(
            steps=self._progress.state.windows,
            samples=self._progress.state.samples,
            history=tuple(self._history),
            plan=self._lifecycle.plan,
            plans=self._lifecycle.plans,
            oom_events=self._lifecycle.oom_events,
            evaluations=tuple(self._evaluations),
            elapsed_s=time.perf_counter() - started,
            resumed_from=self._resumed_from,
            checkpoint=None if checkpoints is None else checkpoints.storage.newest,
            best_checkpoint=None if checkpoints is None else checkpoints.storage.best,
            stopped=self._progress.stopped,
            noise_scale=None if self._call.noise is None else self._call.noise.samples,
            savings=self._call.savings.names,
            warnings=(
                *self._step.objective.knowledge.said.texts,
                *(() if checkpoints is None else checkpoints.differences),
            ),
            skipped_samples=self._lifecycle.skipped_samples,
            time_spent=self._spent | ({} if checkpoints is None else {"checkpoints": checkpoints.spent_s}),
        )

    # --- the beginning ------------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[Cutting, ProbeResult | None]:
        """Find the initial cut in a checkpoint or with the first window; then make the scheduler."""
        found = None if self._checkpoints is None else self._checkpoints.find()
        if found is None:
            if self._validation is not None:  # before drawing from the training loader, which may be the same one
                self._validation.try_out(self._lifecycle.most_asked)
            with self._timed("waiting for data"):
                first, self._holds_data = self._progress.first_part(), True
            drop_old_gradients(self._step, self._notices)
            unlike = None
            if first.spans:
                unlike = unlike_batch_size(self._world.loader, first.spans[0].piece, self._step.objective.split)
            if unlike is not None:
                self._notices.say(unlike)
            if self._call.noise is not None and keeps_order(self._world.loader):
                self._call.noise.say(_NOT_SHUFFLED)
            with self._timed("search"):
                begins_with = self._lifecycle.find(first)
        self._call.schedule.begin(is_kept=self._checkpoints is not None)
        if self._validation is not None:
            self._call.schedule.check_loss(has_loss=self._validation.has_loss)
        return begins_with if found is None else (self._resume(*found), None)

    @contextmanager
    def _timed(self, doing: str) -> Iterator[None]:
        """Add the seconds of a block to those that were spent."""
        began = time.perf_counter()
        yield
        self._spent[doing] += time.perf_counter() - began

    def _resume(self, path: Path, content: dict[str, Any]) -> Cutting:
        """Resume from a checkpoint of an earlier call of `fit`; return how windows are cut."""
        assert self._checkpoints is not None
        cutting = self._checkpoints.resume(path, content)
        self._resumed_from = windows = self._progress.state.windows
        if self._progress.is_over:
            stopped = "" if self._progress.stopped is None else f" and it was stopped ({self._progress.stopped})"
            self._notices.say(
                f"the run in {path.parent} is finished: {windows} steps are done{stopped}, so there is nothing to "
                "do; pass more epochs= or max_steps= to continue it"
            )
        return cutting

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Train from the present state to the end: epochs of windows, with what comes between them."""
        progress = self._progress
        self._world.note_step(progress.state.windows)
        self._stop_if_asked()
        if not progress.is_over:
            self._evaluate_if_due()  # where a run was interrupted in that evaluation
        while not progress.is_over:
            begun = progress.state
            window = self._next_window()
            if progress.has_nothing(window):
                self._notices.say(
                    f"the loader gave nothing in epoch {progress.state.position.epoch}, so training ends there; a "
                    "generator can be read only once, a DataLoader or a list every epoch"
                )
                if self._call.val_every is not None and progress.state.windows and not self._is_evaluated:
                    self._evaluate(progress.state.position.epoch - 1)
                break
            while window is not None and self._step_with(window):
                # Release the window before loading the next one, so that memory holds only one of them.
                window = None
                window = self._next_window()
            if progress.state.windows == begun.windows and not begun.position.batches and not progress.is_over:
                if not self._world.is_alone:  # leaving samples out is for one process
                    raise progress.no_window()
                raise DoesNotFitError(
                    f"no sample of epoch {begun.position.epoch} fits any more after step {begun.windows}, and all were "
                    "left out (on_too_large='skip'); see what else takes the memory"
                )
            self._end_epoch()
            self._say_if_epochs_are_small(begun)
            self._stop_if_asked()
        self._finiteness.finish()

    def _say_if_epochs_are_small(self, begun: LoopState) -> None:
        """Print once that an optimizer step never has the samples asked for, given the state before an epoch."""
        now, target = self._progress.state, self._call.target_batch
        samples, is_whole = now.samples - begun.samples, not begun.position.batches
        if is_whole and now.windows == begun.windows + 1 and samples < target and self._call.counts == SAMPLES:
            self._notices.say(
                f"an epoch has {counted(samples, 'sample')}, fewer than target_batch={target}: an optimizer step takes "
                "the samples of one epoch"
            )

    def _next_window(self) -> Window | None:
        with self._timed("waiting for data"):
            window = self._progress.next_window()
        if window is not None and window.samples and not self._holds_data:  # the first after a resume
            self._holds_data = True
            if self._step.memory.is_soft:
                self._limit_memory()
        return window

    def _stop_if_asked(self) -> None:
        """End the training here if a callback of any process has asked for it."""
        asked = self._world.gather("stop", self._observers.reason)
        reason = next((one for one in asked if one is not None), None)
        if reason is not None:
            self._progress.stop(reason)

    def _step_with(self, window: Window) -> bool:
        """Make the optimizer step of a window and do what follows it; return False if the window is left out."""
        is_trial = self._lifecycle.current.sizing.is_learning
        skipped = self._lifecycle.skipped_samples
        self._deal(window)
        report = self._lifecycle.step(window)
        if report is None:
            return skipped < self._lifecycle.skipped_samples  # nothing was left, so there is no step
        if is_trial:
            self._spent["search"] += report.elapsed_s
        else:
            again = report.recomputed_samples
            self._spent["computing again"] += report.elapsed_s * again / (report.samples + again)
        self._history.append(report)
        if not report.step % _READ_EVERY:
            for earlier in itertools.islice(reversed(self._history), _READ_EVERY):
                _ = earlier.loss, earlier.grad_norm
        self._observers.on_step(report, epoch=self._progress.state.position.epoch)
        self._finiteness.see(report)
        if self._checkpoints is not None:
            self._finiteness.note()
        if self._evaluate_if_due():
            self._stop_if_asked()
        if self._interrupts.after_window():
            self._stop_if_asked()
        return True

    def _deal(self, window: Window) -> None:
        """Let a window hold the samples that this process computes."""
        noise, number = self._call.noise, self._progress.state.windows + 1
        if noise is not None and noise.is_due(number):  # which takes each part for a random one of the window
            return
        memory = self._step.memory
        with self._timed("waiting for data"), memory.lifted(), memory.elsewhere():
            self._world.deal(window, self._lifecycle.current.sizing.costs)

    def _end_epoch(self) -> None:
        """Evaluate and notify callbacks after an epoch's last window; also runs after the last window of all."""
        position = self._progress.state.position
        is_due = False
        if not position.closed:
            self._observers.on_epoch_end(position.epoch)
            is_due = self._call.val_every is None or (self._progress.ends_training and not self._is_evaluated)
        if not is_due or not self._evaluate(position.epoch, ends_epoch=True):
            with signals.deferred():
                self._progress.move_on(None, ends_epoch=True)

    def _evaluate_if_due(self) -> bool:
        """Evaluate between two windows if `val_every` asks for it; return whether there was an evaluation."""
        state = self._progress.state
        if (
            self._call.val_every is None
            or not state.windows
            or state.windows % self._call.val_every
            or self._is_evaluated
        ):
            return False
        return self._evaluate(state.position.epoch)

    @property
    def _is_evaluated(self) -> bool:
        """Whether the present state was evaluated."""
        return self._progress.state.evaluated == self._progress.state.windows

    def _evaluate(self, epoch: int, *, ends_epoch: bool = False) -> bool:
        """Evaluate if there is validation data, move on, and save the best so far."""
        if self._validation is None:
            return False
        with self._validation.run(self._lifecycle.current.sizing.plan.micro_batch) as evaluation:
            self._spent["evaluations"] += evaluation.elapsed_s
            self._observers.on_evaluation(evaluation, epoch=epoch, step=self._progress.state.windows)
        with signals.deferred():
            self._evaluations.append(evaluation)
            self._progress.move_on(evaluation, ends_epoch=ends_epoch)
        self._interrupts.after_evaluation()
        return True
