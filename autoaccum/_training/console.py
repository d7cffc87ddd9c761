"""Shows the progress of `fit`: a live bar where stderr is a terminal, anywhere else lines, through `logging`.

Reading a loss waits for the device, so it is read only when it is drawn: a few times a second on a terminal, once a
minute in lines. Neither callback starts a thread, since the host backend limits the process and may fork it.
"""

from __future__ import annotations

import math
import os
import sys
import time
from typing import IO, TYPE_CHECKING, Any, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from autoaccum._arguments import is_one_of, shown
from autoaccum._callbacks import Callback
from autoaccum._engine.noise_scale import rounded
from autoaccum._memory.limits import format_bytes
from autoaccum._records import SAMPLES, TOKENS
from autoaccum._sizing.events import oom_text
from autoaccum._sizing.planner import format_cut
from autoaccum._system.output import BrokenPipeSafe, is_terminal, log
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import Evaluation, FitResult, MemoryEvent, Plan, ProbeResult, StepReport, Trial
    from autoaccum._system.notices import Notices

# Five pictures a second look alive, and cost the device at most five waits a second.
_BAR_EVERY_S = 0.2
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


class TellsChoices(Callback):
    """Has the choices made for the user logged in one line, before anything else is shown.

    Args:
        notices: Holds them.
        waits: Whether the loss is chosen too, which the first forward pass tells.
    """

    def __init__(self, notices: Notices, *, waits: bool) -> None:
        self._notices, self._waits = notices, waits

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:  # noqa: ARG002 - the protocol's
        """Tell them, unless the first forward pass is yet to come."""
        if not self._waits:
            self._notices.tell_choices()

    def _tell(self, *_: object, **__: object) -> None:
        self._notices.tell_choices()

    on_trial = on_oom = on_step = on_fit_end = _tell


