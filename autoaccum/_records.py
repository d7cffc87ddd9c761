"""Frozen records that the parts of the library exchange and return to the user. Every quantity names its unit.

Nothing here computes on a device. `StepReport` may hold numbers that are still on the device; only reading them waits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autoaccum._arguments import check_positive_int, counted, shown
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# Of a summary: the least time that it names, and the most warnings.
_SHOWN_S, _SHOWN_WARNINGS = 0.1, 3
# What a target is counted in.
SAMPLES, TOKENS = "samples", "tokens"


class DeviceScalar:
    """A number that may still be on the device; the first `read()` waits for it and keeps the float.

    Args:
        value: The number: a float, a tensor, or an object whose `total()` adds up its parts when it is needed.
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def read(self) -> float:
        """Return the number; the first call waits for the device."""
        value = self._value = float(self.value)
        return value

    @property
    def value(self) -> Any:
        """The number without waiting: a float, or a tensor that may still be on the device."""
        value = self._value
        if not isinstance(value, float) and hasattr(value, "total"):
            value = self._value = value.total()
        return value

    def __repr__(self) -> str:
        return repr(self._value) if isinstance(self._value, float) else "<on the device>"


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """A reading of a device's memory at one moment, in bytes.

    Attributes:
        total_bytes: Size of the device's memory.
        free_bytes: Memory that this process can still take, by the tightest limit in force.
        used_bytes: Memory that this process holds, counted as the backend's limit counts.
        limit_bytes: The limit set by `memory_limit`, counted as `used_bytes`; None without one.
    """

    total_bytes: int
    free_bytes: int
    used_bytes: int
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another process on the same device.

    Attributes:
        pid: Process ID.
        name: Process name; "?" if unknown.
        used_bytes: Memory that it holds on the device; None if unknown.
    """

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Trial:
    """One training step that was run to see whether a micro-batch size fits.

    Attributes:
        size: Number of samples in the micro-batch.
        fits: Whether the step ran without running out of memory.
        peak_bytes: Peak memory during the step, counted as the limit counts; None if the step did not fit or the device
            does not report it.
        elapsed_s: Duration of the step in seconds, including the device's work.
    """

    size: int
    fits: bool
    peak_bytes: int | None
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of the search for the largest micro-batch that fits.

    Attributes:
        micro_batch: The largest size that was tried and fits.
        trials: All trials in the order in which they ran.
        limit_bytes: The limit in force during the trials; None without one.
        fixed_bytes: Memory that does not depend on the micro-batch (from a line through the peaks); None if unknown.
        bytes_per_sample: Memory per additional sample; None if unknown.
    """

    micro_batch: int
    trials: tuple[Trial, ...]
    limit_bytes: int | None = None
    fixed_bytes: int | None = None
    bytes_per_sample: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a window of `target_batch` samples is cut into micro-batches.

    Attributes:
        target_batch: Number of samples per optimizer step; with `target_tokens`, of the first one.
        micro_batches: Sizes of the micro-batches in order; they sum to `target_batch`.

    Raises:
        InvalidInputError: The sizes are not positive integers or do not sum to `target_batch`.
    """

    target_batch: int
    micro_batches: tuple[int, ...]

    def __post_init__(self) -> None:
        check_positive_int("target_batch", self.target_batch)
        try:
            object.__setattr__(self, "micro_batches", tuple(self.micro_batches))
        except TypeError:
            raise InvalidInputError(
                f"micro_batches={shown(self.micro_batches)} is not a sequence of sizes; autoaccum.plan(target_batch, "
                "max_micro_batch) makes one from the largest size"
            ) from None
        for size in self.micro_batches:
            check_positive_int("each of micro_batches", size)
        if sum(self.micro_batches) != self.target_batch:
            raise InvalidInputError(
                f"micro_batches={self.micro_batches} sum to {sum(self.micro_batches)}, but target_batch="
                f"{self.target_batch}; autoaccum.plan({self.target_batch}, max_micro_batch) makes a cut that fits"
            )

    @property
    def micro_batch(self) -> int:
        """The largest micro-batch."""
        return max(self.micro_batches)

    @property
    def accum_steps(self) -> int:
        """The number of micro-batches per optimizer step."""
        return len(self.micro_batches)


class _Losses:
    device_losses: Mapping[str, DeviceScalar]
    device_reported: Mapping[str, DeviceScalar]

    @property
    def loss(self) -> float:
        """The loss, the sum of all terms; waits for the device when first read."""
        return sum(scalar.read() for scalar in self.device_losses.values())

    @property
    def losses(self) -> Mapping[str, float]:
        """Everything the loss returned, by name: the terms of `loss` and reported values.

        Waits for the device when first read.
        """
        scalars = {**self.device_losses, **self.device_reported}
        return MappingProxyType({name: scalar.read() for name, scalar in scalars.items()})


@dataclass(frozen=True)
class StepReport(_Losses):
    """Report on one window, which made exactly one optimizer step or one that the gradient scaler skipped.

    Attributes:
        step: Number of the window, from 1.
        samples: Number of samples in the window.
        micro_batches: Sizes of the micro-batches that the optimizer step was made from, in the order of the samples;
            those of lists (`ListOfSamples`) go from the largest to the smallest.
        oom_events: Number of times memory ran out during this window.
        elapsed_s: Seconds from the window's arrival to the optimizer step; the device may still be working.
        peak_bytes: Peak memory with the plan in force, counted as the limit counts; None if not reported.
        skipped: Whether the gradient scaler skipped the optimizer step because a gradient overflowed.
        recomputed_samples: Number of samples that had to be recomputed, where the window was begun again. Samples that
            failed twice count twice, so this can exceed `samples`.
        repeats: Why the window was begun again, each time: memory ran out, a loss was not as it was checked, its
            weights were predicted wrong, or processes did not fit together.
        noise_scale: The gradient noise scale in samples, averaged over the windows measured so far; None in a window
            that was not measured, and where it cannot be measured (docs/batch-size.md).
        warnings: What was said, in this window, of gradients that may differ from that of the whole batch.
        device_losses: The terms of `loss` by name, as all `device_` attributes perhaps still on the device.
        device_grad_norm: As `grad_norm`.
        device_reported: The values that are only reported, by name.
        device_learning_rates: As `learning_rates`.
    """

    step: int
    samples: int
    micro_batches: tuple[int, ...]
    oom_events: int
    elapsed_s: float
    peak_bytes: int | None
    skipped: bool
    device_losses: Mapping[str, DeviceScalar] = field(repr=False)
    device_grad_norm: DeviceScalar | None = field(default=None, repr=False)
    recomputed_samples: int = 0
    repeats: tuple[str, ...] = ()
    device_reported: Mapping[str, DeviceScalar] = field(default_factory=dict, repr=False)
    device_learning_rates: tuple[DeviceScalar | None, ...] = field(default=(), repr=False)
    noise_scale: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def grad_norm(self) -> float | None:
        """Norm of the window's gradient before clipping; None without `clip_grad_norm`."""
        return None if self.device_grad_norm is None else self.device_grad_norm.read()

    @property
    def learning_rates(self) -> tuple[float | None, ...]:
        """The learning rate of the optimizer step, for each group of the optimizer; None for a group that has none."""
        return tuple(None if rate is None else rate.read() for rate in self.device_learning_rates)


