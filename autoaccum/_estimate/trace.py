"""Turns the timelines of a traced step into an `Estimate` of its peak on the CPU or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autoaccum._estimate.allocation_trace import between
from autoaccum._estimate.cuda_allocator import replay_step
from autoaccum._estimate.cuda_dispatch import cublas_bytes
from autoaccum._estimate.footprint import footprint_of
from autoaccum._estimate.gpu_properties import properties_of
from autoaccum._system.own_code import raised_here
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from autoaccum._estimate.allocation_trace import Timeline
    from autoaccum._estimate.fake_step import Adapt
    from autoaccum._estimate.footprint import Footprint
    from autoaccum._estimate.gpus import GPU

# Micro-batches are smaller than two to this power.
_POWERS = 40


@dataclass(frozen=True, slots=True)
class Traced:
    """A training step traced on one kind of device.

    Attributes:
        step_of: Returns the timeline of a size.
        sizes: The sizes whose footprints are recorded, ascending.
        notes: The assumptions, each a sentence.
        uncertainty: A step on a GPU may take this share more than predicted.
        gpu_answers: What the model asked of the GPU, and was told.
        adapted: Traces the step with more changes of the model, at the largest size to begin with.
    """

    step_of: Callable[[int], Timeline]
    sizes: tuple[int, ...]
    notes: tuple[str, ...]
    uncertainty: float
    gpu_answers: Mapping[str, object]
    adapted: Callable[[Sequence[Adapt]], Traced]

    def holds_for(self, gpu: GPU) -> bool:
        """Whether another GPU, which computes float32 alike, would have told the model the same."""
        known = properties_of(gpu)
        return all(known[name] == answer for name, answer in self.gpu_answers.items())

    def changed(self, change: Callable[[Timeline], Timeline]) -> Traced:
        """Return the step with a change made to the timeline of each size."""
        return replace(
            self,
            step_of=lambda size: change(self.step_of(size)),
            adapted=lambda adapts: self.adapted(adapts).changed(change),
        )

    def estimate(self, gpu: GPU | None = None) -> Estimate:
        """Return the peak memory of the steps.

        Args:
            gpu: The GPU whose caching allocator serves them; None for exact bytes, as the CPU's allocator counts.
        """
        # The step of one sample may be that of two, if the model refuses one.
        timelines = {timeline.size: timeline for timeline in map(self.step_of, self.sizes)}
        footprints = tuple(_footprint(timelines[size], gpu) for size in sorted(timelines))
        return Estimate(footprints, self.notes, 0.0 if gpu is None else self.uncertainty, self, gpu)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted memory of a training step of any size.

    Attributes:
        footprints: Footprints of the traced sizes, ascending; at least one.
        notes: Limitations of the estimate, each a sentence.
        uncertainty: A step may take this share more than predicted.
        traced: The traced step.
        gpu: The GPU whose caching allocator serves it; None for exact bytes.
    """

    footprints: tuple[Footprint, ...]
    notes: tuple[str, ...]
    uncertainty: float
    traced: Traced = field(repr=False, compare=False)
    gpu: GPU | None
    _fits: dict[tuple[int, int], bool] = field(default_factory=dict, repr=False, compare=False)

    def at(self, size: int, room_bytes: int | None = None) -> Footprint:
        """Return the footprint of a step of this size; if it does not fit, what it would reserve without a limit."""
        return _footprint(self.traced.step_of(size), self.gpu, room_bytes)

    def fits(self, size: int, room_bytes: int) -> bool:
        """Whether a step of this size is predicted to fit in `room_bytes`."""
        if (size, room_bytes) in self._fits:
            return self._fits[size, room_bytes]
        step = self.timeline(size)
        fits = step.peak().live_bytes <= room_bytes
        if self.gpu is not None and fits:
            fits = replay_step(step, room_bytes) is not None
        self._fits[size, room_bytes] = fits
        return fits

    @property
    def bytes_per_sample(self) -> int:
        """Memory of tensors per additional sample, by the two largest sizes traced; 0 if there is only one."""
        if len(self.footprints) == 1:
            return 0
        below, above = self.footprints[-2:]
        return max(0, above.peak_bytes - below.peak_bytes) // (above.size - below.size)

    def timeline(self, size: int) -> Timeline:
        """Return the step of this size, with the workspaces of cuBLAS."""
        timeline = self.traced.step_of(size)
        return timeline if self.gpu is None else _with_cublas(timeline, self.gpu)

    def safe_bytes(self, room_bytes: int) -> int:
        """Return the prediction up to which a step fits in `room_bytes` in spite of the uncertainty."""
        return int(room_bytes / (1 + self.uncertainty))

    def largest(self, room_bytes: int, most: int) -> int:
        """Return the largest size up to `most` whose step is predicted to fit in `room_bytes`; 0 if none is.

        If `most` itself does not fit, powers of two are bisected first, then the sizes between two of them, in an order
        that does not depend on `most`: fragments of the cache can make a size fail below one that fits, and then the
        order matters.
        """

        def fits(size: int) -> bool:
            return size < most and self.fits(size, room_bytes)

        if self.fits(most, room_bytes):
            return most
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


def _footprint(timeline: Timeline, gpu: GPU | None, room_bytes: int | None = None) -> Footprint:
    if gpu is None:
        return footprint_of(timeline)
    step = _with_cublas(timeline, gpu)
    served = replay_step(step, gpu.free_bytes if room_bytes is None else room_bytes) or replay_step(step)
    assert served is not None
    return footprint_of(step, served.peak_allocated_bytes, served.peak_reserved_bytes)


def _with_cublas(timeline: Timeline, gpu: GPU) -> Timeline:
    return timeline.with_held(2 * cublas_bytes(gpu.name))


class TracedSizes:
    """Timelines of a step of any size, from as few traced ones as possible.

    Two sizes are traced. If every storage of theirs is fixed or proportional to the samples, any other size follows
    exactly. If not, sizes are traced where they are asked for, at most between two powers of two, so that the timeline
    of a size does not depend on which others were asked for.

    Args:
        run: Traces a size.
        low: The smaller size from which others are derived.
        high: The larger one, traced at once; the same as `low` to derive none.
    """

    def __init__(self, run: Callable[[int], Timeline], low: int, high: int) -> None:
        self._run = run
        self._low, self._high = low, high
        self._known = {high: run(high)}

    def __call__(self, size: int) -> Timeline:
        """Return the timeline of a size."""
        if size not in self._known:
            is_base = size == self._low
            self._known[size] = self._run(size) if is_base else self._derived(size) or self._traced(size)
        return self._known[size]

    def _derived(self, size: int) -> Timeline | None:
        exact = between(self(self._low), self(self._high), size) if self._low < self._high else None
        least = 1 << (size.bit_length() - 1)
        if exact is not None or least == size:
            return exact
        return between(self(least), self(2 * least), size)

    def _traced(self, size: int) -> Timeline:
        high = self._high
        try:
            return self._run(size)
        except Exception as error:
            # The model refuses this size, as batch statistics refuse one sample. The next power of two takes more. Our
            # own errors are bugs.
            if size >= high or (raised_here(error) and not isinstance(error, InvalidInputError)):
                raise
            return self(min(high, 1 << size.bit_length()))
