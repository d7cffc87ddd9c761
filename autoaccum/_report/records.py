"""The data of a pre-flight report: frozen records, with the unit of each quantity in its name.

`_report/api.py` fills them; each output format (table, JSON, page) reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from autoaccum._estimate.footprint import Footprint
    from autoaccum._estimate.gpus import GPU
    from autoaccum._records import Neighbour, Plan, Trial

# A search by trials ends within this of the largest size that fits.
_NEAR = 0.97
FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"


@dataclass(frozen=True, slots=True)
class Remedy:
    """What would reduce the memory of a step.

    Attributes:
        save_memory: Its name, as `fit` takes it; after the names of what the step saves memory by already, if any.
        peak_bytes: The memory that a step of `micro_batch` would then need, or of the least traced if none fits.
        micro_batch: The largest micro-batch that would then fit.
        safe_micro_batch: The largest that would then fit in spite of the prediction's uncertainty.
    """

    save_memory: str | tuple[str, ...]
    peak_bytes: int
    micro_batch: int
    safe_micro_batch: int


@dataclass(frozen=True, slots=True)
class Subject:
    """The job to train.

    Attributes:
        model: The model's class.
        parameters: The number of its parameters.
        trainable: The number of trainable ones.
        optimizer: The optimizer's class.
        target_batch: Samples per optimizer step.
        script: The script that `autoaccum report` was given; None for Python objects.
        max_micro_batch: The largest micro-batch of interest; None means the target batch.
        memory_limit: The memory limit as the user wrote it; None if there is none.
        ranks: The processes that train together; the report is on one of them.
        is_sharded: Whether the model is sharded over them.
    """

    model: str
    parameters: int
    trainable: int
    optimizer: str
    target_batch: int
    script: str | None = None
    max_micro_batch: int | None = None
    memory_limit: str | None = None
    ranks: int = 1
    is_sharded: bool = False

    @property
    def share(self) -> int:
        """Samples per optimizer step on one rank."""
        return -(-self.target_batch // self.ranks)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device before the first trial.

    Attributes:
        name: Its readable name.
        device: Its name in torch.
        total_bytes: Its memory.
        free_bytes: Memory available to this process, excluding the model, under the tightest limit in force.
        room_bytes: The highest peak a step may have, counted as the trials' peaks.
        limit_bytes: The memory limit, counted likewise; None if there is none.
        holds_model: Whether these counts include the model: on a GPU they do, on the host it was there before.
        others_bytes: Memory held by other processes; None if unknown.
        neighbours: Those processes, as far as known.
    """

    name: str
    device: str
    total_bytes: int
    free_bytes: int
    room_bytes: int
    limit_bytes: int | None
    holds_model: bool
    others_bytes: int | None
    neighbours: tuple[Neighbour, ...] = ()


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of training with the plan.

    Attributes:
        micro_batch_s: Seconds for forward and backward of the largest micro-batch.
        optimizer_s: Seconds for the optimizer's step.
        step_s: Seconds for an optimizer step, excluding the loader.
        samples_per_s: The same in samples per second.
        epoch_samples: Samples in the loader; None if unknown.
        epoch_s: Seconds for an epoch, excluding the loader; None if its length is unknown.
    """

    micro_batch_s: float
    optimizer_s: float
    step_s: float
    samples_per_s: float
    epoch_samples: int | None = None
    epoch_s: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements on a device at hand.

    Attributes:
        device: The device.
        precision: The precision of the forward pass; None if not even the model fits on the device.
        trials: Every size that was tried, in order.
        micro_batch: The largest that fits; 0 if not even one sample does.
        plan: How the target batch is cut; None if nothing fits.
        reason: Why nothing fits; empty if something does.
        fixed_bytes: Bytes independent of the size, from a linear fit of the trials; None without such a fit.
        bytes_per_sample: Bytes per extra sample, from the same fit.
        footprint: The memory by kind of a step of the plan's largest micro-batch, or of one sample if nothing fits. It
            is traced, but for `reserved_bytes`; None if the step cannot be traced.
        pace: The speed of training; None if it was not timed.
    """

    device: DeviceFacts
    precision: str | None
    trials: tuple[Trial, ...]
    micro_batch: int
    plan: Plan | None
    reason: str = ""
    fixed_bytes: int | None = None
    bytes_per_sample: int | None = None
    footprint: Footprint | None = None
    pace: Pace | None = None
    is_predicted: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The device's readable name."""
        return self.device.name

    @property
    def room_bytes(self) -> int:
        """The memory a step may use."""
        return self.device.room_bytes

    @property
    def is_gpu(self) -> bool:
        """Whether it has memory of its own, counted as an allocator takes it."""
        return self.device.holds_model

    @property
    def is_limited(self) -> bool:
        """Whether a memory limit leaves less than the device has."""
        return self.device.limit_bytes is not None

    @property
    def safe_micro_batch(self) -> int:
        """The same as `micro_batch`: it was tried."""
        return self.micro_batch

    @property
    def verdict(self) -> str:
        """Whether it "fits" or "does not fit"."""
        return DOES_NOT_FIT if self.plan is None else FITS

    @property
    def curve(self) -> tuple[tuple[int, int], ...]:
        """Sizes and the memory of their steps, ascending, as measured."""
        return tuple(sorted((one.size, one.peak_bytes) for one in self.trials if one.peak_bytes is not None))

    @property
    def is_capped(self) -> bool:
        """Whether larger micro-batches may fit: none was tried that did not, and room is left for some."""
        if self.micro_batch == 0 or self.smallest_failed is not None:
            return False
        if self.fixed_bytes is None or self.bytes_per_sample is None:
            return True
        return self.fixed_bytes + self.micro_batch * self.bytes_per_sample / _NEAR <= self.room_bytes

    @property
    def smallest_failed(self) -> int | None:
        """The smallest failed size that is not below the largest that fits; None if there is none."""
        failed = (trial.size for trial in self.trials if not trial.fits and trial.size >= self.micro_batch)
        return min(failed, default=None)

    @property
    def peak_bytes(self) -> int | None:
        """The peak memory of a step of the plan, counted as `device.room_bytes`; None if not counted."""
        if self.plan is None:
            return None
        size = self.plan.micro_batch
        peaks = [one.peak_bytes for one in self.trials if one.fits and one.size == size]
        if peaks or self.fixed_bytes is None or self.bytes_per_sample is None:
            return peaks[0] if peaks else None
        return self.fixed_bytes + size * self.bytes_per_sample

    @property
    def headroom_bytes(self) -> int | None:
        """The memory left at the peak, below 0 for a peak above a soft limit; None if the peak is not counted."""
        return None if self.peak_bytes is None else self.device.room_bytes - self.peak_bytes


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predictions for a GPU, which need not be present.

    Attributes:
        gpu: The GPU.
        precision: The precision of the forward pass.
        uncertainty: A step may take this share more than predicted.
        room_bytes: The memory a step may use: all that a process alone on the GPU can reserve, or the limit.
        micro_batch: The largest that would fit; 0 if not even one sample would.
        safe_micro_batch: The largest that would fit even if it takes more than predicted, by `uncertainty`; 0 if not
            even one sample would.
        plan: How the target batch would be cut, in micro-batches that are safe, or if none is, in those that would fit;
            None if nothing would fit.
        footprint: The memory by kind of a step of the plan's largest micro-batch; if nothing would fit, of the
            smallest size traced.
        curve: Sizes and the memory that the allocator reserves for their steps, ascending.
        bytes_per_sample: Memory of tensors per additional sample.
        is_capped: Whether larger micro-batches are predicted to fit too.
        notes: Limitations of the prediction, each a sentence.
    """

    gpu: GPU
    precision: str
    uncertainty: float
    room_bytes: int
    micro_batch: int
    safe_micro_batch: int
    plan: Plan | None
    footprint: Footprint
    curve: tuple[tuple[int, int], ...] = ()
    bytes_per_sample: int = 0
    is_capped: bool = False
    notes: tuple[str, ...] = ()
    is_predicted: ClassVar[bool] = True
    is_gpu: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The GPU's name."""
        return self.gpu.name

    @property
    def is_limited(self) -> bool:
        """Whether a memory limit leaves less than the GPU has."""
        return self.room_bytes < self.gpu.free_bytes

    @property
    def verdict(self) -> str:
        """Whether it "fits", "does not fit", or is "tight": predicted to fit, but within the uncertainty."""
        if self.safe_micro_batch > 0:
            return FITS
        return TIGHT if self.micro_batch > 0 else DOES_NOT_FIT

    @property
    def peak_bytes(self) -> int:
        """The peak memory of a step of the plan."""
        return self.footprint.reserved_bytes

    @property
    def headroom_bytes(self) -> int:
        """The memory left at the peak; negative if nothing fits."""
        return self.room_bytes - self.footprint.reserved_bytes


