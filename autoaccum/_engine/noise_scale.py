"""Estimates the gradient noise scale from two norms of a window: of its first micro-batch's gradient, and of its own.

The noise scale is the number of samples at which the noise in a gradient is as large as the gradient itself: the trace
of the covariance of one sample's gradient, divided by the squared norm of its mean. Source: McCandlish et al., "An
Empirical Model of Large-Batch Training" (2018), appendix A.1, with the first micro-batch as the small batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._data.splits import ListOfSamples, is_default

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from autoaccum._data.batches import Window
    from autoaccum._system.notices import Notices

# The weight of all earlier windows in the moving averages, once there are many.
_KEPT = 0.9
# From this multiple of the target batch on, a larger one is said to pay, and below the inverse a smaller one.
_PAYS = 2.0


@dataclass(frozen=True, slots=True)
class Spread:
    """How far the gradient of a part of a window is from the window's.

    Attributes:
        variance: An unbiased estimate of the trace of the covariance of one sample's gradient; it may be negative.
        squared_norm: The squared norm of the window's mean gradient, from all its samples.
    """

    variance: float
    squared_norm: float


def spread_of(part: float, whole: float, share: float, samples: int) -> Spread | None:
    """Return how far the gradient of a part is from the window's; None if the part is nothing, or all of it."""
    if not 0.0 < share < 1.0:
        return None
    return Spread(samples * (part / share**2 - whole) / (1.0 / share - 1.0), whole)


def squared_norm(gradients: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """Return the squared norm of gradients on a device, in double precision where that has it."""
    kind = torch.float32 if device.type == "mps" else torch.float64
    norms = [torch.zeros((), device=device, dtype=kind)]
    for gradient in gradients:
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            half = values.dtype in (torch.float16, torch.bfloat16)
            norms.append(torch.linalg.vector_norm(values, dtype=torch.float32 if half else None).to(device, kind))
    return torch.stack(norms).square().sum()


def shuffled(window: Window, seed: int) -> Window:
    """Return a window with its samples in an order that `seed` determines, so that micro-batches are random parts.

    The loader's order stays where samples cannot all be joined into one batch, where a split other than `ListOfSamples`
    cuts them, and where a batch holds numbers of its own.
    """
    can_be_joined = is_default(window.split) and window.is_plain and len(window.groups()) == 1
    if not isinstance(window.split, ListOfSamples) and (not can_be_joined or window.holds_numbers()):
        return window
    # By a generator of its own, so that the window has the same order when a run is repeated.
    order = torch.randperm(window.samples, generator=torch.Generator().manual_seed(seed))
    return window.chosen(order.tolist())


class NoiseScale:
    """The gradient noise scale of a training, averaged over the windows that were measured: one in `every`."""

    def __init__(self, every: int, notices: Notices) -> None:
        self.every = every
        self._notices = notices
        self._measured = 0
        self._variance = self._squared_norm = 0.0
        self._hindrance = f"one window in {every} is, once sizes are settled"

    @property
    def samples(self) -> float | None:
        """The noise scale in samples; None while the mean gradient is lost in its noise, or the noise in it."""
        return self._variance / self._squared_norm if min(self._variance, self._squared_norm) > 0.0 else None

    def is_due(self, number: int) -> bool:
        """Whether a window, counted from 1, is to be measured."""
        return number % self.every == 0

    def learn(self, spread: Spread, samples: int) -> None:
        """Take a window of so many samples over all processes into account, unless its gradient overflowed."""
        without_noise = spread.squared_norm - spread.variance / samples
        if not (abs(spread.variance) < float("inf") and abs(without_noise) < float("inf")):
            return
        self._measured += 1
        # The first windows count alike, so that the average is not drawn towards zero. The quotient of averages, since
        # the average of quotients is biased.
        weight = max(1.0 / self._measured, 1.0 - _KEPT)
        self._variance += weight * (spread.variance - self._variance)
        self._squared_norm += weight * (without_noise - self._squared_norm)

    def summary(self, samples: int, optimizer: str, *, in_tokens: bool = False) -> str:
        """Return in one sentence what was measured in windows of so many samples (their mean, in tokens)."""
        what = f"the {samples:,} samples of an optimizer step" if in_tokens else f"the target batch {samples:,}"
        if not self._measured:
            return f"gradient noise scale not measured: {self._hindrance}"
        if self.samples is None:
            lost, place = (
                ("mean gradient is lost in its noise", "above")
                if self._squared_norm <= 0.0
                else ("noise is lost in their gradient", "below")
            )
            return (
                f"gradient noise scale not measurable in {self._measured} windows: their {lost}, so the scale is far "
                f"{place} {what}, or more windows are needed"
            )
        times = self.samples / samples
        verdict = (
            "a larger batch would still pay"
            if times >= _PAYS
            else "a smaller batch would need fewer samples for the same progress"
            if times <= 1.0 / _PAYS
            else "the batch is about as large as pays"
        )
        own = "" if optimizer == "SGD" else f"; {optimizer}'s own is not measured"
        return f"gradient noise scale about {rounded(self.samples)} samples, {times:.2g} times {what}: {verdict}{own}"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"measured": self._measured, "variance": self._variance, "squared_norm": self._squared_norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint has kept."""
        self._measured = state["measured"]
        self._variance, self._squared_norm = state["variance"], state["squared_norm"]

    def say(self, text: str, *, hinders: bool = False) -> None:
        """Report what concerns the measurement once, and keep it for the summary if it prevents it."""
        self._notices.say(f"noise_scale: {text}", key=text)
        if hinders:
            self._hindrance = text


def rounded(number: float) -> str:
    """Return a number as text, with two significant digits."""
    return f"{float(f'{number:.2g}'):,.0f}" if number >= 10.0 else f"{number:.2g}"  # noqa: PLR2004 - two digits
