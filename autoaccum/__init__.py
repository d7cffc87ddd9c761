"""Automatic batch-size planning and training that survives running out of memory.

result = autoaccum.fit(model, loader, target_batch=100)

Names are loaded when they are first used, so that the command line starts without torch.
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

from autoaccum import records as records
from autoaccum._records import Plan
from autoaccum.errors import (
    AutoaccumError,
    CheckpointError,
    CheckpointInUseError,
    DeviceLostError,
    DeviceMissingError,
    DoesNotFitError,
    InvalidInputError,
    LossWarning,
    NotFiniteError,
    RankFailedError,
    SavingRefusedError,
    StartAgainError,
    StateDamagedError,
    StepCompleteError,
)

if TYPE_CHECKING:
    from autoaccum._callbacks import Callback, EarlyStopping, StopTraining
    from autoaccum._data.batches import Window
    from autoaccum._data.packed_rows import PackedRows
    from autoaccum._data.pieces import Split
    from autoaccum._data.regrouping import windows
    from autoaccum._data.splits import Along, ListOfSamples
    from autoaccum._distributed.process_group import join_ranks
    from autoaccum._engine.probing import find_micro_batch
    from autoaccum._evaluation.any_batch import batched
    from autoaccum._memory.simulated import Simulated
    from autoaccum._oom import is_oom
    from autoaccum._report.api import preflight
    from autoaccum._saving.chunked_loss import ChunkedLoss
    from autoaccum._sizing.planner import plan
    from autoaccum._system.own_distribution import __version__ as __version__
    from autoaccum._training.accumulator import Accumulator
    from autoaccum._training.api import fit
    from autoaccum._training.loggers import JSONLinesLog
    from autoaccum._training.restarted_function import find_executable_micro_batch
    from autoaccum._training.runner import Runner
    from autoaccum._verify.api import verify

_NAMES = {
    "_callbacks": ("Callback", "EarlyStopping", "StopTraining"),
    "_data.batches": ("Window",),
    "_data.pieces": ("Split",),
    "_data.regrouping": ("windows",),
    "_data.packed_rows": ("PackedRows",),
    "_data.splits": ("Along", "ListOfSamples"),
    "_distributed.process_group": ("join_ranks",),
    "_evaluation.any_batch": ("batched",),
    "_saving.chunked_loss": ("ChunkedLoss",),
    "_engine.probing": ("find_micro_batch",),
    "_training.runner": ("Runner",),
    "_memory.simulated": ("Simulated",),
    "_oom": ("is_oom",),
    "_report.api": ("preflight",),
    "_sizing.planner": ("plan",),
    "_system.own_distribution": ("__version__",),
    "_training.accumulator": ("Accumulator",),
    "_training.api": ("fit",),
    "_training.loggers": ("JSONLinesLog",),
    "_training.restarted_function": ("find_executable_micro_batch",),
    "_verify.api": ("verify",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Accumulator",
    "Along",
    "AutoaccumError",
    "Callback",
    "CheckpointError",
    "CheckpointInUseError",
    "ChunkedLoss",
    "DeviceLostError",
    "DeviceMissingError",
    "DoesNotFitError",
    "EarlyStopping",
    "InvalidInputError",
    "JSONLinesLog",
    "ListOfSamples",
    "LossWarning",
    "NotFiniteError",
    "PackedRows",
    "Plan",
    "RankFailedError",
    "Runner",
    "SavingRefusedError",
    "Simulated",
    "Split",
    "StartAgainError",
    "StateDamagedError",
    "StepCompleteError",
    "StopTraining",
    "Window",
    "batched",
    "find_executable_micro_batch",
    "find_micro_batch",
    "fit",
    "is_oom",
    "join_ranks",
    "plan",
    "preflight",
    "verify",
    "windows",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    before = random.getstate()  # rich draws from it when it is imported
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    random.setstate(before)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
