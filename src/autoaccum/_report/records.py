"""What a pre-flight report holds: frozen records, all quantities with their unit in the name.

Nothing here measures, predicts or shows anything: `_report/api.py` fills them, and each form (a table, JSON, a picture,
a page) reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoaccum._estimate.gpus import Card
    from autoaccum._records import Neighbour, Plan, Trial
    from autoaccum._sizing.footprint import Estimate, Footprint


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something that would make the step smaller.

    Attributes:
        name: What it is, in a few words.
        description: How it is done.
        peak_bytes: What a step would then take; None where that is not known.
        micro_batch: The largest micro-batch that would then fit; None where that is not known.
        cost: What is paid for it.
    """

    name: str
    description: str
    peak_bytes: int | None
    micro_batch: int | None
    cost: str


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to be trained.

    Attributes:
        model: The model's class.
        parameters: How many numbers it holds.
        trainable: How many of them are trained.
        optimizer: The optimizer's class.
        target_batch: Samples an update.
        strategy: How windows are cut.
        recipe: Where it was read from; None where it was handed over.
        max_micro_batch: The largest micro-batch of interest; None means the target batch.
        memory_limit: What was asked to be stayed within, as it was said; None where nothing was.
    """

    model: str
    parameters: int
    trainable: int
    optimizer: str
    target_batch: int
    strategy: str
    recipe: str | None = None
    max_micro_batch: int | None = None
    memory_limit: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device as it was found before anything was tried.

    Attributes:
        name: A person's name for it.
        device: torch's name for it.
        total_bytes: Its memory.
        free_bytes: What this process could take beside the model, by the tightest limit in force.
        room_bytes: What a step's peak may come to, in the terms of the trials' peaks.
        limit_bytes: The limit that was asked for, in the same terms; None without one.
        holds_model: Whether those terms count the model: on a card they do, on the host it was there before.
        others_bytes: What other processes hold; None where that is not told.
        neighbours: Who they are, as far as that is told.
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
    """How fast training goes with the plan.

    Attributes:
        micro_batch_s: Seconds forward and backward of the largest micro-batch.
        optimizer_s: Seconds the optimizer takes for an update.
        update_s: Seconds an update, without what the loader takes.
        samples_per_s: The same as a speed.
        epoch_samples: Samples the loader has; None where it does not say.
        epoch_s: Seconds an epoch, what the loader takes included as far as it was timed; None where the loader does
            not say how long one is.
        training_s: Seconds the whole training takes, likewise; None where it is not said how long it is.
        limit_s: Seconds it may take; None where nobody says.
    """

    micro_batch_s: float
    optimizer_s: float
    update_s: float
    samples_per_s: float
    epoch_samples: int | None = None
    epoch_s: float | None = None
    training_s: float | None = None
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """How fast a loader gives batches.

    Attributes:
        batches: How many were drawn to find out.
        samples: Samples in them.
        first_batch_s: Seconds to the first one, in which workers start.
        samples_per_s: Speed after that; None where there was only one.
        workers: Processes that load; None where that is not told.
        feeds: Whether it is as fast as the training; None where one of the two is not known.
    """

    batches: int
    samples: int
    first_batch_s: float
    samples_per_s: float | None
    workers: int | None
    feeds: bool | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long the sequences of a loader's batches are, and for which length everything is said.

    Attributes:
        shortest: Of the batches that were looked at.
        longest: Likewise.
        batches: How many that were.
        used: The length that was tried and gone through.
        is_asked: Whether that one was asked for; else it is the longest seen.
        varies: Whether batches differ in length.
    """

    shortest: int
    longest: int
    batches: int
    used: int
    is_asked: bool
    varies: bool


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The host's memory, whatever the device.

    Attributes:
        total_bytes: What there is.
        free_bytes: What is free.
    """

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found on a device at hand.

    Attributes:
        device: The device.
        precision: In which the forward pass ran; None where not even the model could be put on the device.
        trials: Every size that was tried, in order.
        micro_batch: The largest that fits; 0 where not even one sample does.
        plan: How the target batch is cut; None where nothing fits.
        reason: Why nothing fits; empty where something does.
        fixed_bytes: What is taken whatever the size, by the line through the trials; None where there is none.
        bytes_per_sample: What each further sample takes, by the same line.
        footprint: What takes the memory of a step of the plan's largest micro-batch, the model included; None where
            it could not be taken apart.
        activation_bytes_per_sample: What forward keeps for backward, a sample; None where that is not known.
        pace: How fast it goes; None where it was not timed.
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
    activation_bytes_per_sample: int | None = None
    pace: Pace | None = None

    @property
    def is_capped(self) -> bool:
        """Whether larger micro-batches may fit, which nobody wanted to know: nothing larger was tried and failed."""
        return self.micro_batch > 0 and self.smallest_failed is None

    @property
    def smallest_failed(self) -> int | None:
        """The smallest size that was tried and did not fit, of those not below the largest that does; None for none."""
        failed = (trial.size for trial in self.trials if not trial.fits and trial.size >= self.micro_batch)
        return min(failed, default=None)

    @property
    def peak_bytes(self) -> int | None:
        """What a step of the plan comes to at its peak, in the terms of `device.room_bytes`; None if not counted."""
        if self.footprint is None:
            if self.plan is None or self.fixed_bytes is None or self.bytes_per_sample is None:
                return None
            return self.fixed_bytes + self.plan.micro_batch * self.bytes_per_sample
        held = 0 if self.device.holds_model else self.footprint.parameters_bytes + self.footprint.buffers_bytes
        return self.footprint.reserved_bytes - held

    @property
    def headroom_bytes(self) -> int | None:
        """What is left at the peak; None if that is not counted."""
        return None if self.peak_bytes is None else self.device.room_bytes - self.peak_bytes


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a card is predicted to hold, without one.

    Attributes:
        card: The card.
        precision: In which the forward pass would run.
        estimate: What steps take.
        room_bytes: What a step may come to: all that a process alone on the card can have, or the limit.
        micro_batch: The largest that would fit; 0 where not even one sample would.
        plan: How the target batch would be cut; None where nothing would fit.
        footprint: What takes the memory of a step of the plan's largest micro-batch, or of the smallest size that was
            gone through where nothing would fit.
    """

    card: Card
    precision: str
    estimate: Estimate
    room_bytes: int
    micro_batch: int
    plan: Plan | None
    footprint: Footprint

    @property
    def is_capped(self) -> bool:
        """Whether larger micro-batches are predicted to fit too, which nobody wanted to know."""
        return self.micro_batch > 0 and self.estimate.reserved_bytes(self.micro_batch + 1) <= self.room_bytes

    @property
    def peak_bytes(self) -> int:
        """What a step of the plan would take at its peak."""
        return self.footprint.reserved_bytes

    @property
    def headroom_bytes(self) -> int:
        """What would be left at the peak; negative where nothing fits."""
        return self.room_bytes - self.footprint.reserved_bytes

    @property
    def activation_bytes_per_sample(self) -> int | None:
        """What forward would keep for backward, a sample, by the last two sizes; None where there is only one."""
        if len(self.estimate.footprints) == 1:
            return None
        low, high = self.estimate.footprints[-2:]
        return max(0, high.activations_bytes - low.activations_bytes) // (high.size - low.size)


