"""Refuses what a Lightning trainer does that a batch in parts cannot be a part of. Each message says what to do."""

from __future__ import annotations

import inspect
from typing import Any

from autoaccum.errors import InvalidInputError

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
_BY_HAND = "autoaccum.Accumulator(module, closure=...).backward(batch)"
_OWN_MODULES = ("lightning.", "pytorch_lightning.")


def refuse_strategy(trainer: Any) -> None:
    """Check that the strategy leaves parameters whole, and gradients to be reduced once.

    Raises:
        InvalidInputError: It does not.
    """
    strategy = trainer.strategy
    kinds = (kind.__name__ for kind in type(strategy).__mro__ if kind.__module__.startswith(_OWN_MODULES))
    kind = next(kinds, "")
    if kind not in _STRATEGIES:
        raise InvalidInputError(
            f"strategy={type(strategy).__name__}: Windowed runs micro-batches outside of the strategy and reduces "
            "gradients itself, which holds for one device and for 'ddp'; use one of them, or leave Windowed out. FSDP2 "
            "models train with autoaccum.fit (docs/several-gpus.md)"
        )
    if getattr(strategy, "_ddp_comm_hook", None) is not None:
        raise InvalidInputError(
            "DDPStrategy(ddp_comm_hook=...): Windowed reduces gradients itself, so the hook would have no effect; "
            "leave it out"
        )


def refuse_training(trainer: Any, module: Any) -> None:
    """Check that a trainer and its module can be trained in windows.

    Raises:
        InvalidInputError: They cannot.
    """
    if not module.automatic_optimization:
        raise InvalidInputError(
            f"{type(module).__name__} sets automatic_optimization = False, and Windowed takes the place of automatic "
            f"optimization's closure; call {_BY_HAND} in training_step, in place of manual_backward"
        )
    for callback in trainer.callbacks:
        kind = type(callback).__name__
        if kind == "BatchSizeFinder":
            raise InvalidInputError(
                f"{kind} changes the loader's batch size, which Windowed keeps as the batch of an update; leave it out"
            )
    if _is_overridden("backward", module):
        raise InvalidInputError(
            f"{type(module).__name__} overrides backward, which Windowed does not call; leave it out, or use manual "
            f"optimization with {_BY_HAND}"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise InvalidInputError(
            "training_step(self, dataloader_iter) fetches batches itself, so Windowed cannot cut them; take batch and "
            "batch_idx instead"
        )


def _is_overridden(name: str, module: Any) -> bool:
    own = getattr(type(module), name)
    return not own.__module__.startswith(_OWN_MODULES)
