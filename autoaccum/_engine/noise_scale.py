"""Estimates the gradient noise scale from the gradients of some windows' micro-batches.

The noise scale is the number of samples at which the noise in a gradient is as large as the gradient itself: the trace
of the covariance of one sample's gradient, divided by the squared norm of its mean. A much smaller batch makes noisy
updates, so a larger one pays; a much larger batch hardly improves them. Source: McCandlish et al., "An Empirical Model
of Large-Batch Training" (2018), appendix A, which has two batches of different size where this has micro-batches of
unequal sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from autoaccum._data.by_length import ByLength
from autoaccum._data.splits import is_default
from autoaccum._system import signals

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from torch.utils.hooks import RemovableHandle

    from autoaccum._data.batches import Window
    from autoaccum._system.notices import Notices

# Windows between two that are measured, with noise_scale=True.
# The weight of all earlier windows in the moving averages, once there are many.
_KEPT = 0.9
_FEWEST = 2
# From this multiple of the target batch on, a larger one is said to pay, and below the inverse a smaller one.
_PAYS = 2.0


@dataclass(frozen=True, slots=True)
class Spread:
    """How far the gradients of one window's micro-batches are apart.

    Attributes:
        variance: An unbiased estimate of the trace of the covariance of one sample's gradient.
        squared_norm: The squared norm of the window's mean gradient, from all its samples.
        freedom: Degrees of freedom: the number of micro-batches less one for each process.
    """

    variance: float
    squared_norm: float
    freedom: int


class SquaredNorm:
    """A context that computes the squared norm of the gradient of the backward passes inside it.

    Gradients are looked at as they arrive, before autograd adds them to `.grad`, so that no second set of them is held;
    except where several backward passes make one gradient.

    Args:
        parameters: The parameters of which the gradient counts.
        device: Where the result is.
        is_in_parts: Whether several backward passes make the gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device, *, is_in_parts: bool) -> None:
        self._parameters = parameters
        self._device = device
        self._is_in_parts = is_in_parts
        self._hooks: list[RemovableHandle] = []
        self._norms: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._is_whole = True

    def __enter__(self) -> Self:
        with signals.held():  # an interrupt must not leave a hook behind unrecorded
            for place, parameter in enumerate(self._parameters):
                if parameter.requires_grad:
                    hook = parameter.register_hook(partial(self._see, place))  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def value(self) -> Tensor | None:
        """Return the squared norm, in double precision where the device has that.

        None if it is not known, since a gradient came in several parts unexpectedly, as that of a parameter shared by
        reentrant checkpoints does.
        """
        if self._is_in_parts:
            sums, self._sums = self._sums, {}
            return squared_norm(sums.values(), self._device)
        return _squared([*self._norms.values()], self._device) if self._is_whole else None

    def _see(self, place: int, gradient: Tensor) -> None:
        if self._is_in_parts:
            earlier = self._sums.get(place)
            self._sums[place] = gradient.detach() if earlier is None else earlier + gradient.detach()
            return
        self._is_whole = self._is_whole and place not in self._norms
        self._norms[place] = _norm(gradient.detach())


