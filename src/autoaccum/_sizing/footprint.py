"""Records the peak memory of a training step by category, and extrapolates it to other sizes by a line.

`_estimate/estimate.py` creates these records and the report reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


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


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted memory of a training step of any size.

    Attributes:
        footprints: Footprints of the traced sizes, ascending; at least one.
        real_step: Whether a real small step was run because the model does not run on fake tensors.
        notes: Limitations of the estimate, each a sentence.
    """

    footprints: tuple[Footprint, ...]
    real_step: bool = False
    notes: Sequence[str] = ()

    @property
    def bytes_per_sample(self) -> int:
        """Memory per additional sample, by the two largest sizes; 0 if there is only one."""
        if len(self.footprints) == 1:
            return 0
        below, above = self.footprints[-2:]
        return max(0, above.reserved_bytes - below.reserved_bytes) // (above.size - below.size)

    @property
    def fixed_bytes(self) -> int:
        """Memory independent of the size, by the same line."""
        last = self.footprints[-1]
        return max(0, last.reserved_bytes - last.size * self.bytes_per_sample)

    def reserved_bytes(self, size: int) -> int:
        """Predict the bytes that the allocator reserves on the device for a step of this size."""
        known = {footprint.size: footprint.reserved_bytes for footprint in self.footprints}
        return known.get(size, max(self.fixed_bytes + size * self.bytes_per_sample, self.footprints[0].reserved_bytes))

    def largest(self, free_bytes: int, most: int) -> int:
        """Return the largest size up to `most` whose step is predicted to fit in `free_bytes`; 0 if none is."""
        low, high = 0, most
        while low < high:
            size = (low + high + 1) // 2
            low, high = (size, high) if self.reserved_bytes(size) <= free_bytes else (low, size - 1)
        return low
