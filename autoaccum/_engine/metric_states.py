"""Saves and restores what torchmetrics' metrics have counted, which they hold in attributes and not in buffers.

They are known by their attributes, so that torchmetrics need not be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable

# What a metric holds besides its states: how often it was updated, whether it is synchronised.
_PLAIN = (bool, int, float, str, type(None))
# Results that are replaced and never written to.
_RESULTS = ("_computed", "_forward_cache", "_cache")


class MetricStates:
    """The states of all metrics among some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list({id(module): module for module in modules}.values())  # a metric's hash is that of its states
        self._metrics = [module for module in modules if is_metric(module)]
        self.are_there = bool(self._metrics)
        self._kept: list[dict[str, tuple[Any, Any]]] = []

    def take(self) -> None:
        """Save the current states."""
        self._kept = [_state_of(metric) for metric in self._metrics]

    def put_back(self) -> None:
        """Restore the states saved by `take`."""
        for metric, kept in zip(self._metrics, self._kept, strict=True):
            for name, (value, content) in kept.items():
                if isinstance(content, Tensor):
                    _write(value, content)
                elif isinstance(content, list):
                    value[:] = content
                vars(metric)[name] = value


def is_metric(module: object) -> bool:
    """Whether a module is a metric of torchmetrics."""
    return isinstance(module, nn.Module) and hasattr(module, "_defaults") and hasattr(module, "_update_count")


def _state_of(metric: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return a metric's attributes, and copies of what updates write to."""
    kept: dict[str, tuple[Any, Any]] = {}
    for name, value in vars(metric).items():
        if name in metric._defaults:  # type: ignore[operator]
            kept[name] = value, value.detach().clone() if isinstance(value, Tensor) else list(value)
        elif name in _RESULTS or isinstance(value, _PLAIN):
            kept[name] = value, None
    return kept


def _write(tensor: Tensor, content: Tensor) -> None:
    # A state that was made in inference mode, as in Lightning's evaluation, can be written only there.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape == content.shape:
            tensor.copy_(content)
        else:
            tensor.data = content
