"""Holds back what a Lightning step logs for the parts of a batch, and logs it once for the whole batch.

A step is called for each part, again after memory has run out, and for samples that show what the loss runs over. Only
calls for parts that were completed count.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum.integrations._joined_parts import mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Of one call of `log`: the hook, the name and how often it was logged before; the value; and its options.
Entry = tuple[tuple[str, str, int], Any, dict[str, Any]]

_OTHERS: dict[str, Any] = {"max": torch.amax, "min": torch.amin, "sum": torch.sum}


class HeldLogs:
    """What a step logs while it is called for the parts of one batch.

    Args:
        trainer: The trainer that collects what is logged.
    """

    def __init__(self, trainer: Any) -> None:
        self._results = trainer._results
        self._loggers = trainer.loggers
        self._counts: Counter[tuple[str, str]] = Counter()
        self._part: list[Entry] = []

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold back what is logged in the block, also by loggers themselves."""
        if self._results is None:  # a loop that logs nothing
            yield
            return
        # Attributes, which hide the methods.
        self._results.log = self._note
        for number, logger in enumerate(self._loggers):
            logger.log_metrics = lambda *args, number=number, **kwargs: self._part.append(
                (("", "", number), args, kwargs)
            )
        try:
            yield
        finally:
            for held, name in ((self._results, "log"), *((logger, "log_metrics") for logger in self._loggers)):
                delattr(held, name)

    def begin_part(self) -> list[Entry]:
        """Return the list that the next calls are noted in."""
        self._counts.clear()
        self._part = []
        return self._part

    def _note(self, fx: str, name: str, value: Any, **options: Any) -> None:
        kept = value.detach().clone() if isinstance(value, Tensor) else value
        self._part.append(((fx, name, self._counts[fx, name]), kept, options))
        self._counts[fx, name] += 1

    def log(self, parts: Sequence[Sequence[Entry]], sizes: Sequence[int]) -> None:
        """Log each name once for the whole batch; what loggers were given themselves, as often as it was.

        Args:
            parts: What was noted for each part that was completed.
            sizes: The samples of each part.
        """
        calls: dict[tuple[str, str, int], list[tuple[int, Any, dict[str, Any]]]] = {}
        for size, noted in zip(sizes, parts, strict=True):
            for key, value, options in noted:
                if key[0]:
                    calls.setdefault(key, []).append((size, value, options))
                else:
                    self._loggers[key[2]].log_metrics(*value, **options)
        for (fx, name, _), of_parts in calls.items():
            of, values, (options, *others) = zip(*of_parts, strict=True)
            given = [one.get("batch_size") for one in (options, *others)]
            # One number for all parts is that of the batch, however it is cut.
            is_constant = len(set(given)) == 1 and given != list(of)
            total = given[0] if is_constant or None in given else sum(given)
            weights = of if is_constant or None in given else given
            value = _whole(options.get("reduce_fx", "mean"), values, weights) if isinstance(values[0], Tensor) else None
            self._results.log(fx, name, values[0] if value is None else value, **options | {"batch_size": total})


def _whole(reduction: Any, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return what the step would have logged for the whole batch."""
    if len(values) == 1:
        return values[0]
    name = str(reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")).removeprefix("a")
    whole: Tensor = _OTHERS[name](torch.stack(list(values)), dim=0) if name in _OTHERS else mean(values, weights)
    return whole