def squared_norm(gradients: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """Return the squared norm of gradients, on a device."""
    return _squared([_norm(gradient) for gradient in gradients if gradient is not None], device)


def shuffled(window: Window, seed: int) -> Window:
    """Return a window with its samples in random order, so that its micro-batches are random parts of it.

    The loader's order stays where samples cannot all be joined into one batch, where a split cuts them, and where a
    batch holds a count of its own targets. Samples that were taken by length can always be reordered.

    Args:
        window: The window.
        seed: Determines the order.
    """
    can_be_joined = is_default(window.split) and window.is_plain and len(window.groups()) == 1
    if not isinstance(window, ByLength) and (not can_be_joined or window.holds_counts()):
        return window
    # By a generator of its own, so that the window has the same order when a run is repeated.
    return window.reordered(torch.randperm(window.samples, generator=torch.Generator().manual_seed(seed)))


def spread_of(norms: Sequence[float], shares: Sequence[float], whole: float, samples: int) -> Spread | None:
    """Return how far the gradients of micro-batches are apart; None if fewer than two count.

    Args:
        norms: The squared norms of what each micro-batch adds to the mean gradient.
        shares: The share of each in the mean; their sum is 1.
        whole: The squared norm of the mean gradient.
        samples: Samples of all micro-batches together.
    """
    counted = [(norm, share) for norm, share in zip(norms, shares, strict=True) if share > 0.0]
    if len(counted) < _FEWEST:
        return None
    # sum n_i |g_i|^2 - N |G|^2 for micro-batches of n_i = share_i N samples, which add share_i g_i to the mean.
    apart = samples * (sum(norm / share for norm, share in counted) - whole)
    return Spread(apart / (len(counted) - 1), whole, len(counted) - 1)


def pooled(spreads: Iterable[tuple[float, int]]) -> tuple[float, int] | None:
    """Return the variance over several processes, and its degrees of freedom; None if none has measured it."""
    found = [(variance, freedom) for variance, freedom in spreads if freedom]
    total = sum(freedom for _, freedom in found)
    return (sum(variance * freedom for variance, freedom in found) / total, total) if total else None


class NoiseScale:
    """The gradient noise scale of a training, averaged over the windows that were measured.

    Args:
        every: Number of windows from one that is measured to the next.
        notices: Reports what stands in the way.

    Attributes:
        every: As the argument.
        measured: Number of windows measured.
    """

    def __init__(self, every: int, notices: Notices) -> None:
        self.every = every
        self.measured = 0
        self._notices = notices
        self._variance = self._squared_norm = 0.0
        self._hindrance: str | None = None

    @property
    def samples(self) -> float | None:
        """The noise scale in samples; None as long as it cannot be measured.

        It cannot be measured while the mean gradient is lost in its noise: its squared norm, less the share that is
        noise, is not positive then.
        """
        return self._variance / self._squared_norm if self.measured and self._squared_norm > 0.0 else None

    def is_due(self, number: int) -> bool:
        """Whether a window, counted from 1, is to be measured."""
        return number % self.every == 0

    def learn(self, spread: Spread, samples: int) -> None:
        """Take a window into account; one whose gradient overflowed is passed over.

        Args:
            spread: How far the gradients of its micro-batches are apart.
            samples: Its samples, over all processes.
        """
        without_noise = spread.squared_norm - spread.variance / samples
        if not (abs(spread.variance) < float("inf") and abs(without_noise) < float("inf")):
            return
        self.measured += 1
        # The first windows count alike, so that the average is not drawn towards zero. The quotient of averages, since
        # the average of quotients is biased.
        weight = max(1.0 / self.measured, 1.0 - _KEPT)
        self._variance += weight * (spread.variance - self._variance)
        self._squared_norm += weight * (without_noise - self._squared_norm)

    def summary(self, samples: int, optimizer: str, *, in_tokens: bool = False) -> str:
        """Return in one sentence what was measured.

        Args:
            samples: Samples of a window, over all processes; their mean, if the target is in tokens.
            optimizer: The name of the optimizer's class.
            in_tokens: Whether it is.
        """
        what = f"the {samples:,} samples of an update" if in_tokens else f"the target batch {samples:,}"
        if not self.measured:
            why = self._hindrance or f"one window in {self.every} is, once sizes are settled"
            return f"gradient noise scale not measured: {why}"
        if self.samples is None:
            return (
                f"gradient noise scale not measurable in {self.measured} windows: their mean gradient is lost in its "
                f"noise, so the scale is far above {what}, or more windows are needed"
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
        return {"measured": self.measured, "variance": self._variance, "squared_norm": self._squared_norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint has kept."""
        self.measured = state["measured"]
        self._variance, self._squared_norm = state["variance"], state["squared_norm"]

    def say_not_shuffled(self) -> None:
        """Report a loader that yields its samples in a fixed order."""
        self._notices.say(
            "noise_scale: the loader does not shuffle; where its samples are sorted, those of a window are more alike "
            "than those of the data, and the noise scale that is measured is too small; pass shuffle=True",
            key="noise of sorted samples",
        )

    def say_one_sample(self) -> None:
        """Report a window that cannot be cut in two."""
        self._notices.say(
            "noise_scale: a window of one sample cannot be cut in two, so it tells nothing about noise; a larger "
            "target batch would",
            key="noise of one sample",
        )
        self._hindrance = "a window of one sample tells nothing about noise"

    def say_cut_in_two(self) -> None:
        """Report that windows are cut in two only to be measured."""
        self._notices.say(
            f"noise_scale: windows fit at once, so one in {self.every} is cut in two to be measured", key="noise cut"
        )

    def say_not_cut(self) -> None:
        """Report that windows are not cut in two, since that would change the training."""
        self._notices.say(
            "noise_scale: windows fit at once, and are not cut in two to be measured, since BatchNorm would then "
            "compute its statistics from halves; smaller micro-batches make it measurable",
            key="noise not cut",
        )
        self._hindrance = "windows fit at once, and are not cut in two where there is BatchNorm"

    def say_batchnorm(self) -> None:
        """Report that BatchNorm makes gradients of samples depend on each other."""
        self._notices.say(
            "noise_scale: BatchNorm computes its statistics from each micro-batch, so the noise scale that is measured "
            "depends on the micro-batch's size too",
            key="noise batchnorm",
        )

    def say_unknown(self) -> None:
        """Report that gradients arrive in parts that cannot be told apart."""
        self._notices.say(
            "noise_scale: the gradient of a parameter arrives in several parts (reentrant checkpoints share it), so it "
            "is not measured; checkpoint with use_reentrant=False",
            key="noise in parts",
        )
        self._hindrance = "gradients arrive in several parts (reentrant checkpoints)"


def rounded(number: float) -> str:
    """Return a number as text, with two significant digits."""
    return f"{float(f'{number:.2g}'):,.0f}" if number >= 10.0 else f"{number:.2g}"  # noqa: PLR2004 - two digits


def _norm(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    half = values.dtype in (torch.float16, torch.bfloat16)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32 if half else None)
    return norm


def _squared(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    kind = torch.float32 if device.type == "mps" else torch.float64
    together = [norm.to(device, kind) for norm in norms] or [torch.zeros((), device=device, dtype=kind)]
    return torch.stack(together).square().sum()