@dataclass(frozen=True)
class BackwardReport(_Losses):
    """Report on one call of `Accumulator.backward`, which added the gradient of one batch to `.grad`.

    Attributes of a `StepReport`'s names are as there, for the batch.

    Attributes:
        outputs: With `keep="outputs"`, what the model returned for each micro-batch, in order, without graphs; else
            empty.
    """

    samples: int
    micro_batches: tuple[int, ...]
    oom_events: int
    elapsed_s: float
    peak_bytes: int | None
    recomputed_samples: int
    device_losses: Mapping[str, DeviceScalar] = field(repr=False)
    device_reported: Mapping[str, DeviceScalar] = field(repr=False)
    outputs: tuple[Any, ...] = field(default=(), repr=False)
    repeats: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """A single occasion on which memory ran out.

    Attributes:
        phase: The operation that failed: "save" (copying buffers), "weigh" (determining what the loss averages
            over), "transfer", "forward", "backward", "add" (adding a batch's gradient to earlier ones), "reserve"
            (reserving memory for the optimizer's step), "unscale", "clip", "optimizer" or "evaluate"; "on another rank"
            if it failed there.
        size: Number of samples in the micro-batch; None if no micro-batch was running.
        message: The first line of the device's own message.
    """

    phase: str
    size: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of an evaluation, in which every sample counts once.

    Attributes:
        loss: Mean loss over the samples (or over whatever the loss averages over); None where the model returns no loss
            in evaluation mode, and metrics are all there is.
        metrics: The metrics by name.
        samples: Number of samples evaluated.
        elapsed_s: Duration in seconds.
        losses: Everything the loss returned, by name: the terms of `loss` and the values that are only reported.
    """

    loss: float | None
    metrics: Mapping[str, float]
    samples: int
    elapsed_s: float
    losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FitResult:
    """Result of `fit`. After a resume, counts cover the whole run; `history` and `evaluations` cover this call.

    Attributes:
        steps: Number of windows completed in the whole run, including those that the scaler skipped.
        samples: Number of samples used in the whole run.
        history: One report per window of this call, of the last 10,000; empty if the run was already finished.
        plan: The plan in force at the end, or to begin with; a single micro-batch if none was found yet.
        plans: All plans of the whole run, each with the step from which it was in force, which may be the next one.
        oom_events: Number of times memory ran out during training, in the whole run.
        evaluations: One evaluation per epoch that ended in this call, or every `val_every` windows; empty without a
            `val_loader`.
        elapsed_s: Duration of the call in seconds.
        resumed_from: Number of windows already completed when this call resumed from a checkpoint; else None.
        checkpoint: Folder of the run's newest checkpoint; None without `checkpoint`.
        best_checkpoint: Folder of the one with the lowest validation loss; None without `val_loader`.
        stopped: Why the run ended early: the reason of a callback's `StopTraining`; or, in the `result` of an exception
            that ended the call, its type ("KeyboardInterrupt"). None if it ran to its end.
        noise_scale: With `noise_scale`, the gradient noise scale in samples over the whole run; None if it was not, or
            could not be, measured (docs/batch-size.md).
        time_spent: Seconds that the call spent besides computing its optimizer steps once, by what it did: "starting
            up" (until the first window, without the next two), "search" (trials before training, and windows whose
            micro-batches were trials; these made optimizer steps too), "waiting for data", "computing again" (because
            memory ran out), "evaluations", "checkpoints".
        savings: What saved memory in the last window, as the argument `save_memory` names it; empty for nothing.
        warnings: What was said of gradients that may differ from those of whole windows (`LossWarning`), and of a
            resume after which the loader's batches may differ from those of an uninterrupted run.
        skipped_samples: Number of samples of the whole run that did not fit even alone (on_too_large="skip").
    """

    steps: int
    samples: int
    history: Sequence[StepReport] = field(repr=False)
    plan: Plan
    plans: tuple[tuple[int, Plan], ...]
    oom_events: int
    evaluations: tuple[Evaluation, ...] = ()
    elapsed_s: float = 0.0
    resumed_from: int | None = None
    checkpoint: Path | None = None
    best_checkpoint: Path | None = None
    stopped: str | None = None
    noise_scale: float | None = None
    time_spent: Mapping[str, float] = field(default_factory=dict)
    savings: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    skipped_samples: int = 0

    def __str__(self) -> str:
        """Return a summary of about a dozen lines."""
        done = f"{counted(self.steps, 'optimizer step')}, {counted(self.samples, 'sample')}"
        resumed = "" if self.resumed_from is None else f"; steps up to {self.resumed_from} were made before this call"
        lines = [f"{done} in {self.elapsed_s:.1f} s{resumed}"]
        if self.stopped is not None:
            lines.append(f"stopped early: {self.stopped}")
        if self.last_loss is not None:
            lines.append(f"loss of the last step: {self.last_loss:.4g}")
        if self.evaluations:
            last = self.evaluations[-1]
            values = ", ".join(f"{name} {value:.4g}" for name, value in {"loss": last.loss, **last.metrics}.items())
            lines.append(f"last of {len(self.evaluations)} evaluations: {values} ({last.samples:,} samples)")
        most = self.plan.micro_batch
        is_larger = any(max(report.micro_batches, default=0) > most for report in self.history[-1:])
        shorter = "; of shorter samples, more at once" if is_larger else ""
        lines.append(f"micro-batches: {self.plan.accum_steps} of at most {counted(most, 'sample')}{shorter}")
        if self.oom_events:
            lines.append(f"ran out of memory: {counted(self.oom_events, 'time')}")
        if self.skipped_samples:
            lines.append(f"samples left out, since they do not fit alone: {self.skipped_samples:,}")
        if self.savings:
            lines.append(f"memory saved by: {', '.join(self.savings)}")
        if self.noise_scale is not None:
            lines.append(f"gradient noise scale: {self.noise_scale:,.0f} samples")
        besides = [f"{name} {seconds:.1f} s" for name, seconds in self.time_spent.items() if seconds >= _SHOWN_S]
        lines += [f"time besides steps: {', '.join(besides)}"] if besides else []
        lines += [] if self.checkpoint is None else [f"checkpoint: {self.checkpoint}"]
        lines += [] if self.best_checkpoint is None else [f"lowest validation loss: {self.best_checkpoint}"]
        lines += [f"warning: {warning}" for warning in self.warnings[:_SHOWN_WARNINGS]]
        return "\n".join(lines)

    @property
    def last_loss(self) -> float | None:
        """The loss of this call's last window; None if the call had no windows to train."""
        return self.history[-1].loss if self.history else None


