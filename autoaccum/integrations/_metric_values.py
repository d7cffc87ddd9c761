"""The value of a torchmetrics metric over one batch that it was updated with in parts.

A metric's `forward` keeps the value of the last part. States that are sums, and lists that grow, show what the whole
batch has added to them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autoaccum._engine.metric_states import is_metric

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

_SUM = "dim_zero_sum"


class MetricValues:
    """The states of metrics before a batch.

    Args:
        modules: Modules, of which those that are metrics are looked at.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # By identity: a metric's hash is that of its states.
        self._before = {id(metric): _states(metric) for metric in modules if is_metric(metric)}

    def set_to_whole(self, metric: Any) -> None:
        """Make the value that a metric gives for its last call that of the whole batch, if its states show it."""
        before = self._before.get(id(metric))
        if before is None or metric._forward_cache is None:
            return
        added: dict[str, Any] = {}
        for name, earlier in before.items():
            now = getattr(metric, name)
            if isinstance(now, list) and isinstance(earlier, int):
                added[name] = now[earlier:]
            elif isinstance(now, Tensor) and getattr(metric._reductions[name], "__name__", "") == _SUM:
                added[name] = now - earlier
            else:
                return
        of_batch = copy.copy(metric)
        vars(of_batch).update(added, _computed=None, _to_sync=metric.dist_sync_on_step, _should_unsync=False)
        metric._forward_cache = of_batch.compute()


def _states(metric: Any) -> dict[str, Tensor | int]:
    """Return copies of a metric's states; of a list, its length."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {name: len(state) if isinstance(state, list) else state.clone() for name, state in states.items()}
