"""Records the predicted peak memory of a training step by category; sizes that were not traced are on a line."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._estimate.moments import StepMemory

# Micro-batches are smaller than two to this power.
_POWERS = 40


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one training step at its peak. The parts add up to `peak_bytes`.

    Attributes:
        size: Samples in the micro-batch.
        phase: The phase with the peak: "forward", "backward" or "optimizer".
        peak_bytes: Bytes of tensors at the peak, as rounded by the device's allocator.
        reserved_bytes: Bytes that the allocator has reserved on the device by then, at least `peak_bytes`.
        parameters_bytes: Weights.
        buffers_bytes: Buffers.
        gradients_bytes: Gradients of parameters.
        optimizer_bytes: The optimizer's state.
        inputs_bytes: The micro-batch, and the next one being transferred.
        activations_bytes: Tensors saved for the backward pass, the outputs and the loss.
        temporary_bytes: Everything else: temporary tensors of operators, workspaces, rounding.
    """

    size: int
    phase: str
    peak_bytes: int
    reserved_bytes: int
    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    inputs_bytes: int
    activations_bytes: int
    temporary_bytes: int


PARTS = tuple(
    field.name
    for field in fields(Footprint)
    if field.name.endswith("_bytes") and field.name not in ("peak_bytes", "reserved_bytes")
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted memory of a training step of any size.

    Attributes:
        footprints: Footprints of the traced sizes, ascending; at least one.
        real_step: Whether a real small step was run because the model does not run on fake tensors.
        notes: Limitations of the estimate, each a sentence.
        uncertainty: A step may take this share more than predicted.
    """

    footprints: tuple[Footprint, ...]
    real_step: bool = False
    notes: Sequence[str] = ()
    uncertainty: float = 0.0

    @property
    def bytes_per_sample(self) -> int:
        """Memory of tensors per additional sample, by the two largest sizes; 0 if there is only one."""
        if len(self.footprints) == 1:
            return 0
        below, above = self.footprints[-2:]
        return max(0, above.peak_bytes - below.peak_bytes) // (above.size - below.size)

    @property
    def fixed_bytes(self) -> int:
        """Memory of tensors independent of the size, by the same line."""
        last = self.footprints[-1]
        return max(0, last.peak_bytes - last.size * self.bytes_per_sample)

    def at(self, size: int, room_bytes: int | None = None) -> Footprint:  # noqa: ARG002 - only a card's allocator asks
        """Return the footprint of a step of this size, whose allocator may reserve `room_bytes`."""
        known = {footprint.size: footprint for footprint in self.footprints}
        if size in known:
            return known[size]
        if len(known) == 1:
            return replace(self.footprints[0], size=size)
        low, high = self.footprints[-2:]
        share = (size - low.size) / (high.size - low.size)
        parts = {
            name: max(0, round(getattr(low, name) + share * (getattr(high, name) - getattr(low, name))))
            for name in PARTS
        }
        peak_bytes = sum(parts.values())
        # What the allocator reserves beyond tensors is at least what it did for the largest size.
        reserved_bytes = peak_bytes + max(0, high.reserved_bytes - high.peak_bytes)
        return Footprint(size=size, phase=high.phase, peak_bytes=peak_bytes, reserved_bytes=reserved_bytes, **parts)

    def step_memory(self, size: int) -> StepMemory | None:  # noqa: ARG002 - only a traced step knows
        """Return how the memory of a step of this size goes by; None if the step was not traced."""
        return None

    def record(self) -> Estimate:
        """Return the footprints alone."""
        return self

    def reserved_bytes(self, size: int) -> int:
        """Predict the bytes that the allocator reserves on the device for a step of this size."""
        return self.at(size).reserved_bytes

    def fits(self, size: int, room_bytes: int) -> bool:
        """Whether a step of this size is predicted to fit in `room_bytes`."""
        return self.at(size, room_bytes).reserved_bytes <= room_bytes

    def safe_bytes(self, room_bytes: int) -> int:
        """Return the prediction up to which a step fits in `room_bytes` in spite of the uncertainty."""
        return int(room_bytes / (1 + self.uncertainty))

    def largest(self, room_bytes: int, most: int) -> int:
        """Return the largest size up to `most` whose step is predicted to fit in `room_bytes`; 0 if none is.

        Powers of two are bisected first, then the sizes between two of them, in an order that does not depend on
        `most`: fragments of the cache can make a size fail below one that fits, and then the order matters.
        """

        def fits(size: int) -> bool:
            return size <= most and self.fits(size, room_bytes)

        power, too_large = -1, _POWERS
        while too_large - power > 1:
            middle = (power + too_large) // 2
            power, too_large = (middle, too_large) if fits(1 << middle) else (power, middle)
        if power < 0:
            return 0
        low, high = 1 << power, 2 << power
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