@dataclass(frozen=True, slots=True)
class SplitCheck:
    """What `verify` found of one split of a batch.

    Attributes:
        micro_batch: Samples at once, on one rank.
        accum_steps: Accumulation steps.
        is_right: Whether its gradients are those of the whole batch.
        difference: The norm of the difference between the gradients, relative to the whole batch's; 1 where that is 0.
        diagnosis: What is wrong; empty if nothing is.
    """

    micro_batch: int
    accum_steps: int
    is_right: bool
    difference: float
    diagnosis: str = ""


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of `verify`; true if the gradients are the same however the batch is split.

    Attributes:
        target_batch: Samples per optimizer step, over all ranks.
        world_size: Ranks.
        compared_with: The micro-batch and accumulation steps that the others are compared with.
        splits: What each other split shows, from large micro-batches to small ones.
        noise: The relative difference between two equal runs.
        notes: What else is to be said, such as of BatchNorm.
    """

    target_batch: int
    world_size: int
    compared_with: tuple[int, int]
    splits: tuple[SplitCheck, ...]
    noise: float = 0.0
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.is_right

    @property
    def is_right(self) -> bool:
        """Whether every split is right."""
        return all(one.is_right for one in self.splits)

    @property
    def diagnosis(self) -> str:
        """What is wrong with the first split that is; empty if none is."""
        return next((one.diagnosis for one in self.splits if not one.is_right), "")

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, for JSON."""
        return {"is_right": self.is_right, "diagnosis": self.diagnosis, **asdict(self)}

    def __str__(self) -> str:
        """Return a line for each split, and the notes."""
        whole = f"{self.compared_with[0]} x {self.compared_with[1]}"
        lines = [f"{whole}: compared with itself, differs by {self.noise:.1e}"]
        for one in self.splits:
            said = (
                f"right (differs by {one.difference:.1e})"
                if one.is_right
                else f"WRONG by {one.difference:.0%}: {one.diagnosis}"
            )
            lines.append(f"{one.micro_batch} x {one.accum_steps}: {said}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
