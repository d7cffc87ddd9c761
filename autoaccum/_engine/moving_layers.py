"""Tells once which layers move with every micro-batch, and so more often in a window than with a whole batch.

Spectral norm, the queue and the momentum encoder of MoCo, codebooks and other moving averages change their buffers (or
parameters without a gradient) in `forward`. BatchNorm has a module of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum._engine.lack_of_memory import first_of
from autoaccum._engine.metric_states import is_metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from autoaccum._system.notices import Notices

# The counter of normalisation layers, which only momentum=None reads.
_OF_NORMS = "num_batches_tracked"


def warn_of_moving_layers(
    modules: Iterable[nn.Module], moved: Sequence[str], micro_batches: int, notices: Notices
) -> None:
    """Tell once which buffers and parameters have moved in a window of several micro-batches, given their names."""
    if not moved:
        return
    usual = set(_usual(modules))
    names = [name for name in moved if name not in usual and not name.endswith(_OF_NORMS)]
    if names:
        notices.say(
            f"forward() moves {first_of(names)}: once for each micro-batch, {micro_batches} times in this update "
            "instead of once, and later micro-batches meet other values than the first. For the whole batch's "
            "gradient, collect in forward() what moves them, and move them once an update, from a callback's on_step "
            "(docs/losses.md)",
            key="moving layers",
        )


def _usual(modules: Iterable[nn.Module]) -> Iterable[str]:
    """Yield the names of what is told elsewhere, or is meant to move: BatchNorm's statistics, metrics' states."""
    for module in modules:
        for path, part in module.named_modules():
            if isinstance(part, _BatchNorm) or is_metric(part):
                yield from (f"{path}.{name}" if path else name for name in part._buffers)
