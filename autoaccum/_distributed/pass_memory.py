"""Asks for the memory of a pass of all ranks before it begins, when a rank can still say that it lacks it.

A pass takes as much as an earlier one of as many elements of samples; a smaller one in proportion, and a larger one
what the line through smaller ones says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._engine.dtensor import fsdp_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from autoaccum._memory.base import MemoryBackend

# How much steeper than the line a larger pass may be.
_STEEPER = 1.25
# Numbers of elements that are remembered, the fewest and the most among them.
_MOST = 64


class PassMemory:
    """The memory that passes take in addition to what is held before them.

    Args:
        memory: The device.
        modules: The model, and losses that are modules.

    Attributes:
        before_reset: Called before the device's peak is reset.
        is_active: Whether passes are measured: where that takes no time, which on the host it does.
        peak_bytes: The most in use by tensors in the passes since `begin`; None if nothing was measured.
    """

    def __init__(self, memory: MemoryBackend, modules: Iterable[nn.Module]) -> None:
        self._memory = memory
        self._layer_bytes = max(map(_gathered_bytes, fsdp_modules(modules)), default=0)
        # By whether gradients exist already, and by the elements of a pass.
        self._seen: dict[bool, dict[int, int]] = {True: {}, False: {}}
        self._held_bytes: int | None = None
        self.before_reset: Callable[[], object] | None = None
        self.is_active = not memory.is_host
        self.peak_bytes: int | None = None

    def begin(self) -> None:
        """Begin a window."""
        self.peak_bytes = None

    def reset(self) -> int | None:
        """Measure from now on; return what tensors take now."""
        if self.is_active and self.before_reset is not None:
            self.before_reset()
        self._memory.reset_peak()
        return self._memory.peak_in_use_bytes()

    def enter(self, elements: int, *, has_gradients: bool, is_least: bool) -> None:
        """Prepare for a pass.

        Args:
            elements: The elements of its samples.
            has_gradients: Whether an earlier pass of the window has made gradients.
            is_least: Whether no smaller one could be made: then only trying tells whether more than ever fits.

        Raises:
            torch.OutOfMemoryError: What it should take, and one more layer gathered from all ranks, is not free.
        """
        if self.is_active:
            # A first pass of a window makes the gradients too, so it stands for later ones until one was seen.
            seen = self._seen[has_gradients] or self._seen[not has_gradients]
            self._memory.secure(_expected(seen, elements, is_least=is_least) + self._layer_bytes)
            self._held_bytes = self.reset()

    def leave(self, elements: int, *, had_gradients: bool) -> None:
        """Record what a pass has taken."""
        peak = self._memory.peak_in_use_bytes() if self.is_active else None
        if peak is None or self._held_bytes is None:
            return
        self.peak_bytes = max(peak, self.peak_bytes or 0)
        seen, taken = self._seen[had_gradients], peak - self._held_bytes
        seen[elements] = max(taken, seen.get(elements, 0))
        if len(seen) > _MOST:
            del seen[sorted(seen)[_MOST // 2]]


def _expected(seen: dict[int, int], elements: int, *, is_least: bool) -> int:
    """Return the bytes that a pass should take, given those of others by their elements."""
    if not seen:
        return 0
    fewest = min(seen)
    if elements < fewest:  # or a cut that is made smaller would never ask for less
        return seen[fewest] * elements // fewest
    enough = [taken for many, taken in seen.items() if many >= elements]
    if enough:
        return min(enough)
    least, (most, taken) = seen[fewest], max(seen.items())
    if is_least:
        return max(seen.values())
    if fewest == most:
        return taken * elements // most  # all of it may be of the samples
    return taken + int(max(taken - least, 0) / (most - fewest) * (elements - most) * _STEEPER)


def _gathered_bytes(part: Any) -> int:
    """Return the bytes of what a part gathers from all ranks at once."""
    inner = {id(one) for module in fsdp_modules([part]) if module is not part for one in module.parameters()}
    return sum(one.numel() * one.element_size() for one in part.parameters() if id(one) not in inner)