@dataclass(frozen=True)
class ReportContents:
    """The data of a `Report`, which documents the attributes."""

    subject: Subject
    measured: Measured | None
    predicted: tuple[Predicted, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    remedies_on: str | None = None
    required_micro_batch: int | None = None
    is_optimistic: bool = False

    @property
    def places(self) -> tuple[Measured | Predicted, ...]:
        """The device that was measured, and those that were predicted."""
        return self.predicted if self.measured is None else (self.measured, *self.predicted)

    @property
    def micro_batch(self) -> int:
        """The largest micro-batch of interest that fits in every place of the report; 0 if nothing fits in one."""
        return min(one.micro_batch for one in self.places)

    @property
    def safe_micro_batch(self) -> int:
        """The same, of predictions the sizes that fit in spite of their uncertainty."""
        return min(one.safe_micro_batch for one in self.places)

    def counts(self, found: Measured | Predicted) -> int:
        """Return the largest micro-batch in one place that a requirement is held against."""
        return found.micro_batch if self.is_optimistic else found.safe_micro_batch

    @property
    def short(self) -> tuple[tuple[str, int], ...]:
        """The places that fit, but not with the micro-batch that is required, and the largest that counts there."""
        required = self.required_micro_batch or 0
        return tuple((one.name, self.counts(one)) for one in self.places if 0 < self.counts(one) < required)

    @property
    def fits(self) -> bool:
        """Whether training fits in every place of the report, with micro-batches of any size."""
        return self.micro_batch > 0
