"""Puts the samples of each window in the order in which micro-batches take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum import _oom
from autoaccum._data.by_length import ByLength, CannotBeOrderedError
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._data.padding import Lengths
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._system.notices import Notices


class LengthOrder:
    """Takes the samples of each window by length, the longest first.

    Args:
        lengths: As for `fit`.
        step: The training step.
        notices: Reports choices made for the user.
        in_tokens: Whether micro-batches are counted in tokens, so that there must be an order.

    Attributes:
        lengths: As the argument.
    """

    def __init__(
        self, lengths: Lengths | None, step: TrainingStep, notices: Notices, *, in_tokens: bool = False
    ) -> None:
        self.lengths = lengths
        self._step = step
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
            try:
                ordered = ByLength.of(window, self.lengths)
            except Exception as error:
                if not _oom.is_oom(error):
                    raise
                _oom.let_go(error)
                self._step.memory.release()
                ordered = ByLength.of(window, self.lengths)
        except CannotBeOrderedError as error:
            if self._in_tokens:
                raise InvalidInputError(
                    f"target_tokens= puts the samples of a window together by their length, and cannot: {error}. A "
                    "loader of lists of samples (collate_fn=list, split=autoaccum.ListOfSamples(collate)) needs "
                    "neither, and a target in samples leaves batches as they come"
                ) from None
            self._notices.say(f"samples stay in the loader's order (order='length'): {error}", key="order")
            return window
        if not ordered.is_trimmed:
            kept = "micro-batches keep all columns" if self._in_tokens else "samples stay in the loader's order"
            self._notices.say(f"no attention_mask and no lengths= say what is padding, so {kept}", key="order")
            return ordered if self._in_tokens else window
        self._tell_of_masks()
        return ordered

    def _tell_of_masks(self) -> None:
        if any(_draws(module) for one in self._step.objective.modules for module in one.modules()):
            self._notices.say(
                "samples of a window are taken by length: dropout masks meet other samples than in the loader's order",
                key="order",
            )


def _draws(module: nn.Module) -> bool:
    return "Dropout" in type(module).__name__ and getattr(module, "p", 1.0) != 0.0
