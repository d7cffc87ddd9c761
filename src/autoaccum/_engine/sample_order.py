"""Puts the samples of each window in the order in which micro-batches take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._data.by_length import ByLength, CannotBeOrderedError
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._data.padding import Lengths
    from autoaccum._system.notices import Notices


class LengthOrder:
    """Takes the samples of each window by length, the longest first.

    Args:
        lengths: As for `fit`.
        modules: The modules of the training step.
        notices: Reports choices made for the user.
        in_tokens: Whether micro-batches are counted in tokens, so that there must be an order.
    """

    def __init__(
        self, lengths: Lengths | None, modules: Iterable[nn.Module], notices: Notices, *, in_tokens: bool = False
    ) -> None:
        self._lengths = lengths
        self._modules = modules
        self._notices = notices
        self._in_tokens = in_tokens

    def of(self, window: Window) -> Window:
        """Return a window in this order, or as it is if its samples cannot be put in order.

        Raises:
            InvalidInputError: They cannot be, and micro-batches are counted in tokens.
        """
        if not window.samples:
            return window
        try:
            ordered = ByLength.of(window, self._lengths)
        except CannotBeOrderedError as error:
            if self._in_tokens:
                raise InvalidInputError(
                    f"target_tokens= cuts windows by the columns of their samples, and they cannot be told: {error}; "
                    "pass lengths=, a function of a batch, or target_batch="
                ) from None
            self._notices.say(
                f"samples stay in the loader's order (order='length'): {error}; pass lengths=, or batches with an "
                "attention_mask",
                key="order",
            )
            return window
        self._tell(ordered)
        return ordered

    def _tell(self, ordered: ByLength) -> None:
        if not ordered.is_trimmed:
            self._notices.say(
                "no attention_mask and no lengths= say what is padding, so micro-batches keep all columns", key="order"
            )
        elif any(_draws(module) for one in self._modules for module in one.modules()):
            self._notices.say(
                "samples of a window are taken by length: dropout masks meet other samples than in the loader's order",
                key="order",
            )


def _draws(module: nn.Module) -> bool:
    return "Dropout" in type(module).__name__ and getattr(module, "p", 1.0) != 0.0
