"""The loop of `fit`: epochs of windows, an update from each, evaluations; taken up again from a checkpoint.

Whatever ends it, at whatever moment, finds one whole state: the one after the last whole window. What moves with an
update moves inside it, while interrupts are held back (`_after_update`); what follows an epoch moves together at its
end. That state is what a checkpoint holds, and where a run that goes on begins.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoaccum import devices, oom, signals
from autoaccum.batches import Window, stream
from autoaccum.callbacks import Callback
from autoaccum.checkpoint import Contents, Cutting, Moment, without_tensors
from autoaccum.company import END, SAVE, WHOLE, part_of
from autoaccum.errors import (
    CheckpointError,
    DeviceLostError,
    DoesNotFitError,
    InvalidInputError,
    RankFailedError,
    StartAgainError,
    StateDamagedError,
)
from autoaccum.evaluation import Evaluator
from autoaccum.position import Track
from autoaccum.records import FitResult
from autoaccum.runner import Runner
from autoaccum.schedule import Schedule
from autoaccum.sharding import of_whole
from autoaccum.state import Mark, RandomState
from autoaccum.step import drop_old_gradients
from autoaccum.storage import check_that_it_can_be_kept

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from autoaccum.company import Company
    from autoaccum.compiling import Compiling
    from autoaccum.evaluation import Metric
    from autoaccum.fallback import Fallbacks
    from autoaccum.finding import Finding
    from autoaccum.notices import Notices
    from autoaccum.position import Position, RandomStates
    from autoaccum.records import Evaluation, MemoryEvent, Plan, ProbeResult, StepReport, Trial
    from autoaccum.saving import Saver
    from autoaccum.step import TrainingStep

# Losses that nobody has read wait on the device; every so many windows they are read, all in one wait.
_READ_EVERY = 256


class Training(Callback):
    """One call of `fit`, its arguments checked. As a callback of its own it notes the plans.

    Args:
        step: The training step.
        loader: As for `fit`, and so are those that are not described.
        target_batch: Samples a window.
        epochs: Epochs after which to stop; None for no such end.
        max_steps: Windows after which to stop; None for no such end.
        steps_per_epoch: Windows that an epoch has, where that is known.
        last_window: What becomes of a shorter last one.
        finding: Finds how windows are to be cut.
        val_loader: Evaluated after each epoch, if there is one.
        metrics: For the evaluation.
        callbacks: Told what happens, the progress among them.
        notices: Where choices made for the user are said.
        saver: Writes and finds checkpoints; None where none are asked for.
        loss_scope: As for `fit`.
        batchnorm: As for `fit`.
        compiling: Compiles the model; None where that is not asked for.
        fallbacks: Make a step take less memory where not even one sample fits.
        company: The other processes of this training; None where this is the only one.

    Raises:
        InvalidInputError: A metric cannot be used.
    """

    def __init__(
        self,
        step: TrainingStep,
        loader: Iterable[Any],
        target_batch: int,
        *,
        epochs: int | None,
        max_steps: int | None,
        steps_per_epoch: int | None,
        last_window: str,
        finding: Finding,
        val_loader: Iterable[Any] | None,
        metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None,
        callbacks: Sequence[Callback],
        notices: Notices,
        saver: Saver | None,
        loss_scope: str,
        batchnorm: str,
        compiling: Compiling | None,
        fallbacks: Fallbacks,
        company: Company | None = None,
    ) -> None:
        self._company = company
        self._step = step
        self._loss_scope = loss_scope
        self._batchnorm = batchnorm
        self._compiling = compiling
        self._fallbacks = fallbacks
        self._target_batch = target_batch
        self._epochs = epochs
        self._max_steps = max_steps
        self._steps_per_epoch = steps_per_epoch
        self._last_window = last_window
        self._others = tuple(callbacks)
        self._callbacks = (self, *callbacks)
        self._notices = notices
        self._saver = saver
        self._watch = signals.Watch()
        self._random = RandomState(step.memory.device, step.objective.modules)
        self._loader = loader
        self._track = Track(loader if company is None else company.loader, None if saver is None else self._random)
        self._moment = Moment(0, 0, self._track.at_start(1), self._random_states())
        # Whether model, optimizer and scheduler are those of the moment: not while an update is being made.
        self._is_whole = True
        self._windows: Iterator[Window] | None = None
        self._first: Window | None = None
        self._coming: tuple[int, Position] = (0, self._moment.position)
        self._finding = finding
        # Whether an earlier call has found how windows are to be cut.
        self._is_found = self._is_timed = False
        self._bytes_per_sample: int | None = None
        self._sample_bytes: int | None = None
        if company is not None and val_loader is not None:
            val_loader = company.part_of_validation(val_loader)
        self._val_loader = val_loader
        self._evaluator = None if val_loader is None else self._make_evaluator(metrics)
        self._history: list[StepReport] = []
        self._plans: list[tuple[int, Plan]] = []
        self._largest: Plan | None = None  # to grow back to, where training begins with a smaller plan
        self._evaluations: list[tuple[int, Evaluation]] = []
        self._oom_events = 0
        self._resumed_from: int | None = None
        self._damaged_at: int | None = None
        self._has_begun = False  # the epoch, as far as other ranks are asked

    def run(
        self,
        *,
        limit_bytes: int | None,
        scheduler: Any,
        scheduler_interval: str,
        started: float,
    ) -> FitResult:
        """Train to the end.

        Args:
            limit_bytes: Memory to stay within, in the memory backend's terms.
            scheduler: As for `fit`; one that is still to be made is made after the probe.
            scheduler_interval: As for `fit`.
            started: When the call began, by `time.perf_counter`.
        """
        result = None
        # Outermost: a SIGTERM that ends the process does so when the callbacks have been told.
        with nullcontext() if self._saver is None else self._watch:
            try:
                self._tell_start()
                if self._company is not None:
                    with devices.failures_told(self._step.memory, "what ranks send each other"):
                        self._company.begin(self._step, self._wishes, self._finding.grows_to)
                begins_with, probed = self._begin(scheduler, scheduler_interval)
                with ExitStack() as limit:
                    with devices.failures_told(self._step.memory, "what a training needs beside the model"):
                        limit.enter_context(self._step.memory.limited(limit_bytes))
                        self._make_runner(begins_with)
                    if self._saver is not None:
                        # Better now than when the first checkpoint is due; and no part of what training takes.
                        with self._step.memory.lifted():
                            kept = self._contents.take(self._moment, self._cutting(), None)
                            check_that_it_can_be_kept(without_tensors(kept))
                    if not self._runner.is_learning:
                        self._compile()
                        for callback in self._others if self._plans else self._callbacks:
                            callback.on_plan(begins_with, step=self._moment.windows + 1, probe=probed)
                    self._supervise()
                result = self._result(started)
            finally:
                # This object is part of a cycle (it is its own callback), and a loader's workers must not live on with
                # it until it is collected.
                self._windows = self._first = None
                self._track.close()
                if self._compiling is not None:
                    self._compiling.end()
                self._fallbacks.end()
                with ExitStack() as ends:  # every callback is told, also when one of them raises
                    for callback in reversed(self._callbacks):
                        ends.callback(callback.on_fit_end, result)
        return result

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:
        """Note the plan."""
        self._plans.append((step, plan))
        if probe is not None:
            self._finding.note(probe)
            self._compile()

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:  # noqa: ARG002 - as the base has it
        """Forget a plan that does not hold."""
        self._finding.forget()

    def _compile(self) -> None:
        """Compile the model, now that the sizes are known."""
        if self._compiling is not None:
            self._compiling.begin()

    def _note_fastest(self, fastest: Plan) -> None:
        self._finding.note_fastest(fastest)
        self._notices.say(f"micro-batches of {fastest.micro_batch} samples are fastest by the clock")

    def _evaluation_ran_out(self, event: MemoryEvent) -> None:
        for callback in self._callbacks:
            callback.on_oom(event, step=self._moment.windows)

    def _result(self, started: float) -> FitResult:
        return FitResult(
            steps=self._moment.windows,
            samples=self._moment.samples,
            history=tuple(self._history),
            plan=self._runner.plan,
            plans=tuple(self._plans) or ((self._moment.windows + 1, self._runner.plan),),
            oom_events=self._oom_events + self._runner.oom_events,
            evaluations=tuple(evaluation for _, evaluation in self._evaluations),
            elapsed_s=time.perf_counter() - started,
            resumed_from=self._resumed_from,
            checkpoint=None if self._saver is None else self._saver.newest,
        )

    # --- the beginning ------------------------------------------------------------------------------------------------

    def _tell_start(self) -> None:
        for callback in self._callbacks:
            callback.on_fit_start(epochs=self._epochs, max_steps=self._max_steps, steps_per_epoch=self._steps_per_epoch)

    def _begin(self, scheduler: Any, interval: str) -> tuple[Plan, ProbeResult | None]:
        """Find the plan to begin with: in a checkpoint, or for the first window."""
        found = self._found()
        probed = None
        if found is None:
            self._first = first = self._first_window()
            if self._company is not None:
                self._company.look_at(first)
                first = self._company.part(first)
            drop_old_gradients(self._step, self._notices)
            probed = self._probe(first) if first.samples else None
            if self._company is not None:
                self._company.tell_plans(None if probed is None else self._finding.plan(probed))
        self._schedule = Schedule(scheduler, interval, self._step.optimizer)
        self._contents = Contents(self._step, self._schedule, self._target_batch, self._random, self._notices)
        if self._saver is not None:
            self._schedule.check_that_it_can_be_kept()
        if found is not None:
            return self._resume(*found), None
        self._bytes_per_sample = None if probed is None else probed.bytes_per_sample
        return self._finding.plan(probed), probed

    def _found(self) -> tuple[Path, dict[str, Any]] | None:
        if self._company is None:
            return None if self._saver is None else self._saver.find(self._notices)
        if self._saver is None:
            self._company.check_that_all_found(None)
            return None
        return self._company.find(self._saver, self._notices)

    def _probe(self, first: Window) -> ProbeResult | None:
        try:
            return self._finding.begin(first, self._tell_trial)
        except DoesNotFitError as error:
            if not self._falls_back(error):
                raise
            oom.let_go(error)
        return self._probe(first)

    def _falls_back(self, error: DoesNotFitError) -> bool:
        """Make a step take less memory; return whether there was a way left."""
        in_force = tuple(self._fallbacks.ways)
        has_fallen_back = self._fallbacks.next()
        if self._fallbacks.found_no_blocks:
            self._notices.say("the model has no repeated blocks to checkpoint (fallback='checkpoint')")
        if has_fallen_back:
            self._notices.say(f"not even one sample fits; from now on {self._fallbacks.ways[-1]} (fallback=)")
            self._finding.begin_anew()
        elif in_force:
            error.add_note(f"autoaccum: in force already: {'; '.join(in_force)}")
        return has_fallen_back

    def _first_window(self) -> Window:
        self._begin_epoch()
        assert self._windows is not None
        first = next(self._windows, None)
        if first is None and self._company is not None and self._company.has_anything(0):
            return Window.empty()  # other ranks have some
        if first is not None and self._company is not None:
            self._company.has_anything(1)
        if first is None:
            dropped = ""
            if self._last_window == "drop":
                dropped = (
                    f" or less than target_batch={self._target_batch} samples, which last_window='drop' leaves out"
                )
            raise InvalidInputError(f"the loader gave no batch{dropped}, so there is nothing to train on")
        return first

    def _make_evaluator(self, metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None) -> Evaluator:
        ranks = None if self._company is None else self._company.ranks
        return Evaluator(self._step, metrics, self._evaluation_ran_out, loss_scope=self._loss_scope, ranks=ranks)

    def _tell_trial(self, trial: Trial) -> None:
        for callback in self._callbacks:
            callback.on_trial(trial)

    def _make_runner(self, begins_with: Plan) -> None:
        self._runner = Runner.of(
            self._step,
            self._largest or begins_with,
            callbacks=self._callbacks,
            notices=self._notices,
            loss_scope=self._loss_scope,
            batchnorm=self._batchnorm,
            wanted=self._finding.wanted(self._windows_ahead(), is_found=self._is_found, is_timed=self._is_timed),
            bytes_per_sample=self._bytes_per_sample,
            sample_bytes=self._sample_bytes,
            after_update=self._after_update,
            on_settled=self._note_fastest,
            windows_done=self._moment.windows,
            joint=None if self._company is None else self._company.joint,
        )
        self._runner.shrink_to(begins_with)

    def _windows_ahead(self) -> int | None:
        """Windows that are to come, where that is known."""
        if self._max_steps is not None:
            return self._max_steps - self._moment.windows
        if self._steps_per_epoch is None or self._epochs is None:
            return None
        return self._steps_per_epoch * self._epochs - self._moment.windows

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Train from the moment on to the end."""
        if self._company is not None:
            self._company.ranks.moment = self._moment.windows
        while not self._is_over():
            if self._windows is None:
                self._begin_epoch()
            window = self._next_window()
            if self._has_nothing(window):
                self._notices.say(
                    f"the loader gave nothing in epoch {self._moment.position.epoch}, so training ends there; a "
                    "generator can be read only once, a DataLoader or a list every epoch"
                )
                break
            while window is not None and self._step_with(window):
                # Let go of the window before the next one is loaded: large ones must not be held twice.
                window = None
                window = self._next_window()
            self._end_epoch()
        if self._saver is not None and not self._saver.has(self._moment):
            self._save()

    def _has_nothing(self, window: Window | None) -> bool:
        """Whether an epoch has begun that has no window."""
        if self._company is None:
            return window is None and not self._moment.position.batches
        if self._has_begun or window is None:
            return False
        self._has_begun = True
        return not self._company.has_anything(window.samples)

    def _made_step(self, window: Window) -> StepReport | None:
        """Make the update of a window, with less memory for a step where not even one sample fits."""
        try:
            return self._runner.step(window) if self._company is None else self._runner.step_with_others(window)
        except DoesNotFitError as error:
            if not self._falls_back(error):
                raise
            oom.let_go(error)
        # After the handler: inside it the traceback still pins the activations.
        self._step.memory.release()
        self._oom_events += self._runner.oom_events
        self._is_found, self._bytes_per_sample, self._largest = False, None, None
        self._make_runner(self._finding.plan())
        return self._made_step(window)

    def _is_over(self) -> bool:
        windows, position = self._moment.windows, self._moment.position
        if self._epochs is not None and position.epoch > self._epochs:
            return True
        if self._max_steps is None or windows < self._max_steps:
            return False
        return position.closed or windows > self._max_steps

    def _begin_epoch(self) -> None:
        # Worker processes are started here, and would inherit the limit.
        with self._step.memory.lifted():
            batches = self._track.begin(self._moment.position.epoch)
        self._has_begun = False
        self._windows = self._windows_of(batches, skip=0)

    def _windows_of(self, batches: Track, skip: int) -> Iterator[Window]:
        if self._company is None:
            return stream(batches, self._target_batch, last_window=self._last_window, skip=skip)
        return self._company.windows(batches, self._company.windows_done, skip)

    def _next_window(self) -> Window | None:
        """Return the next window; None at the end of the epoch or of the training.

        An error of the loader arrives as it is: it is never the step's.
        """
        assert self._windows is not None
        if self._moment.windows == self._max_steps:
            return None
        first, self._first = self._first, None
        window = next(self._windows, None) if first is None else first
        # Other ranks may have some of it left.
        return Window.empty() if window is None and self._company is not None else window

    def _step_with(self, window: Window) -> bool:
        """Make the update of a window, and what is due after it; return False where the epoch has no such window."""
        self._coming = window.samples, self._track.after(window)
        if self._company is not None:
            window = self._company.part(window)
            if self._company.is_to_be_dropped(window):
                return False
        report = self._made_step(window)
        if report is None:
            return False
        self._note(report)
        if self._saver is not None:
            # Callbacks may have drawn, and the next window begins from there, whenever this moment is written.
            self._moment = replace(self._moment, random=self._random_states())
        wishes = self._wishes_of_all()
        if wishes & SAVE:
            self._save()
        if wishes & END:
            self._end_for_others()
        self._watch.look()
        return True

    def _wishes(self) -> int:
        """Return what this process wishes to happen after the window that is being made, or was just made."""
        if self._saver is None:
            return 0
        windows = self._moment.windows + (0 if self._company is None else 1)
        decides = self._company is None or self._company.ranks.rank == 0  # clocks differ
        is_due = self._watch.wished or (decides and self._saver.is_due(windows))
        return (SAVE if is_due else 0) | (SAVE | END if self._watch.is_ending else 0)

    def _wishes_of_all(self) -> int:
        if self._company is None:
            return self._wishes()
        joint = self._company.joint
        assert joint is not None
        self._company.share_out()
        wishes = 0
        for part in joint.parts:
            wishes |= part.wishes
        return wishes

    def _end_for_others(self) -> None:
        """End as one that SIGTERM has reached, or because another has."""
        if self._watch.is_ending:
            self._watch.end()
        raise RankFailedError(
            f"another process of this training was asked to end (SIGTERM) after step {self._moment.windows}; the same "
            "call goes on from its checkpoint"
        )

    def _after_update(self, skipped: bool) -> None:
        """Move everything that moves with an update; interrupts are held back meanwhile."""
        self._is_whole = False
        self._schedule.after_update(skipped=skipped)
        samples, position = self._coming
        if self._company is not None and self._company.joint is not None:
            samples = self._company.joint.samples
            self._company.ranks.moment = self._moment.windows + 1
        self._moment = Moment(self._moment.windows + 1, self._moment.samples + samples, position, self._random_states())
        self._is_whole = True

    def _random_states(self) -> RandomStates | None:
        if self._saver is None:
            return None
        self._random.take()
        return self._random.taken

    def _note(self, report: StepReport) -> None:
        self._history.append(report)
        if len(self._history) % _READ_EVERY == 0:
            for earlier in self._history[-_READ_EVERY:]:
                _ = earlier.loss, earlier.grad_norm
        for callback in self._callbacks:
            callback.on_step(report, epoch=self._moment.position.epoch)

    def _end_epoch(self) -> None:
        """Do what follows an epoch's last window, or the last window of all."""
        epoch = self._moment.position.epoch
        to_do = not self._moment.position.closed
        evaluation = None
        if to_do:
            for callback in self._callbacks:
                callback.on_epoch_end(epoch)
            evaluation = self._evaluate(epoch)
        with signals.held():
            self._is_whole = False
            if evaluation is not None:
                self._evaluations.append((epoch, evaluation))
                self._schedule.after_evaluation(evaluation)
            if to_do:
                self._schedule.after_epoch()
            position = replace(self._moment.position, closed=True)
            if self._moment.windows != self._max_steps:  # else there may be more of this epoch
                position, self._windows = self._track.at_start(epoch + 1), None
            self._moment = replace(self._moment, position=position, random=self._random_states())
            self._is_whole = True

    def _evaluate(self, epoch: int) -> Evaluation | None:
        if self._evaluator is None or self._val_loader is None:
            return None
        # A loader draws a seed for its workers, and a model may draw in evaluation mode too.
        self._random.take()
        before = self._random.taken
        mark = None
        if self._saver is not None:  # one may have to be written in the middle of it
            mark = Mark(self._step.objective.modules, self._step.memory.device)
            mark.take()
        try:
            with self._step.memory.lifted():
                batches = iter(self._val_loader)
            evaluation = self._evaluator.run(batches, trained_size=self._runner.plan.micro_batch)
        except BaseException:
            if mark is not None:
                mark.put_back()
            raise
        self._set_random(before)
        for callback in self._callbacks:
            callback.on_evaluation(evaluation, epoch=epoch, step=self._moment.windows)
        return evaluation

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Write a checkpoint of this moment."""
        assert self._saver is not None
        # Half of it is worth nothing, so interrupts wait.
        with signals.held(), self._step.memory.lifted():
            path = self._written(self._saver)
        if self._watch.wished:
            self._watch.grant()
        for callback in self._callbacks:
            callback.on_checkpoint(path, step=self._moment.windows)

    def _written(self, saver: Saver) -> Path:
        if self._company is None:
            return saver.write(self._contents.take(self._moment, self._cutting()), self._moment)
        parts = self._company.parts_of_all(self._contents.part(self._moment, self._cutting()))
        files = None
        if self._contents.is_sharded:
            files = self._company.write_shards(saver, self._moment, self._contents.spread())
        path = self._company.written_by_one(
            lambda: saver.write(self._contents.take(self._moment, self._cutting(), parts, files), self._moment)
        )
        saver.took(path, self._moment)
        if files is not None and self._company.ranks.rank == 0:
            saver.remove_others()
        return path

    def _cutting(self) -> Cutting:
        return Cutting(
            self._runner.plan,
            self._runner.set_plan,
            tuple(self._plans),
            self._finding.asked,
            self._runner.bytes_per_sample,
            self._oom_events + self._runner.oom_events,
            self._runner.sample_bytes,
            not self._runner.is_learning,
            self._runner.is_timed,
        )

    def _resume(self, path: Path, content: dict[str, Any]) -> Plan:
        """Go on from a checkpoint that another call of `fit` wrote; return the plan to begin with."""
        cutting = self._take_up(path, content)
        self._resumed_from = self._moment.windows
        if cutting is None:
            return self._finding.plan()
        self._plans, self._oom_events = list(cutting.plans), cutting.oom_events
        self._bytes_per_sample, self._sample_bytes = cutting.bytes_per_sample, cutting.sample_bytes
        self._is_found, self._is_timed = cutting.is_found, cutting.is_timed
        if self._is_over():
            self._notices.say(
                f"the run in {path.parent} is finished: {self._moment.windows} steps are done, so there is nothing to "
                "do; more epochs= or max_steps= go on with it"
            )
        if self._finding.asked in ("auto", cutting.asked):
            self._largest = self._finding.within_cap(cutting.largest)
            plan = self._finding.within_cap(cutting.plan)
            if plan != cutting.plan:
                self._plans.append((self._moment.windows + 1, plan))
            return plan
        changed = self._finding.plan()
        self._plans.append((self._moment.windows + 1, changed))
        return changed

    def _take_up(self, path: Path, content: dict[str, Any]) -> Cutting | None:
        """Become what a checkpoint holds; return how windows were cut, where it was this process that cut them."""
        self._contents.check(content, path)
        part = self._part_of(content, path)
        self._moment = moment = self._contents.moment(content, part)
        if part is None:
            self._moment = moment = self._taken_over(moment)
            self._notices.say(
                f"the checkpoint {path} was written by another number of processes: samples are shared out anew, and "
                "what is drawn at random begins anew"
            )
        # First, since a loader may turn out to be another one: then nothing else has been changed.
        self._go_to_moment()
        self._contents.put_back(content)
        if self._contents.is_sharded:
            assert self._company is not None
            self._company.read_shards(path, content, self._contents.spread())
            self._set_random(moment.random)  # which reading has moved
        assert self._saver is not None
        self._saver.note(moment)
        self._notices.say(
            f"going on from the checkpoint {path}: {moment.windows} steps are done", key=f"{path} {moment.windows}"
        )
        for callback in self._callbacks:
            callback.on_resume(path, step=moment.windows, epoch=moment.position.epoch)
        return None if part is None else self._contents.cutting(part)

    def _part_of(self, content: dict[str, Any], path: Path) -> Mapping[str, Any] | None:
        if self._company is not None:
            return self._company.part_of(content, path)
        return part_of(content, path, 0, 1, WHOLE)

    def _taken_over(self, moment: Moment) -> Moment:
        """Return where this training stands at a moment of other processes."""
        if self._company is None:
            return replace(moment, position=of_whole(moment.position, self._loader, self._target_batch))
        position = self._company.taken_over(moment.position)
        # The order of the epochs to come is drawn on the first.
        is_first = self._company.ranks.rank == 0
        return replace(moment, position=position, random=moment.random if is_first else self._random_states())

    def _go_to_moment(self) -> None:
        """Put the loader and the random state where they were at the moment."""
        position, self._windows, self._first = self._moment.position, None, None
        before = self._random_states()
        if not self._is_over():
            try:
                with self._step.memory.lifted():
                    batches = self._track.go_to(position)
            except BaseException:
                self._set_random(before)
                raise
            if position.batches:
                self._has_begun = True
                self._windows = self._windows_of(batches, skip=position.used)
        self._set_random(self._moment.random)

    def _set_random(self, states: RandomStates | None) -> None:
        assert states is not None
        self._random.assume(states)
        self._random.put_back()

    # --- what interrupts training -------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Train to the end, also where that takes a second attempt from the last checkpoint."""
        while True:
            damage: StateDamagedError | None = None
            try:
                self._train_or_leave_a_checkpoint()
            except signals.Terminated as error:
                damage = _damage_behind(error)
                self._leave_a_checkpoint(error)
                if not self._watch.terminate():
                    raise
            except StateDamagedError as error:
                if not self._can_go_back(error):
                    raise
                damage = error
                oom.let_go(error)
            else:
                return
            # Here the handlers have ended, and their tracebacks pin nothing any more.
            if damage is None:
                self._go_to_moment()
            else:
                self._go_back(damage)

    def _train_or_leave_a_checkpoint(self) -> None:
        try:
            self._watch.raises = self._company is None
            self._watch.defers = self._company is not None and self._saver is not None
            self._train()
        except (signals.Terminated, StateDamagedError):
            raise
        except StartAgainError as error:
            if self._saver is not None and error.micro_batch is not None:
                self._saver.note_lack(error.micro_batch, str(error))
            raise
        except DeviceLostError as error:
            if self._saver is None or self._saver.newest is None:
                raise
            raise DeviceLostError(f"{error}, and go on from the checkpoint {self._saver.newest}") from error
        except BaseException as error:
            self._leave_a_checkpoint(error)
            raise
        finally:
            self._watch.raises = self._watch.defers = False

    def _leave_a_checkpoint(self, error: BaseException) -> None:
        """Write one of the last whole moment while `error` is on its way, which a failure to do so only adds to."""
        self._watch.raises = self._watch.defers = False
        if self._saver is None:
            return
        cannot = isinstance(error, CheckpointError) or oom.is_device_lost(error)
        # Half an update must never become a checkpoint.
        is_damaged = not self._is_whole or self._runner.has_lost_parameters or _damage_behind(error) is not None
        is_whole = not cannot and not is_damaged
        if self._company is not None:
            is_whole = self._company.stand_together(error, is_whole=is_whole) and is_whole
        # Before the first window there is nothing to lose.
        is_worth_it = self._moment.windows > 0 and not self._saver.has(self._moment)
        if not is_whole or not is_worth_it:
            return
        try:
            self._save()
        except Exception as failure:  # noqa: BLE001 - whatever it is, the first error matters more
            reason = oom.first_line(failure)
            error.add_note(f"autoaccum: no checkpoint of step {self._moment.windows} could be written ({reason})")
            self._notices.say(f"no checkpoint of step {self._moment.windows} could be written ({reason})")
        else:
            why = "SIGTERM" if isinstance(error, signals.Terminated) else type(error).__name__
            self._notices.say(
                f"{why}: step {self._moment.windows} is saved in {self._saver.newest}; the same call goes on from there"
            )

    def _can_go_back(self, damage: StateDamagedError) -> bool:
        if self._company is not None:
            return False  # the other ranks have made the update
        if self._saver is None:
            damage.add_note("autoaccum: with checkpoint=FOLDER, fit goes back to its last checkpoint by itself")
            return False
        if self._saver.newest is None:
            damage.add_note(
                "autoaccum: there is no checkpoint to go back to yet; checkpoint_steps=1 writes one earlier"
            )
            return False
        done = self._moment.windows
        if self._damaged_at is not None and done <= self._damaged_at:
            damage.add_note(
                f"autoaccum: it happened again at the same step; the last checkpoint is {self._saver.newest}"
            )
            return False
        self._damaged_at = done
        return True

    def _go_back(self, damage: StateDamagedError) -> None:
        """Go back to the last checkpoint of this run."""
        assert self._saver is not None
        self._step.memory.release()
        with self._step.memory.lifted():
            found = self._saver.find_again()
        if found is None:
            raise damage
        self._notices.say(f"step {self._moment.windows + 1}: {damage}", key=f"damage {self._moment.windows}")
        self._oom_events += self._runner.oom_events
        try:
            self._take_up(*found)
        except CheckpointError as error:
            raise error from damage
        windows, position = self._moment.windows, self._moment.position
        self._history = [report for report in self._history if report.step <= windows]
        self._evaluations = [
            (epoch, evaluation)
            for epoch, evaluation in self._evaluations
            if epoch < position.epoch or (epoch == position.epoch and position.closed)
        ]
        in_force, self._largest = self._runner.plan, self._runner.set_plan
        self._is_found, self._is_timed = not self._runner.is_learning, self._runner.is_timed
        self._bytes_per_sample, self._sample_bytes = self._runner.bytes_per_sample, self._runner.sample_bytes
        self._plans = [(since, earlier) for since, earlier in self._plans if since <= windows + 1]
        if not self._plans or self._plans[-1][1] != in_force:
            self._plans.append((windows + 1, in_force))
        self._make_runner(in_force)


def _damage_behind(error: BaseException) -> StateDamagedError | None:
    """Return the damage that an interrupt hides, which waited for the update to end: it is the interrupt's context."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, StateDamagedError):
        behind = behind.__context__
    return behind
