"""What the parts tell each other and the user: frozen records, all quantities with their unit in the name.

Nothing here computes anything on a device. `StepReport` may hold numbers that are still on the device; they wait for
it only when they are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from autoaccum._arguments import check_positive_int, shown
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class _HasItem(Protocol):
    def item(self) -> Any: ...


class DeviceScalar:
    """A number that may still be on its way from the device; `read()` waits for it once and keeps the float."""

    __slots__ = ("_value",)

    def __init__(self, value: float | _HasItem) -> None:
        self._value = value

    def read(self) -> float:
        """Return the number, waiting for the device the first time."""
        if not isinstance(self._value, float):
            value = self._value
            self._value = float(value if isinstance(value, int) else value.item())
        return self._value

    @property
    def value(self) -> Any:
        """The number as it is: a float, or a tensor that may still be on the device. This does not wait."""
        return self._value

    def __repr__(self) -> str:
        return repr(self._value) if isinstance(self._value, float) else "<on the device>"


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """What a memory backend sees at one moment, in bytes.

    Attributes:
        total_bytes: Size of the device's memory.
        free_bytes: What this process could still take now, by the tightest limit in force.
        used_bytes: What this process holds now, in the terms in which the backend's limit counts.
        others_bytes: What other processes hold; None where that cannot be told.
        limit_bytes: The limit in force from `memory_limit`, in the same terms as `used_bytes`; None without one.
    """

    total_bytes: int
    free_bytes: int
    used_bytes: int
    others_bytes: int | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another process on the same device.

    Attributes:
        pid: Its number.
        name: Its name; "?" where that is not told.
        used_bytes: What it holds there; None where that is not told.
    """

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Trial:
    """One training step of one size, tried for real.

    Attributes:
        size: Samples in the micro-batch.
        fits: Whether the step ended without running out of memory.
        peak_bytes: Highest memory use during the step, in the terms of the limit; None where it did not fit or
            where the device does not count.
        elapsed_s: Seconds the step took, the device waited for.
    """

    size: int
    fits: bool
    peak_bytes: int | None
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the search for the largest micro-batch found.

    Attributes:
        micro_batch: The largest size that was tried and fits.
        trials: Every trial, in the order in which they ran.
        limit_bytes: The limit that held during the trials; None without one.
        fixed_bytes: Memory that does not depend on the micro-batch (from a line through the peaks); None if unknown.
        bytes_per_sample: Memory that each further sample takes; None if unknown.
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
        target_batch: Samples an optimizer update is made from.
        micro_batches: Sizes of the micro-batches in order; they sum to `target_batch`.

    Raises:
        InvalidInputError: The sizes are not positive whole numbers or do not sum to `target_batch`.
    """

    target_batch: int
    micro_batches: tuple[int, ...]

    def __post_init__(self) -> None:
        check_positive_int("target_batch", self.target_batch)
        try:
            object.__setattr__(self, "micro_batches", tuple(self.micro_batches))
        except TypeError:
            raise InvalidInputError(
                f"micro_batches={shown(self.micro_batches)} is no sequence of sizes; autoaccum.plan(target_batch, "
                "max_micro_batch) makes one from the largest size"
            ) from None
        if not self.micro_batches:
            raise InvalidInputError(f"micro_batches=() hold no sample, but target_batch={self.target_batch}")
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
        """The number of micro-batches, and so of backward passes, an update takes."""
        return len(self.micro_batches)


@dataclass(frozen=True)
class StepReport:
    """What one window did: exactly one optimizer update, or one that the scaler skipped.

    Attributes:
        step: Number of the window, from 1.
        samples: Samples in the window.
        micro_batches: Sizes of the micro-batches that the update was made from, in order.
        oom_events: How often memory ran out during this window.
        elapsed_s: Seconds from the window's arrival to the update; the device may still be at work.
        peak_bytes: Highest memory use with the plan in force, in the terms of the limit; None if not counted.
        skipped: Whether the gradient scaler skipped the update because a gradient overflowed.
        recomputed_samples: Samples that had to be worked on again because memory ran out: all of a micro-batch that
            failed, however early, and what else of the window was thrown away with it. Those that failed twice count
            twice, so it can be more than `samples`.
        loss: The loss of the whole window, all terms added. This and the next two wait for the device when they are
            first read.
        losses: By name, what the loss returned: the terms of `loss`, and what is only reported.
        grad_norm: Norm of the window's gradient before clipping; None without `clip_grad_norm`.
        device_losses: The terms of `loss` by name, maybe still on the device; and so the next two.
        device_grad_norm: As `grad_norm`.
        device_reported: What is only reported, by name.
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
    device_reported: Mapping[str, DeviceScalar] = field(default_factory=dict, repr=False)

    @property
    def loss(self) -> float:
        """The loss of the whole window, all terms added; waits for the device when it is first read."""
        return sum(scalar.read() for scalar in self.device_losses.values())

    @property
    def losses(self) -> Mapping[str, float]:
        """What the loss returned, by name, over the whole window: the terms of `loss`, and what is only reported.

        Waits for the device when it is first read.
        """
        scalars = {**self.device_losses, **self.device_reported}
        return MappingProxyType({name: scalar.read() for name, scalar in scalars.items()})

    @property
    def grad_norm(self) -> float | None:
        """Norm of the window's gradient before clipping; None where it was not asked for by `clip_grad_norm`."""
        return None if self.device_grad_norm is None else self.device_grad_norm.read()


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Memory ran out once.

    Attributes:
        phase: What was being done: "set aside" (of buffers), "weigh" (finding out what the loss
            runs over), "transfer", "forward", "backward", "reserve" (of what the optimizer's step will take),
            "unscale", "clip", "optimizer" or "evaluate"; "on another rank" where that had to be done there.
        size: Samples in the micro-batch; None where no micro-batch was at work.
        message: The first line of the device's own message.
    """

    phase: str
    size: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found, every sample counted once.

    Attributes:
        loss: Mean loss over the samples (or over whatever the loss's mean runs over).
        metrics: The metrics by name.
        samples: Samples seen.
        elapsed_s: Seconds it took.
        losses: What the loss returned, by name: the terms of `loss`, and what is only reported.
    """

    loss: float
    metrics: Mapping[str, float]
    samples: int
    elapsed_s: float
    losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FitResult:
    """What `fit` did. Where it went on from a checkpoint, numbers count the whole run and lists hold this call's part.

    Attributes:
        steps: Windows done in the whole run, those that the scaler skipped included.
        samples: Samples used in the whole run.
        history: A report for each window of this call; empty where a checkpoint was found finished.
        plan: The plan in force at the end.
        plans: Every plan of the whole run, each with the step from which it held.
        oom_events: How often memory ran out while training, in the whole run. A number here; the JSON that `autoaccum
            fit` prints has a list under this name, an entry for each event of the call.
        evaluations: One for each epoch that ended in this call, where there was a `val_loader`.
        elapsed_s: Seconds the whole call took.
        resumed_from: Windows that were done when this call began, where it went on from a checkpoint; else None.
        checkpoint: The newest checkpoint of the run; None where none were asked for.
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

    @property
    def last_loss(self) -> float | None:
        """The loss of the last window of this call; None where there was none to do."""
        return self.history[-1].loss if self.history else None
