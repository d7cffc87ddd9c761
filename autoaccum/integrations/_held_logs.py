"""Holds back what a Lightning step logs for the parts of a batch, and logs it once for the whole batch.

A step is called for each part, again after memory has run out, and for samples that show what the loss runs over. Only
calls for parts that were completed count.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum.integrations._joined_parts import mean
from autoaccum.integrations._metric_values import MetricValues

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autoaccum.integrations._joined_parts import Weights

# Of one call of `log`: its number, what was logged (None for a metric) and its batch size, if it has one.
Entry = tuple[int, Tensor | None, int | None]

_EXTREMES = {"max": torch.amax, "min": torch.amin}
_SUM, _MEAN = "sum", "mean"
# How far a loss that is logged in single precision may be from itself.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class _Call:
    """A call of `log`, which is the same for each part but for its value and batch size."""

    fx: str
    name: str
    metric: Any
    options: dict[str, Any]

    @property
    def reduction(self) -> str:
        chosen = self.options.get("reduce_fx", _MEAN)
        return str(chosen if isinstance(chosen, str) else getattr(chosen, "__name__", _MEAN)).removeprefix("a")


class HeldLogs:
    """What a step logs while it is called for the parts of one batch.

    Args:
        trainer: The trainer that collects what is logged.
    """

    def __init__(self, trainer: Any) -> None:
        self._results = trainer._results
        self._calls: dict[tuple[str, str, int], _Call] = {}
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._part: list[Entry] = []
        module = trainer.lightning_module
        self._values = None if self._results is None else MetricValues(module.modules())

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold back what is logged in the block."""
        if self._results is None:  # a loop that logs nothing
            yield
            return
        self._results.log = self._note  # the collection's attribute, which hides its method
        try:
            yield
        finally:
            del self._results.log

    def begin_part(self) -> list[Entry]:
        """Return the list that the next calls are noted in."""
        self._counts.clear()
        self._part = []
        return self._part

    def _note(self, fx: str, name: str, value: Any, **options: Any) -> None:
        key = (fx, name, self._counts[fx, name])
        self._counts[fx, name] += 1
        is_number = isinstance(value, Tensor)
        size = options.pop("batch_size", None)
        if key not in self._calls:
            self._numbers[key] = len(self._calls)
            self._calls[key] = _Call(fx, name, None if is_number else value, options)
        self._part.append((self._numbers[key], value.detach().clone() if is_number else None, size))

    def log(
        self,
        parts: Sequence[Sequence[Entry]],
        weights: Weights,
        losses: Sequence[Tensor] = (),
        loss: Tensor | None = None,
    ) -> None:
        """Log each name once for the whole batch.

        Args:
            parts: What was noted for each part that was completed.
            weights: What the parts weigh.
            losses: The loss of each part, if it is known.
            loss: That of the batch.
        """
        calls = list(self._calls.values())
        entries: dict[int, list[tuple[int, Tensor | None, int | None]]] = {}
        for part, noted in enumerate(parts):
            for number, value, size in noted:
                entries.setdefault(number, []).append((part, value, size))
        for number, of_parts in entries.items():
            call, sizes = calls[number], [size for _, _, size in of_parts]
            size = None if any(one is None for one in sizes) else sum(one for one in sizes if one is not None)
            if call.metric is None and loss is not None and _are_equal(of_parts, losses):
                value = loss  # whatever it is logged as
            elif call.metric is None:
                value = _whole(call, of_parts, weights)
            else:
                value = call.metric
                if self._values is not None and len(parts) > 1 and call.options.get("on_step"):
                    self._values.set_to_whole(value)
            self._results.log(call.fx, call.name, value, batch_size=size, **call.options)


def _whole(call: _Call, of_parts: Sequence[tuple[int, Tensor | None, int | None]], weights: Weights) -> Tensor:
    """Return what the step would have logged for the whole batch."""
    numbers, found, sizes = zip(*of_parts, strict=True)
    values: list[Tensor] = list(found)
    if len(values) == 1:
        return values[0]
    if call.reduction in _EXTREMES:
        return _EXTREMES[call.reduction](torch.stack(values), dim=0)
    if call.reduction == _SUM:
        return torch.stack(values).sum()
    usual = weights.usual
    return mean(
        values, [usual[number] if size is None else float(size) for number, size in zip(numbers, sizes, strict=True)]
    )


def _are_equal(of_parts: Sequence[tuple[int, Tensor | None, int | None]], losses: Sequence[Tensor]) -> bool:
    """Whether what was logged is the loss of each part."""
    if len(of_parts) != len(losses):
        return False
    values = [value for _, value, _ in of_parts if value is not None]
    logged, trained = (torch.stack([one.double().reshape(()) for one in some]) for some in (values, losses))
    return torch.allclose(logged, trained, rtol=_ROUNDING, atol=0.0, equal_nan=True)