@dataclass(frozen=True)
class Findings:
    """What a report says, however it is shown: measured on a device at hand, predicted for others, or both.

    Attributes:
        subject: What is to be trained.
        measured: What was found on the device at hand; None where nothing was measured.
        predicted: What is foreseen, a card each.
        host: The host's memory.
        loader: How fast the loader is; None where that was not asked.
        warnings: What may go otherwise than expected, a text each.
        notes: What was chosen because nothing was said, and what is to be known about predictions, a text each.
        remedies: What would make a step smaller.
        remedies_on: The device on which it would.
        lengths: How long sequences are, and for which length all this is said; None where there are none.
    """

    subject: Subject
    measured: Measured | None
    predicted: tuple[Predicted, ...]
    host: HostFacts
    loader: LoaderFacts | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    remedies_on: str | None = None
    lengths: Lengths | None = None

    @property
    def micro_batch(self) -> int:
        """The largest micro-batch of interest that fits everywhere that was asked about; 0 where nothing fits."""
        found = [] if self.measured is None else [self.measured.micro_batch]
        return min([*found, *(one.micro_batch for one in self.predicted)])

    @property
    def fits(self) -> bool:
        """Whether it can be trained everywhere that was asked about, in whatever micro-batches."""
        return self.micro_batch > 0
