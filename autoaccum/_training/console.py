"""Shows the progress of `fit`: a live bar where stderr is a terminal, anywhere else lines, through `logging`.

Reading a loss waits for the device, so it is read only when it is drawn: a few times a second on a terminal, once a
minute in lines. Neither callback starts a thread, since the host backend limits the process and may fork it.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autoaccum._arguments import is_one_of, shown
from autoaccum._callbacks import Callback
from autoaccum._engine.noise_scale import rounded
from autoaccum._memory.limits import format_bytes
from autoaccum._records import SAMPLES, TOKENS
from autoaccum._sizing.planner import format_cut
from autoaccum._system.output import Dropping, is_terminal, log, write_line
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import Evaluation, FitResult, MemoryEvent, Plan, ProbeResult, StepReport, Trial

# Five pictures a second look alive, and cost the device at most five waits a second.
_BAR_EVERY_S = 0.2
_MEMORY_WIDTH = 20
# A log file of a day's run stays readable: 1,440 lines.
_LINE_EVERY_S = 60.0


def progress_for(
    progress: bool | str | Callback,
    memory: MemoryBackend | None = None,
    limit_bytes: int | None = None,
    counts: str = SAMPLES,
) -> Callback:
    """Return the callback that shows progress as asked for.

    Args:
        progress: "auto" or True: the bar where stderr is a terminal, lines elsewhere. "bar" or "lines": just
            that. False: nothing. A callback of your own is returned as it is.
        memory: The device, of which the peak is shown beside what there is; None if unknown.
        limit_bytes: The memory limit; None for what is free on the device now.
        counts: What the target is counted in: "samples" or "tokens".

    Raises:
        InvalidInputError: `progress` is none of these.
    """
    if isinstance(progress, Callback):
        return progress
    if progress is False:
        return Callback()
    if progress is True or is_one_of(progress, ["auto"]):
        # isatty, not rich's own idea of a terminal: FORCE_COLOR would put a bar into a log file.
        progress = "bar" if is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb" else "lines"
    if not is_one_of(progress, ["bar", "lines"]):
        raise InvalidInputError(
            f"progress={shown(progress)} is not known; use 'auto', 'bar', 'lines', False or a Callback of your own"
        )
    if limit_bytes is None and memory is not None:
        reading = memory.reading()
        limit_bytes = reading.used_bytes + reading.free_bytes
    return (RichProgress if progress == "bar" else LineProgress)(capacity_bytes=limit_bytes, counts=counts)


class OtherRank(Callback):
    """Prints of a rank other than 0 only what rank 0 cannot know.

    Args:
        rank: Its number.
        silent: Whether to print nothing at all.
    """

    def __init__(self, rank: int, *, silent: bool) -> None:
        self._rank = rank
        self._silent = silent

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:
        """Print where memory ran out: no other process sees it."""
        if self._silent:
            return
        what = "" if event.size is None else f" of {event.size} samples"
        log(f"rank {self._rank}: out of memory in step {step}, {event.phase}{what}: {event.message}")


class _Tally:
    """What both callbacks count: where in the run we are, how fast it goes, what memory it took."""

    def __init__(
        self,
        *,
        epochs: int | None,
        max_steps: int | None,
        steps_per_epoch: int | None,
        capacity_bytes: int | None = None,
        counts: str = SAMPLES,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._in_tokens = counts == TOKENS
        self.epochs = epochs
        self.epoch = 1
        self.total_steps = _total_steps(epochs=epochs, max_steps=max_steps, steps_per_epoch=steps_per_epoch)
        self.oom_events = 0
        self.peak_bytes: int | None = None
        self.report: StepReport | None = None
        self.noise_scale: float | None = None
        self.saved_step: int | None = None
        self.ended_epoch = 0
        self._first_rates: tuple[float | None, ...] | None = None
        self._rates_change = False
        self._cut: tuple[int, ...] = ()  # of the largest window: a short last one says nothing about the plan
        self._fitted = 0
        self._told: tuple[str, ...] = ()  # by the last line
        self.is_searching = False
        self._resumed_step = 0
        # Samples; of windows of as many tokens, which hold unlike numbers of them, updates.
        self._speed = 0.0
        self._done = 0
        self._since = time.monotonic()

    def restart_clock(self) -> None:
        """Restart the speed count, so that neither a probe nor an evaluation counts as slow training."""
        self._speed = self._per_s()
        self._done = 0
        self._since = time.monotonic()

    def resume(self, step: int, epoch: int) -> None:
        """Go on from a checkpoint, which may be one from before the last report."""
        self.epoch, self.report = epoch, None
        self._resumed_step = self.saved_step = step
        self.restart_clock()

    def add(self, report: StepReport, epoch: int) -> None:
        self.epoch = epoch
        self.report = report
        done = 1 if self._in_tokens else report.samples
        if self._in_tokens or report.samples >= sum(self._cut):
            self._cut = report.micro_batches
        if report.elapsed_s <= time.monotonic() - self._since:
            self._done += done
        elif not self._speed:
            # The window that ended the search for the cut began before the clock was restarted.
            self._speed = done / report.elapsed_s
        if report.noise_scale is not None:
            self.noise_scale = report.noise_scale
        if report.peak_bytes is not None:
            self.peak_bytes = max(report.peak_bytes, self.peak_bytes or 0)

    @property
    def steps(self) -> int:
        return self._resumed_step if self.report is None else self.report.step

    @property
    def position(self) -> str:
        """Such as "epoch 2/3, step 23/45"; what is not known is left out."""
        epochs = "" if self.epochs is None else f"/{self.epochs}"
        steps = "" if self.total_steps is None else f"/{self.total_steps}"
        return f"epoch {self.epoch}{epochs}, step {self.steps}{steps}"

    def after(self, epoch: int, step: int) -> str:
        """What an evaluation followed: "epoch 2", or "step 20" in the middle of one."""
        return f"epoch {epoch}" if epoch == self.ended_epoch else f"step {step}"

    def trial(self, trial: Trial) -> str:
        """Such as "trial of 50: fits, peak 512 MiB, 0.12 s"."""
        self.is_searching = True
        if trial.fits:
            self._fitted = max(self._fitted, trial.size)
        # What fitted in the first window may not fit once the optimizer has made its state.
        verdict = "fits" if trial.fits else "fits no longer" if trial.size <= self._fitted else "does not fit"
        peak = "" if trial.peak_bytes is None else f", peak {format_bytes(trial.peak_bytes)}"
        return f"trial of {trial.size}: {verdict}{peak}, {_three_digits(trial.elapsed_s)} s"

    def figures(self, *, in_bar: bool = False) -> str:
        """Such as "loss 0.412, 141 samples/s, 12 min left, cut 34+33+33, peak 512 MiB of 600 MiB, 1 oom".

        With a target in tokens: "3.1 updates/s", and "in 7 micro-batches of 1 to 9 samples" of the last window.

        Waits for the device. The bar shows the time left and the peak by itself (`in_bar`), and the cut always; lines
        name cut, peak and failures only where they have changed since the last one. The learning rate, of the first
        group, stands behind the loss once any has changed.

        Behind that stand ", noise scale 2,100" once it is measured, and ", saved at step 20" where there are
        checkpoints.
        """
        assert self.report is not None, "figures are drawn after a step"
        facts = [_cut_by_length(self._cut) if self._in_tokens else f"cut {format_cut(self._cut)}"]
        if not in_bar and self.peak_bytes is not None:
            facts.append(f"peak {_of_capacity(self.peak_bytes, self.capacity_bytes)}")
        if self.oom_events or in_bar:
            facts.append(f"{self.oom_events} oom")
        if not in_bar:
            facts, self._told = [fact for fact in facts if fact not in self._told], tuple(facts)
        parts = [
            f"loss {self.report.loss:.4g}" + (" (update skipped)" if self.report.skipped else ""),
            *self._rate(self.report.learning_rates),
            f"{_three_digits(self._per_s())} {'updates' if self._in_tokens else 'samples'}/s",
            *([] if in_bar else self._time_left()),
            *facts,
        ]
        if self.noise_scale is not None:
            parts.append(f"noise scale {rounded(self.noise_scale)}")
        if self.saved_step is not None:
            parts.append(f"saved at step {self.saved_step}")
        return ", ".join(parts)

    def _rate(self, rates: tuple[float | None, ...]) -> list[str]:
        self._first_rates = self._first_rates or rates
        self._rates_change = self._rates_change or rates != self._first_rates
        return [f"lr {rates[0]:.3g}"] if self._rates_change and rates and rates[0] is not None else []

    def _time_left(self) -> list[str]:
        assert self.report is not None, "figures are drawn after a step"
        speed, target = self._per_s(), 1 if self._in_tokens else sum(self._cut)
        if self.is_searching or self.total_steps is None or not speed or self.steps >= self.total_steps:
            return []
        return [f"{_rounded_time((self.total_steps - self.steps) * target / speed)} left"]

    def _per_s(self) -> float:
        """Since the clock was restarted; right after that, as it was before."""
        if not self._done:
            return self._speed
        return self._done / max(time.monotonic() - self._since, 1e-9)


def _cut_by_length(sizes: Sequence[int]) -> str:
    if len(sizes) <= 1:
        return f"{sum(sizes):,} samples at once"
    least, most = min(sizes), max(sizes)
    each = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"in {len(sizes):,} micro-batches of {each} {'sample' if most == 1 else 'samples'}"


class _Progress(Callback):
    """What both ways to show progress have in common: they count, and know which step is saved."""

    def __init__(self, capacity_bytes: int | None, counts: str) -> None:
        self._capacity_bytes = capacity_bytes
        self._counts = counts
        self._tally = _Tally(epochs=None, max_steps=None, steps_per_epoch=None, counts=counts)

    def on_fit_start(self, *, epochs: int | None, max_steps: int | None, steps_per_epoch: int | None) -> None:
        """Begin to count."""
        self._tally = _Tally(
            epochs=epochs,
            max_steps=max_steps,
            steps_per_epoch=steps_per_epoch,
            capacity_bytes=self._capacity_bytes,
            counts=self._counts,
        )

    def _say(self, text: str, style: str) -> None:
        raise NotImplementedError

    def on_trial(self, trial: Trial) -> None:
        """Show the size and whether it fits."""
        self._say(self._tally.trial(trial), "green" if trial.fits else "yellow")

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:
        """Show where memory ran out."""
        self._tally.oom_events += 1
        self._say(_oom_text(event, step), "yellow")

    def on_evaluation(self, evaluation: Evaluation, *, epoch: int, step: int) -> None:
        """Show the loss and the metrics."""
        self._say(_evaluation_text(evaluation, self._tally.after(epoch, step)), "bold")
        self._tally.restart_clock()

    def on_checkpoint(self, path: Path, *, step: int) -> None:  # noqa: ARG002 - the protocol's
        """Have the figures name the step that is saved."""
        self._tally.saved_step = step

    def on_resume(self, path: Path, *, step: int, epoch: int) -> None:  # noqa: ARG002 - the protocol's
        """Count on from there."""
        self._tally.resume(step, epoch)


class LineProgress(_Progress):
    """Progress as plain lines, logged under "autoaccum": for log files, pipes and notebooks.

    One line for each trial, plan, epoch, evaluation and for memory that ran out; between them a step line now
    and then. No escape codes.

    Args:
        every_s: At most one step line in so many seconds.
        file: Where to write instead; None: to the log.
        capacity_bytes: What the training may take on its device; None if unknown.
        counts: What the target is counted in: "samples" or "tokens".
    """

    def __init__(
        self,
        *,
        every_s: float = _LINE_EVERY_S,
        file: TextIO | None = None,
        capacity_bytes: int | None = None,
        counts: str = SAMPLES,
    ) -> None:
        super().__init__(capacity_bytes, counts)
        self._every_s = every_s
        self._file = file
        self._last_line = time.monotonic()

    def on_fit_start(self, *, epochs: int | None, max_steps: int | None, steps_per_epoch: int | None) -> None:
        """Begin to count."""
        super().on_fit_start(epochs=epochs, max_steps=max_steps, steps_per_epoch=steps_per_epoch)
        self._last_line = time.monotonic()

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:
        """Write a line: the cut and where it came from."""
        self._tally.is_searching = False
        facts = "; ".join(f"{name} {value}" for name, value in _plan_facts(plan, probe, self._counts))
        self._say(f"plan from step {step}: {facts}")
        if probe is not None:
            self._tally.restart_clock()

    def on_step(self, report: StepReport, *, epoch: int) -> None:
        """Write a line if the last one is long enough ago."""
        self._tally.add(report, epoch)
        if time.monotonic() - self._last_line >= self._every_s:
            self._say(f"{self._tally.position}: {self._tally.figures()}")
            self._last_line = time.monotonic()

    def on_epoch_end(self, epoch: int) -> None:
        """Write a line: how the epoch ended."""
        self._tally.ended_epoch = epoch
        if self._tally.report is not None:
            self._say(f"epoch {epoch} done, {self._tally.position.partition(', ')[2]}: {self._tally.figures()}")
        self._tally.restart_clock()
        self._last_line = time.monotonic()

    def on_fit_end(self, result: FitResult | None) -> None:
        """Write the summary; nothing where `fit` raised, the error speaks for itself."""
        if result is None:
            return
        self._say(_summary_text(result))
        rows = dict(_rows_of(result, self._tally.peak_bytes, self._capacity_bytes))
        if "time" in rows:
            self._say(f"time besides updates: {rows['time']}")

    def _say(self, text: str, style: str = "") -> None:  # noqa: ARG002 - a line has none
        if self._file is None:
            log(text)
        else:
            write_line(f"autoaccum: {text}", self._file)


class RichProgress(_Progress):
    """Progress as a live bar on stderr, with the trials and the plan above it and a summary after it.

    Args:
        console: The rich console to draw on; None: one for stderr.
        capacity_bytes: What the training may take on its device; None if unknown.
        counts: What the target is counted in: "samples" or "tokens".
    """

    def __init__(
        self, console: Console | None = None, *, capacity_bytes: int | None = None, counts: str = SAMPLES
    ) -> None:
        super().__init__(capacity_bytes, counts)
        self._console = console
        self._bar: Progress | None = None
        self._live: Live | None = None
        self._status = Text()
        self._last_draw = float("-inf")

    def on_fit_start(self, *, epochs: int | None, max_steps: int | None, steps_per_epoch: int | None) -> None:
        """Begin to draw."""
        super().on_fit_start(epochs=epochs, max_steps=max_steps, steps_per_epoch=steps_per_epoch)
        # Made here rather than in __init__, so that it draws on the stderr of the call.
        console = self._console or Console(file=cast("IO[str]", Dropping(sys.stderr)))
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
        )
        self._bar.add_task("windows", total=self._tally.total_steps)
        self._status = Text("starting", style="dim")
        self._live = Live(
            console=console,
            get_renderable=self._picture,
            auto_refresh=False,
            # What else is written to stderr meanwhile then appears above the bar. The same goes for stdout
            # where it is the terminal too; where it is a file or a pipe it must stay what it is.
            redirect_stderr=True,
            redirect_stdout=is_terminal(sys.stdout),
        )
        with _dropped():
            self._live.start(refresh=True)

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:
        """Print the plan as a table above the bar."""
        table = Table(title=f"plan from step {step}", title_justify="left", show_header=False)
        for name, value in _plan_facts(plan, probe, self._counts):
            table.add_row(name, value)
        self._print(table)
        if probe is not None:
            self._tally.restart_clock()

    def on_step(self, report: StepReport, *, epoch: int) -> None:
        """Move the bar if the last picture is long enough ago."""
        self._tally.add(report, epoch)
        if time.monotonic() - self._last_draw >= _BAR_EVERY_S:
            self._draw()

    def on_epoch_end(self, epoch: int) -> None:
        """Bring the bar up to date."""
        self._tally.ended_epoch = epoch
        if self._tally.report is not None:
            self._draw()
        self._tally.restart_clock()

    def on_resume(self, path: Path, *, step: int, epoch: int) -> None:
        """Count on from there, with the bar where it was."""
        super().on_resume(path, step=step, epoch=epoch)
        if self._bar is not None:
            self._bar.update(self._bar.tasks[0].id, completed=step)

    def on_fit_end(self, result: FitResult | None) -> None:
        """Stop drawing and print the summary; no summary where `fit` raised, the error speaks for itself."""
        live, self._live = self._live, None
        if live is None:
            return
        if result is not None and self._tally.report is not None:
            self._update()
        with _dropped():
            live.stop()
        if result is not None:
            with _dropped():
                live.console.print(self._summary(result))

    def _draw(self) -> None:
        self._update()
        if self._live is not None:
            with _dropped():
                self._live.refresh()
        self._last_draw = time.monotonic()

    def _update(self) -> None:
        assert self._bar is not None, "on_fit_start comes first"
        task = self._bar.tasks[0].id
        self._bar.update(task, completed=self._tally.steps, description=self._tally.position.partition(",")[0])
        self._status = Text(self._tally.figures(in_bar=True), style="dim")

    def _picture(self) -> RenderableType:
        return Group(self._bar or Text(), self._status, *self._memory())

    def _memory(self) -> Iterator[RenderableType]:
        """Yield the peak as a bar beside what there is."""
        peak, capacity = self._tally.peak_bytes, self._capacity_bytes
        if peak is None:
            return
        line = Table.grid(padding=(0, 1))
        text = Text(_of_capacity(peak, capacity), style="dim")
        if capacity is None:
            line.add_row(Text("peak memory", style="dim"), text)
        else:
            bar = ProgressBar(total=max(capacity, 1), completed=min(peak, capacity), width=_MEMORY_WIDTH)
            line.add_row(Text("peak memory", style="dim"), bar, text)
        yield line

    def _summary(self, result: FitResult) -> RenderableType:
        table = Table(show_header=False)
        peak = self._tally.peak_bytes
        for name, text in _rows_of(result, peak, self._capacity_bytes):
            table.add_row(name, text)
        return Group(Text(_summary_text(result), style="bold"), table)

    def _say(self, text: str, style: str) -> None:
        self._print(Text(text, style=style))

    def _print(self, what: RenderableType) -> None:
        if self._live is not None:
            with _dropped():
                self._live.console.print(what)


@contextmanager
def _dropped() -> Iterator[None]:
    """Drop what cannot be drawn; of a pipe that nobody reads, rich makes SystemExit."""
    try:
        yield
    except (OSError, ValueError, SystemExit):
        return


def _total_steps(*, epochs: int | None, max_steps: int | None, steps_per_epoch: int | None) -> int | None:
    by_epochs = None if epochs is None or steps_per_epoch is None else epochs * steps_per_epoch
    known = [steps for steps in (by_epochs, max_steps) if steps is not None]
    return min(known, default=None)


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"  # noqa: PLR2004 - .3g would turn to 1.23e+03


def _rounded_time(seconds: float) -> str:
    """Return such as "45 s", "12 min" or "3.5 h"."""
    if seconds < 100:  # noqa: PLR2004 - more is easier to read in minutes
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"  # noqa: PLR2004 - 90 minutes


def _plan_facts(plan: Plan, probe: ProbeResult | None, counts: str) -> list[tuple[str, str]]:
    target = "target batch" if counts == SAMPLES else "samples of the first window"
    facts = [
        (target, str(plan.target_batch)),
        ("cut", format_cut(plan.micro_batches)),
    ]
    if probe is not None:
        facts.append(("largest that fits", f"{probe.micro_batch}, found in {_counted(len(probe.trials), 'trial')}"))
        if probe.limit_bytes is not None:
            facts.append(("memory limit", format_bytes(probe.limit_bytes)))
        if probe.fixed_bytes is not None and probe.bytes_per_sample is not None:
            needs = f"{format_bytes(probe.fixed_bytes)} and {format_bytes(probe.bytes_per_sample)} a sample"
            facts.append(("memory needed", needs))
    return facts


def _oom_text(event: MemoryEvent, step: int) -> str:
    size = "" if event.size is None else f" of {event.size} samples"
    return f"out of memory in step {step}, {event.phase}{size}: {event.message}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _evaluation_text(evaluation: Evaluation, after: str) -> str:
    metrics = "".join(f", {name} {value:.4g}" for name, value in evaluation.metrics.items())
    return (
        f"evaluation after {after}: loss {evaluation.loss:.4g}{metrics} "
        f"({evaluation.samples} samples, {evaluation.elapsed_s:.1f} s)"
    )


def _summary_text(result: FitResult) -> str:
    last = f", last loss {result.history[-1].loss:.4g}" if result.history else ""
    metrics = "".join(
        f", {name} {value:.4g}" for evaluation in result.evaluations[-1:] for name, value in evaluation.metrics.items()
    )
    saved = "" if result.checkpoint is None else f", checkpoint {result.checkpoint}"
    stopped = "" if result.stopped is None else f", stopped: {result.stopped}"
    of_call = ""
    if result.resumed_from is not None:
        of_call = f"; the last {_counted(result.steps - result.resumed_from, 'step')}"
    return (
        f"done: {_counted(result.steps, 'step')}, {_counted(result.samples, 'sample')}{of_call} in "
        f"{result.elapsed_s:.1f} s, "
        f"cut {_cut_at_end(result)}, {result.oom_events} oom{last}{metrics}{saved}{stopped}"
    )


def _rows_of(result: FitResult, peak_bytes: int | None, capacity_bytes: int | None) -> Iterator[tuple[str, str]]:
    """Yield what to show of a call: names and texts.

    Args:
        result: What `fit` returns.
        peak_bytes: The largest peak of its windows; None if unknown.
        capacity_bytes: What the training may take on its device; None if unknown.
    """
    if result.elapsed_s > 0 and result.history:
        speed = sum(report.samples for report in result.history) / result.elapsed_s
        yield "speed", f"{speed:.4g} samples/s, everything included"
    yield "cut", _cut_at_end(result)
    if peak_bytes is not None:
        yield "peak memory", _of_capacity(peak_bytes, capacity_bytes)
    yield "out of memory", f"{result.oom_events} time{'' if result.oom_events == 1 else 's'}"
    if shares := ", ".join(f"{what} {seconds:.1f} s ({share:.0%})" for what, seconds, share in _shares(result)):
        yield "time", shares


def _cut_at_end(result: FitResult) -> str:
    """Return how the last windows were cut: as planned, unless that plan was found for windows that did not come."""
    since, _ = result.plans[-1]
    if since <= result.steps or not result.history:
        return format_cut(result.plan.micro_batches)
    return format_cut(result.history[-1].micro_batches)


def _of_capacity(used_bytes: int, capacity_bytes: int | None) -> str:
    """Return such as "512.0 MiB of 600.0 MiB"."""
    whole = "" if capacity_bytes is None else f" of {format_bytes(capacity_bytes)}"
    return f"{format_bytes(used_bytes)}{whole}"


def _shares(result: FitResult) -> Iterator[tuple[str, float, float]]:
    """Yield where a call's time went besides its updates, if it shows: a name, seconds, and a share."""
    spent = result.time_spent
    named = {
        "start": spent.start_s,
        "search": spent.search_s,
        "computing again": spent.recomputation_s,
        "waiting for data": spent.data_s,
        "evaluations": spent.evaluation_s,
        "checkpoints": spent.checkpoint_s,
    }
    for what, seconds in named.items():
        if seconds >= 0.05 and result.elapsed_s > 0:  # noqa: PLR2004 - it would be printed as 0.0 s
            yield what, seconds, min(1.0, seconds / result.elapsed_s)
