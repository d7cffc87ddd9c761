"""What is said of losses whose gradient may be wrong, each once."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from autoaccum._arguments import listed
from autoaccum.errors import LossWarning

if TYPE_CHECKING:
    from collections.abc import Iterable

# State named in a warning.
_NAMED = 5


class LossWarnings:
    """Warnings of gradients that may be wrong.

    Attributes:
        texts: All that was said.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._moving: set[str] = set()  # state that was warned of

    def warn(self, text: str) -> None:
        """Warn once that a gradient may be wrong."""
        if text not in self.texts:
            self.texts.append(text)
            warnings.warn(f"autoaccum: {text}", LossWarning, stacklevel=2)

    def of_clamp(self, name: str) -> None:
        """Warn of a divisor that is larger in a micro-batch than what is counted there."""
        self.warn(
            f"loss {name!r} divides by more in a micro-batch than is counted there, as max(1, n) does where n is 0: "
            "such micro-batches then count too much; return the (sum, weight) pair with n itself"
        )

    def of_divisor(self, name: str, divisor: float, *, is_only: bool) -> None:
        """Warn of a sum, which may be the `is_only` summand, that may be a mean which is divided by max(k, n)."""
        self.warn(
            f"loss {name!r} is divided by {divisor:g} in all micro-batches, as by max({divisor:g}, n) where n is at "
            f"most {divisor:g}, and is taken for a sum: micro-batches are added, which is right if {divisor:g} is a "
            "constant; return the (sum, weight) pair with n itself"
            f"{', or pass loss_reduction=' + repr('sum') if is_only else ''}"
        )

    def of_samples(self, name: str) -> None:
        """Warn of a pair that counts by samples a loss which compares them."""
        self.warn(
            f"loss {name!r} gives samples other losses together than in two parts, and counts by samples, as its pair "
            "says: its gradient may differ from the whole batch's"
        )

    def of_unchecked(self, name: str) -> None:
        """Warn of a loss of which no check could compare two parts."""
        self.warn(
            f"loss {name!r}: in none of the samples that were tried does something count in two parts, so what it is "
            "divided by is read from its graph and not checked; a (sum, weight) pair says it"
        )

    def of_compared_samples(self, *, by_state: bool) -> None:
        """Warn of a model that compares samples, or moves `by_state` that it reads, under a loss of torch."""
        if by_state:
            self.warn(
                "the model's outputs depend on state that forward() carries from call to call (a running mean, a "
                "hidden state, a queue), which moves once for each micro-batch, so the gradient is not that of the "
                "whole batch; move it once an optimizer step, from a callback's on_step (docs/losses.md)"
            )
            return
        self.warn(
            "the model's outputs for a sample depend on the others of its micro-batch, as x - x.mean(0) in forward() "
            "makes them, so the gradient is not that of the whole batch (BatchNorm with running statistics is left "
            "out of this check)"
        )

    def of_state(self, names: Iterable[str]) -> None:
        """Warn of state that forward passes move; once of each name."""
        new = sorted(set(names) - self._moving)
        self._moving |= set(new)
        if new:
            self.warn(
                f"forward() moves {listed(new, _NAMED)}: once for each micro-batch, not once an optimizer step, and "
                "later micro-batches meet other values than the first. For the whole batch's gradient, collect in a "
                "buffer in forward() what moves them, and move them once an optimizer step, from a callback's on_step "
                "(docs/losses.md)"
            )

    def of_hidden_state(self) -> None:
        """Warn of a loss that is another in a second pass over the same samples."""
        self.warn(
            "the loss of the same samples differs from pass to pass, though the attributes of modules were put back, "
            "random generators among them. If it draws from another generator, make that an attribute of the module. "
            "If it depends on state that is kept elsewhere (an object, a closure, a class, an array), that moves once "
            "for each micro-batch: keep it in a buffer, and move it once an optimizer step, from a callback's on_step"
        )
