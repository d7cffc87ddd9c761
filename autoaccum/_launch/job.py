"""What a recipe returns to `autoaccum report`: the arguments of one call of `fit`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from autoaccum._data.regrouping import TOKENS_ARE, check_target, tokens_of
from autoaccum._data.splits import piece_of
from autoaccum._training.api import fit
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

_TARGETS = {"target_batch": "target_tokens", "target_tokens": "target_batch"}


class Job:
    """The arguments of a call of `autoaccum.fit`, returned by a recipe's function for `autoaccum report`.

    `autoaccum.fit(**job.arguments)` makes that call. The arguments are not checked before.

    Args:
        arguments: The positional arguments of `fit`. `model` may also be a function that makes the model.
        named: Its other arguments.

    Attributes:
        arguments: All of them, by name.

    Raises:
        TypeError: `fit` has no such argument.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        try:
            bound = inspect.signature(fit).bind_partial(*arguments, **named)
        except TypeError as error:
            raise TypeError(f"Job() {error}; its arguments are those of autoaccum.fit") from None
        self.arguments: dict[str, Any] = dict(bound.arguments)

    def get(self, name: str) -> Any:
        """Return an argument, by default the one of `fit`; None where `fit` has no default."""
        default = inspect.signature(fit).parameters[name].default
        return self.arguments.get(name, None if default is inspect.Parameter.empty else default)

    def with_arguments(self, given: Mapping[str, Any]) -> Job:
        """Return the job with other arguments; a target in tokens replaces one in samples, and the reverse."""
        replaced = {_TARGETS[name] for name in given.keys() & _TARGETS.keys()} - given.keys()
        return Job(**{name: value for name, value in self.arguments.items() if name not in replaced} | dict(given))

    def samples_of_target(self, batch: Any) -> int:
        """Return the samples of an optimizer step; with `target_tokens`, how many of a batch's average length.

        Raises:
            InvalidInputError: There is no target, or the batch does not tell its tokens, or has none.
        """
        target_batch, target_tokens = self.get("target_batch"), self.get("target_tokens")
        check_target(target_batch, target_tokens)
        if target_tokens is None:
            return int(target_batch)
        counts = tokens_of(piece_of(batch, self.get("split")))
        if not sum(counts):
            raise InvalidInputError(f"target_tokens={target_tokens} finds no token in the first batch: {TOKENS_ARE}")
        return max(1, round(int(target_tokens) * len(counts) / sum(counts)))
