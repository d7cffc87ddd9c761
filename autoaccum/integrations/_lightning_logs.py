"""Holds back what a Lightning step logs for the parts of a batch, and logs it once for the whole batch.

A step is called for each part, again after memory has run out, and for samples that its loss is checked on. Only calls
for parts that were completed count.
"""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from autoaccum.integrations._joined_parts import mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_OTHERS: dict[str, Any] = {"max": torch.amax, "min": torch.amin, "sum": torch.sum}


@dataclass(slots=True)
class Logged:
    """What one call of a step has logged.

    Attributes:
        values: Arguments of `self.log` after the name, by name and how often it was logged before.
        calls: Calls of loggers themselves, to be made later.
    """

    values: dict[tuple[str, int], tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    calls: list[Callable[[], object]] = field(default_factory=list)


class HeldLogs:
    """What a module's steps log while they are called for the parts of one batch.

    Args:
        trainer: The trainer, with its module.

    Attributes:
        of_batch: A copy of each of the module's metrics, which counts one batch alone.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._part = Logged()
        # Of each name: `batch_size=` of the calls so far, up to the second, and the parts' numbers of samples.
        self._given: dict[tuple[str, int], tuple[set[Any], set[int]]] = {}
        self._note = self._noted  # one function for all batches, for the compiler
        metrics: list[Metric] = [module for module in self._module.modules() if isinstance(module, Metric)]
        # What they have computed may have a graph, which cannot be copied.
        found = {id(value): None for metric in metrics for value in (metric._forward_cache, metric._computed)}
        self.of_batch = nn.ModuleList([deepcopy(metric, found.copy()) for metric in metrics])
        self._copies: list[tuple[Metric, Any]] = [*zip(metrics, self.of_batch, strict=True)]

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold back what is logged in the block, also by loggers themselves."""
        loggers, handles = self._trainer.loggers, []
        for metric, copy in self._copies:
            copy.reset()
            copy.sync_on_compute = metric.dist_sync_on_step
            handles.append(metric.register_forward_hook(partial(_count, copy), with_kwargs=True))
        # Attributes, which hide the methods.
        self._module.log = self._note
        for logger in loggers:
            logger.log_metrics = partial(self._call, logger.log_metrics)
        try:
            yield
        finally:
            for held, name in ((self._module, "log"), *((logger, "log_metrics") for logger in loggers)):
                delattr(held, name)
            for handle in handles:
                handle.remove()

    def begin_part(self) -> Logged:
        """Return what the next calls are noted in."""
        self._part = Logged()
        return self._part

    def end_part(self, size: int) -> None:
        """Note of how many samples the part was."""
        for key, (_, _, options) in self._part.values.items():
            given, sizes = self._given.setdefault(key, (set(), set()))
            if len(given) < 2:  # noqa: PLR2004 - then it depends on the part
                given.add(options.get("batch_size"))
                sizes.add(size)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _noted(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        values, number = self._part.values, 0
        while (name, number) in values:
            number += 1
        values[name, number] = value.detach().clone() if isinstance(value, Tensor) else value, args, options

    def _call(self, log: Callable[..., object], *args: Any, **options: Any) -> None:
        self._part.calls.append(partial(log, *args, **options))

    def log(self, parts: Sequence[Logged], sizes: Sequence[int]) -> None:
        """Log each name once for the whole batch; what loggers were given themselves, as often as it was.

        Args:
            parts: Of each part that was completed.
            sizes: The samples of each part.
        """
        for call in [call for part in parts for call in part.calls]:
            call()
        for key in dict.fromkeys(key for part in parts for key in part.values):
            found = [(*part.values[key], size) for part, size in zip(parts, sizes, strict=True) if key in part.values]
            values, (args, *_), (options, *others), counts = zip(*found, strict=True)
            given = [one.get("batch_size") for one in (options, *others)]
            # One number for all parts is that of the batch, however it is cut.
            ever, seen = self._given[key]
            is_of_batch = None in given or (len(ever) == 1 and ever != seen)
            value = self._whole(options.get("reduce_fx", "mean"), values, counts if is_of_batch else given)
            total = given[0] if is_of_batch else sum(given)
            self._module.log(key[0], value, *args, **options | {"batch_size": total})

    def _whole(self, reduction: Any, values: Sequence[Any], weights: Sequence[float]) -> Any:
        """Return what the step would have logged for the whole batch."""
        first = values[0]
        if len(values) == 1:
            return first
        if isinstance(first, Metric):
            for metric, copy in self._copies:
                if metric is first and copy.update_called:
                    first._forward_cache = copy.compute()  # where Lightning reads the value of a step
            return first
        numbers = [torch.as_tensor(value) for value in values]
        name = str(reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")).removeprefix("a")
        return _OTHERS[name](torch.stack(numbers), dim=0) if name in _OTHERS else mean(numbers, weights)


def _count(copy: Metric, _metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any], _value: Any) -> None:
    copy.update(*args, **kwargs)