class OomOnlyProgress(Callback):
    """Of a rank other than 0, says only that it ran out of memory, which no other rank sees."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:
        """Say where memory ran out."""
        log(f"rank {self._rank}: {oom_text(event, step)}")


class LineProgress(Callback):
    """Progress as plain lines, logged under "autoaccum": for log files, pipes and notebooks.

    One line for each trial, plan, epoch, evaluation and for memory that ran out; between them a step line now
    and then. No escape codes.

    Args:
        every_s: At most one step line in so many seconds.
        capacity_bytes: What the training may take on its device; None if unknown.
        counts: What the target is counted in: "samples" or "tokens".
    """

    def __init__(
        self,
        *,
        every_s: float = _LINE_EVERY_S,
        capacity_bytes: int | None = None,
        counts: str = SAMPLES,
    ) -> None:
        self._every_s = every_s
        self._capacity_bytes = capacity_bytes
        self._in_tokens = counts == TOKENS
        self._epochs: int | None = None
        self._total_steps: int | None = None
        self._epoch, self._ended_epoch, self._resumed_step = 1, 0, 0
        self._report: StepReport | None = None
        self._saved_step: int | None = None
        self._noise_scale: float | None = None
        self._oom_events = 0
        self._peak_bytes = 0
        self._first_rates: tuple[float | None, ...] | None = None
        self._rates_change = False
        # Of the largest window, which is cut into that on this rank: a short last one says nothing about the plan.
        self._cut: tuple[int, ...] = ()
        self._samples = 0
        self._last_facts: tuple[str, ...] = ()  # by the last line
        self._is_searching = False
        # Samples; of windows of as many tokens, which hold unlike numbers of them, optimizer steps.
        self._speed, self._done, self._since = 0.0, 0, time.monotonic()
        self._last_shown = time.monotonic()

    # --- events -------------------------------------------------------------------------------------------------------

    def on_fit_start(self, *, epochs: int | None, max_steps: int | None, steps_per_epoch: int | None) -> None:
        """Begin to count."""
        by_epochs = None if epochs is None or steps_per_epoch is None else epochs * steps_per_epoch
        self._epochs = epochs
        self._total_steps = min((steps for steps in (by_epochs, max_steps) if steps is not None), default=None)
        self._since = self._last_shown = time.monotonic()

    def on_trial(self, trial: Trial) -> None:
        """Show such as "trial of 50: fits, peak 512 MiB, 0.12 s"."""
        self._is_searching = True
        peak = "" if trial.peak_bytes is None else f", peak {format_bytes(trial.peak_bytes)}"
        verdict = f"{'fits' if trial.fits else 'does not fit'}{peak}, {_three_digits(trial.elapsed_s)} s"
        self._say(f"trial of {trial.size}: {verdict}", "green" if trial.fits else "yellow")

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:
        """Show the sizes."""
        self._is_searching = False
        target = "samples of the first window" if self._in_tokens else "target batch"
        self._say(
            f"plan from step {step}: {target} {plan.target_batch}; micro-batches {format_cut(plan.micro_batches)}",
            "bold",
        )
        if probe is not None:
            self._restart_clock()

    def on_step(self, report: StepReport, *, epoch: int) -> None:
        """Count the window, and show figures if the last ones are long enough ago."""
        self._report, self._epoch = report, epoch
        done = 1 if self._in_tokens else report.samples
        if self._in_tokens or report.samples >= self._samples:  # no window that is cut short
            self._cut, self._samples = report.micro_batches, report.samples
        if report.elapsed_s <= time.monotonic() - self._since:
            self._done += done
        elif not self._speed:
            # The window that ended the search for the cut began before the clock was restarted.
            self._speed = done / report.elapsed_s
        if report.noise_scale is not None:
            self._noise_scale = report.noise_scale
        self._peak_bytes = max(report.peak_bytes or 0, self._peak_bytes)
        if time.monotonic() - self._last_shown >= self._every_s:
            self._show("")

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:
        """Show where memory ran out."""
        self._oom_events += 1
        self._say(oom_text(event, step), "yellow")

    def on_epoch_end(self, epoch: int) -> None:
        """Show figures: how the epoch ended."""
        if self._report is not None:
            self._show(f"epoch {epoch} done")
        self._ended_epoch = epoch
        self._restart_clock()

    def on_evaluation(self, evaluation: Evaluation, *, epoch: int, step: int) -> None:
        """Show the loss and the metrics."""
        after = f"epoch {epoch}" if epoch == self._ended_epoch else f"step {step}"
        loss = {} if evaluation.loss is None else {"loss": evaluation.loss}
        values = ", ".join(f"{name} {value:.4g}" for name, value in (loss | dict(evaluation.metrics)).items())
        took = f"({evaluation.samples} samples, {evaluation.elapsed_s:.1f} s)"
        self._say(f"evaluation after {after}: {values} {took}", "bold")
        self._restart_clock()

    def on_checkpoint(self, path: Path, *, step: int) -> None:  # noqa: ARG002 - the protocol's
        """Have the figures name the step that is saved."""
        self._saved_step = step

    def on_resume(self, path: Path, *, step: int, epoch: int) -> None:  # noqa: ARG002 - the protocol's
        """Count on from there."""
        self._epoch = epoch
        self._resumed_step = self._saved_step = step
        self._restart_clock()

    def on_fit_end(self, result: FitResult | None) -> None:
        """Show the summary; nothing where `fit` raised, the error speaks for itself. Warnings were shown as such."""
        if result is not None:
            for number, line in enumerate(str(result).splitlines()):
                if not line.startswith("warning: "):
                    self._say(line if number else f"done: {line}", "" if number else "bold")

    # --- figures ------------------------------------------------------------------------------------------------------

    def _say(self, text: str, style: str) -> None:  # noqa: ARG002 - a line has none
        log(text)

    def _show(self, event: str) -> None:
        """Show the figures of now, and the event that they are of; "" if they are of a step."""
        self._say(f"{event or self._position[0]}, {self._position[1]}: {self._figures()}", "")
        self._last_shown = time.monotonic()

    def _restart_clock(self) -> None:
        """Restart the speed count, so that neither a probe nor an evaluation counts as slow training."""
        self._speed, self._done, self._since = self._per_s(), 0, time.monotonic()

    def _per_s(self) -> float:
        """Since the clock was restarted; right after that, as it was before."""
        return self._done / max(time.monotonic() - self._since, 1e-9) if self._done else self._speed

    @property
    def _steps(self) -> int:
        return self._resumed_step if self._report is None else self._report.step

    @property
    def _position(self) -> tuple[str, str]:
        """Such as "epoch 2/3" and "step 23/45"; what is not known is left out."""
        epochs = "" if self._epochs is None else f"/{self._epochs}"
        steps = "" if self._total_steps is None else f"/{self._total_steps}"
        return f"epoch {self._epoch}{epochs}", f"step {self._steps}{steps}"

    def _figures(self) -> str:
        """Such as "loss 0.412, 141 samples/s, 12 min left, micro-batches 34+33+33, peak 512 MiB of 600 MiB, 1 oom".

        Waits for the device. What follows the time left is named only where it has changed since the last line.
        """
        speed, target = self._per_s(), 1 if self._in_tokens else self._samples
        left = 0 if self._total_steps is None else self._total_steps - self._steps
        parts = self._loss_and_speed()
        if not self._is_searching and speed and left > 0:
            parts.append(f"{_rounded_time(left * target / speed)} left")
        facts, before = self._facts(), self._last_facts
        self._last_facts = tuple(facts)
        return ", ".join([*parts, *(fact for fact in facts if fact not in before)])

    def _loss_and_speed(self) -> list[str]:
        """Return also the learning rate, of the first group, once any has changed."""
        assert self._report is not None, "figures are drawn after a step"
        parts = [f"loss {self._report.loss:.4g}" + (" (step skipped)" if self._report.skipped else "")]
        rates = self._report.learning_rates
        self._first_rates = self._first_rates or rates
        self._rates_change = self._rates_change or rates != self._first_rates
        if self._rates_change and rates and rates[0] is not None:
            parts.append(f"lr {rates[0]:.3g}")
        return [*parts, f"{_three_digits(self._per_s())} {'steps' if self._in_tokens else 'samples'}/s"]

    def _facts(self) -> list[str]:
        facts = [_cut_by_length(self._cut) if self._in_tokens else f"micro-batches {format_cut(self._cut)}"]
        if self._peak_bytes:
            of = "" if self._capacity_bytes is None else f" of {format_bytes(self._capacity_bytes)}"
            facts.append(f"peak {format_bytes(self._peak_bytes)}{of}")
        facts += [f"{self._oom_events} oom"] if self._oom_events else []
        facts += [] if self._noise_scale is None else [f"noise scale {rounded(self._noise_scale)}"]
        return facts if self._saved_step is None else [*facts, f"saved at step {self._saved_step}"]


class RichProgress(LineProgress):
    """Progress as a live bar and a line of figures on stderr, with trials, plans and evaluations above them.

    Args:
        console: The rich console to draw on; None: one for stderr.
        options: As for `LineProgress`.
    """

    def __init__(self, console: Console | None = None, **options: Any) -> None:
        super().__init__(every_s=_BAR_EVERY_S, **options)
        self._console = console
        self._bar: _Bar | None = None

    def on_fit_start(self, *, epochs: int | None, max_steps: int | None, steps_per_epoch: int | None) -> None:
        """Begin to draw."""
        super().on_fit_start(epochs=epochs, max_steps=max_steps, steps_per_epoch=steps_per_epoch)
        # Made here rather than in __init__, so that it draws on the stderr of the call.
        self._bar = _Bar(self._console or Console(file=cast("IO[str]", BrokenPipeSafe(sys.stderr))), self._total_steps)
        self._last_shown = -math.inf  # the first figures at once
        self._bar.start()

    def on_fit_end(self, result: FitResult | None) -> None:
        """Stop drawing, and print the summary below the bar."""
        if self._bar is None:
            return
        if result is not None and self._report is not None:
            self._show("")
        self._bar.stop()
        super().on_fit_end(result)
        self._bar = None

    def _show(self, event: str) -> None:  # noqa: ARG002 - the bar moves whatever it was
        assert self._bar is not None, "on_fit_start comes first"
        self._bar.update(self._bar.task_ids[0], completed=self._steps, description=self._position[0])
        # The bar shows the time left by itself.
        self._bar.figures = ", ".join([*self._loss_and_speed(), *self._facts()])
        self._bar.refresh()
        self._last_shown = time.monotonic()

    def _say(self, text: str, style: str) -> None:
        assert self._bar is not None, "on_fit_start comes first"
        self._bar.console.print(Text(text, style=style))


class _Bar(Progress):
    """A bar of the optimizer steps, and below it a line of figures."""

    def __init__(self, console: Console, total_steps: int | None) -> None:
        self.figures = "starting"
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            auto_refresh=False,
            # What else is written to stderr meanwhile then appears above the bar. The same goes for stdout
            # where it is the terminal too; where it is a file or a pipe it must stay what it is.
            redirect_stderr=True,
            redirect_stdout=is_terminal(sys.stdout),
        )
        self.add_task("windows", total=total_steps)

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield what is drawn, one below the other."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.figures, style="dim")


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"  # noqa: PLR2004 - .3g would turn to 1.23e+03


def _rounded_time(seconds: float) -> str:
    """Return such as "45 s", "12 min" or "3.5 h"."""
    if seconds < 100:  # noqa: PLR2004 - more is easier to read in minutes
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"  # noqa: PLR2004 - 90 minutes


def _cut_by_length(sizes: Sequence[int]) -> str:
    if len(sizes) <= 1:
        return f"{sum(sizes):,} samples at once"
    least, most = min(sizes), max(sizes)
    each = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"in {len(sizes):,} micro-batches of {each} {'sample' if most == 1 else 'samples'}"
