"""Puts the samples of each window in the order in which micro-batches take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._arguments import check_choice
from autoaccum._data.by_length import ByLength, CannotBeOrderedError
from autoaccum._data.padding import check_lengths
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._data.padding import Lengths
    from autoaccum._system.notices import Notices

ORDERS = ("loader", "length")


def check_order(order: str, lengths: Lengths | None, *, in_tokens: bool = False) -> bool:
    """Return whether samples are taken by length.

    Raises:
        InvalidInputError: An argument is not valid, or has no effect.
    """
    check_choice("order", order, ORDERS)
    check_lengths(lengths)
    if lengths is not None and order != "length" and not in_tokens:
        raise InvalidInputError(
            "lengths= says how long samples are, and the loader's order does not ask; pass order='length' as well"
        )
    return order == "length" or in_tokens


class LengthOrder:
    """Takes the samples of each window by length, the longest first.

    Args:
        lengths: As for `fit`.
        modules: The modules of the training step.
        notices: Reports choices made for the user.
        counts_columns: Whether micro-batches are counted in columns instead of samples.
    """

    def __init__(
        self, lengths: Lengths | None, modules: Iterable[nn.Module], notices: Notices, *, counts_columns: bool = False
    ) -> None:
        self._lengths = lengths
        self._modules = modules
        self._notices = notices
        self._counts_columns = counts_columns

    def of(self, window: Window) -> Window:
        """Return a window in this order, or as it is if its samples cannot be put in order.

        Raises:
            InvalidInputError: They cannot be, and micro-batches are counted in columns.
        """
        if not window.samples:
            return window
        try:
            ordered = ByLength.of(window, self._lengths, counts_columns=self._counts_columns)
        except CannotBeOrderedError as error:
            if self._counts_columns:
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
