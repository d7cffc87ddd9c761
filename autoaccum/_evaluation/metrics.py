"""Metrics that keep their own count, such as torchmetrics', also over several ranks; and the names of all metrics."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from autoaccum._arguments import check_function, shown
from autoaccum._data.nesting import map_tensors
from autoaccum._engine.metric_counts import is_metric
from autoaccum._loss.loss_values import in_full
from autoaccum._oom import first_line, is_oom
from autoaccum.errors import DoesNotFitError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoaccum._engine.peers import Talk


Metric = Callable[[Any, Any], Any]


class CountingMetric:
    """An object with `update`, `compute` and `reset`, such as torchmetrics'."""

    def __init__(self, name: str, metric: Any, device: torch.device, ranks: Talk | None) -> None:
        self._name = name
        self._metric = metric.to(device) if hasattr(metric, "to") else metric
        self._ranks = ranks
        if ranks is not None:
            _check_that_ranks_can_share(name, metric, ranks.size)

    def reset(self) -> None:
        self._metric.reset()

    def update(self, outputs: Any, targets: Any, samples: int) -> None:
        """Count some samples. Where memory runs out in it, its count may be half written, and is not repeated."""
        with self._oom_explained(f"it counted {samples} samples", ", or give the val_loader smaller batches"):
            self._metric.update(outputs, targets)

    def try_out(self, outputs: Any, targets: Any, samples: int) -> None:
        """Count some samples and forget them."""
        # Wrappers such as MinMaxMetric keep what `reset` does not clear, and collections what they found metrics share.
        tried = copy.copy(self)
        if _is_torchmetrics(self._metric):
            tried._metric = copy.deepcopy(self._metric)
        tried.reset()
        tried.update(outputs, targets, samples)
        if self._ranks is None:  # some metrics would communicate with other processes
            tried.result()
        tried.reset()

    def result(self) -> dict[str, float]:
        """Return its numbers by name, over the samples of all ranks."""
        if self._ranks is None:
            return self._numbers(self._metric)
        metric = self._of_all_states(self._ranks) if _is_torchmetrics(self._metric) else self._merged(self._ranks)
        # Computed from the same states, but the last bit may differ between devices.
        said: list[dict[str, float]] = self._ranks.exchange("metric", self._numbers(metric))
        return said[0]

    def _numbers(self, metric: Any) -> dict[str, float]:
        with self._oom_explained("it computed its result"):
            value = metric.compute()
        if isinstance(value, Mapping):
            return {f"{self._name}/{key}": _number(key, part) for key, part in value.items()}
        return {self._name: _number(self._name, value)}

    @contextmanager
    def _oom_explained(self, when: str, remedy: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_oom(error):
                raise
            raise DoesNotFitError(
                f"metric {self._name!r}, a {type(self._metric).__name__}, ran out of memory while {when} "
                f"({first_line(error)}); let it count on the host{remedy}"
            ) from error

    def _of_all_states(self, ranks: Talk) -> Any:
        """Return a copy that has counted what the torchmetrics objects of all ranks have.

        Their own exchange is not used: a rank that failed before reaching it would leave the others waiting, and it
        needs samples on every rank.
        """
        for part in _modules(self._metric):
            if hasattr(part, "compute_groups"):
                part.values(copy_state=False)  # only one of several alike counts: share its state
        metrics = filter(is_metric, _modules(self._metric))
        own = [(metric._update_count, map_tensors(Tensor.cpu, metric.metric_state)) for metric in metrics]
        said = ranks.exchange("metric states", own)
        together = copy.deepcopy(self._metric)
        for part, *counted in zip(filter(is_metric, _modules(together)), *said, strict=True):
            _put_together(part, counted)
        return together

    def _merged(self, ranks: Talk) -> Any:
        """Return a copy on the host that has counted what all ranks' metrics have."""
        own = copy.deepcopy(self._metric)
        first, *others = ranks.exchange("metrics", own.to("cpu") if hasattr(own, "to") else own)
        first.merge_state(others)
        return first


def keeps_count(metric: Any) -> bool:
    """Whether a metric keeps its own count, and is no callable to be averaged."""
    return not isinstance(metric, type) and all(hasattr(metric, name) for name in ("update", "compute", "reset"))


def mean_of(name: str, value: Any, samples: int) -> Any:
    """Return as one number what a callable metric has returned for a micro-batch of so many samples."""
    value = torch.as_tensor(value) if isinstance(value, np.ndarray | np.generic) else value
    if _is_count(value) and samples > 1:
        warnings.warn(
            f"autoaccum: metric {name!r} looks like a count: it returned a whole number above 1 for a micro-batch. "
            "Metrics are averaged over samples: return .float().mean(), or a tensor with a value for each sample",
            stacklevel=2,
        )
    if isinstance(value, Tensor):
        return in_full(value).mean()
    if not isinstance(value, Real):
        raise InvalidInputError(
            f"metrics: metric {name!r} returned {shown(value)}, which is not a number; return one, or a tensor with a "
            "value for each sample"
        )
    return value


def _is_count(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor) and not (value.ndim or value.is_floating_point() or value.is_complex())
    return (is_tensor or isinstance(value, int)) and int(value) > 1  # and not that of a single sample


def metrics_by_name(metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None) -> dict[str, Any]:
    """Return the argument `metrics` as a mapping."""
    if isinstance(metrics, Mapping):
        return dict(metrics)
    several: Sequence[Any] = metrics if isinstance(metrics, list | tuple) else [] if metrics is None else [metrics]
    named: dict[str, Any] = {}
    for metric in several:
        name = getattr(metric, "__name__", type(metric).__name__)
        named[name if name not in named else f"{name} {len(named) + 1}"] = metric
    return named


def check_metrics(metrics: Any) -> None:
    """Check the argument `metrics`."""
    for name, metric in metrics_by_name(metrics).items():
        if not isinstance(name, str):
            raise InvalidInputError(f"metrics={shown(metrics)} has the name {shown(name)}; names must be strings")
        if keeps_count(metric):
            continue
        if not callable(metric):
            raise InvalidInputError(
                f"metrics={shown(metric)} is no metric; pass a callable of (outputs, targets), or a torchmetrics object"
            )
        check_function(f"metrics: {name!r}", metric, "outputs, targets")


def _check_that_ranks_can_share(name: str, metric: Any, size: int) -> None:
    instead = "a callable of (outputs, targets), which is averaged over the samples"
    if not _is_torchmetrics(metric) and not hasattr(metric, "merge_state"):
        raise InvalidInputError(
            f"metric {name!r}, a {type(metric).__name__}, keeps a count of its own, and it is not known how to combine "
            f"those of {size} ranks; pass a torchmetrics object or {instead}, or give it merge_state(others)"
        )
    for part in _modules(metric):
        for state, reduction in getattr(part, "_reductions", {}).items():
            if getattr(reduction, "__name__", "") == "dim_zero_mean":
                raise InvalidInputError(
                    f"metric {name!r} averages its state {state!r} over ranks as if all had the same number of "
                    f"samples, which {size} ranks need not have; pass one that sums, or {instead}"
                )


def _is_torchmetrics(metric: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(metric).__mro__)


def _modules(metric: Any) -> list[Any]:
    return list(metric.modules()) if isinstance(metric, nn.Module) else []


def _put_together(part: Any, said: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Set a torchmetrics object's states to those of all ranks combined, each with its number of updates."""
    # A rank without samples contributes nothing, and its empty states break some reductions.
    counted = [one for one in said if one[0]] or said[:1]
    part._update_count = sum(updates for updates, _ in counted)
    part.distributed_available_fn = lambda: False  # there is nothing left to gather
    for name, reduction in part._reductions.items():
        values = [states[name] for _, states in counted]
        if len(values) == 1:
            together = values[0]
        elif isinstance(part._defaults[name], list):
            together = [item for value in values for item in (value if isinstance(value, list) else [value])]
        else:
            stacked = torch.stack(values)
            together = reduction(stacked) if callable(reduction) else stacked
        setattr(part, name, map_tensors(lambda tensor: tensor.to(part.device), together))


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise InvalidInputError(
            f"metric {name!r} gave a tensor of shape {tuple(value.shape)}, but a metric is one number; average it, or "
            "return its values by name (torchmetrics.ClasswiseWrapper)"
        )
    return float(value)
