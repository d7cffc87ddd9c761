"""Automatic batch-size planning and training that survives running out of memory.

result = autoaccum.fit(model, loader, target_batch=100)
"""

from autoaccum._callbacks import Callback, StopTraining
from autoaccum._data.batches import Window
from autoaccum._data.pieces import Split
from autoaccum._data.regrouping import windows
from autoaccum._data.splits import Along, ListOfSamples
from autoaccum._distributed.process_group import join_ranks
from autoaccum._engine.chunked_loss import ChunkedLoss
from autoaccum._engine.probing import find_micro_batch
from autoaccum._engine.runner import Runner
from autoaccum._launch import Job
from autoaccum._memory.simulated import Simulated
from autoaccum._oom import is_oom
from autoaccum._records import (
    BackwardReport,
    Evaluation,
    FitResult,
    MemoryEvent,
    MemoryReading,
    Plan,
    ProbeResult,
    StepReport,
    TimeSpent,
    Trial,
)
from autoaccum._report import Report
from autoaccum._report.api import preflight
from autoaccum._sizing.planner import plan
from autoaccum._system.own_distribution import __version__ as __version__
from autoaccum._training.accumulator import Accumulator
from autoaccum._training.api import fit
from autoaccum._training.loggers import JSONLinesLog, TensorBoardLog
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
    UpdateCompleteError,
)

__all__ = [
    "Accumulator",
    "Along",
    "AutoaccumError",
    "BackwardReport",
    "Callback",
    "CheckpointError",
    "CheckpointInUseError",
    "ChunkedLoss",
    "DeviceLostError",
    "DeviceMissingError",
    "DoesNotFitError",
    "Evaluation",
    "FitResult",
    "InvalidInputError",
    "JSONLinesLog",
    "Job",
    "ListOfSamples",
    "LossWarning",
    "MemoryEvent",
    "MemoryReading",
    "NotFiniteError",
    "Plan",
    "ProbeResult",
    "RankFailedError",
    "Report",
    "Runner",
    "SavingRefusedError",
    "Simulated",
    "Split",
    "StartAgainError",
    "StateDamagedError",
    "StepReport",
    "StopTraining",
    "TensorBoardLog",
    "TimeSpent",
    "Trial",
    "UpdateCompleteError",
    "Window",
    "find_micro_batch",
    "fit",
    "is_oom",
    "join_ranks",
    "plan",
    "preflight",
    "windows",
]
