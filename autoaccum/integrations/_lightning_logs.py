"""Holds back what a Lightning step logs for the parts of a batch, and logs it once for the whole batch.

A step is called for each part, again after memory has run out, and for samples that its loss is checked on. Only calls
for parts that were completed count.
"""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from autoaccum._system.attributes import replaced
from autoaccum.errors import InvalidInputError
from autoaccum.integrations._joined_parts import is_of_nothing, mean
from autoaccum.integrations._refusals import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# What one call of a step has logged: by name and how often it was logged before, the value and further arguments.
Logged = dict[tuple[str, int], tuple[Any, dict[str, Any]]]

# By name, the function, and the number that does not change its result.
_OTHERS: dict[str, Any] = {"max": (torch.amax, -torch.inf), "min": (torch.amin, torch.inf), "sum": (torch.sum, 0.0)}
_ARGUMENTS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
_SIZE = "batch_size"
_REFUSED = refusal("a logger's log_metrics", "use self.log, or call it in a hook such as on_train_batch_end")


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
        self._part: Logged = {}
        self._of: tuple[Any, ...] = ()  # the step, and the number of its loader
        # Of each name: `batch_size=` of the calls so far, up to the second, and the parts' numbers of samples.
        self._given: dict[tuple[Any, ...], tuple[set[Any], set[int]]] = {}
        self._note = self._noted  # one function for all batches, for the compiler
        metrics: list[Metric] = [module for module in self._module.modules() if isinstance(module, Metric)]
        # What they have computed may have a graph, which cannot be copied.
        found = {id(value): None for metric in metrics for value in (metric._forward_cache, metric._computed)}
        self.of_batch = nn.ModuleList([deepcopy(metric, found.copy()) for metric in metrics])
        self._copies: list[tuple[Metric, Any]] = [*zip(metrics, self.of_batch, strict=True)]

    @contextmanager
    def of(self, *step: Any) -> Iterator[None]:
        """Count one batch of a step, and of a loader, in the block."""
        self._of, handles = step, []
        for metric, copy in self._copies:
            copy.reset()
            copy.sync_on_compute = metric.dist_sync_on_step
            handles.append(metric.register_forward_hook(partial(_count, copy), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def of_part(self, size: Callable[[], int]) -> Iterator[Logged]:
        """Hold back what is logged in the block, for a part of so many samples."""
        self._part = logged = Logged()
        loggers = [(logger, "log_metrics", _REFUSED) for logger in self._trainer.loggers]
        with replaced((self._module, "log", self._note), *loggers):
            yield logged
        for key, (_, options) in logged.items():
            given, sizes = self._given.setdefault((*self._of, *key), (set(), set()))
            if len(given) < 2:  # noqa: PLR2004 - then it depends on the part
                given.add(options.get(_SIZE))
                sizes.add(size())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _noted(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        number = 0
        while (name, number) in self._part:
            number += 1
        value = value.detach().clone() if isinstance(value, Tensor) else value
        self._part[name, number] = value, dict(zip(_ARGUMENTS, args, strict=False)) | options

    def is_unclear(self, logged: Logged) -> bool:
        """Whether it takes a part of another size to tell a constant `batch_size=` from that of a part."""
        return any(self._is_unclear(key, *found) for key, found in logged.items())

    def _is_unclear(self, key: tuple[str, int], value: Any, options: dict[str, Any]) -> bool:
        if options.get(_SIZE) is None or isinstance(value, Metric) or _reduction(options) in _OTHERS:
            return False
        on_epoch = options.get("on_epoch")
        counts = self._of[0] != "training_step" if on_epoch is None else on_epoch
        given, sizes = self._given[*self._of, *key]
        return counts and len(given) == len(sizes) == 1

    def log(self, parts: Sequence[Logged], sizes: Sequence[int], *, loss: Tensor | None = None) -> None:
        """Log each name once for the whole batch.

        Args:
            parts: Of each part that was completed.
            sizes: The samples of each part.
            loss: The loss of the batch, where it is known.

        Raises:
            InvalidInputError: It cannot be told whether `batch_size=` is of a part or of any batch.
        """
        for key in dict.fromkeys(key for part in parts for key in part):
            found = [(*part[key], size) for part, size in zip(parts, sizes, strict=True) if key in part]
            values, (options, *others), counts = zip(*found, strict=True)
            if others and self._is_unclear(key, values[0], options):
                raise InvalidInputError(
                    f"self.log({key[0]!r}, batch_size={options[_SIZE]}) in {self._of[0]}: every part so far had "
                    f"{counts[0]} of its batch's samples, so this number may depend on them, or be the same for any "
                    "batch; leave batch_size out, so that each sample counts alike"
                )
            given = [one.get(_SIZE) for one in (options, *others)]
            # One number for all parts is that of the batch, however it is cut.
            is_of_batch = None in given or len(self._given[*self._of, *key][0]) == 1
            value = self._whole(_reduction(options), values, counts if is_of_batch else given, loss)
            self._module.log(key[0], value, **options | {_SIZE: given[0] if is_of_batch else sum(given)})

    def _whole(self, reduction: str, values: Sequence[Any], weights: Sequence[float], loss: Tensor | None) -> Any:
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
        if reduction not in _OTHERS:
            return mean(numbers, weights, loss=loss)
        (function, nothing), stacked = _OTHERS[reduction], torch.stack(numbers)
        if loss is not None and stacked.is_floating_point():
            stacked = stacked.masked_fill(is_of_nothing(stacked, loss), nothing)
        return function(stacked, dim=0)


def _reduction(options: dict[str, Any]) -> str:
    given = options.get("reduce_fx", "mean")
    return (given if isinstance(given, str) else getattr(given, "__name__", "")).lower().removeprefix("a")


def _count(copy: Metric, _metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any], _value: Any) -> None:
    copy.update(*args, **kwargs)
