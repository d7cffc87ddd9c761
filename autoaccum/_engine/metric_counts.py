"""What torchmetrics' metrics have counted."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from autoaccum._engine.tensor_values import write

_NUMBERS = (bool, int, float, complex, str, type(None))
# Results that are replaced and never written to.
_RESULTS = ("_computed", "_forward_cache", "_cache")


def is_metric(module: object) -> bool:
    """Whether a module is a metric of torchmetrics."""
    return isinstance(module, nn.Module) and hasattr(module, "_defaults") and hasattr(module, "_update_count")


def counted_by(metric: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return a metric's attributes, and copies of what updates write to."""
    kept: dict[str, tuple[Any, Any]] = {}
    for name, value in vars(metric).items():
        if name in metric._defaults:  # type: ignore[operator]
            kept[name] = value, value.detach().clone() if isinstance(value, Tensor) else list(value)
        elif name in _RESULTS or isinstance(value, _NUMBERS):
            kept[name] = value, None
    return kept


def restore(attributes: dict[str, Any], counted: dict[str, tuple[Any, Any]]) -> None:
    for name, (value, content) in counted.items():
        if isinstance(content, Tensor):
            write(value, content)
        elif isinstance(content, list):
            value[:] = content
        attributes[name] = value
