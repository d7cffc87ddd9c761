"""Checks the options of adapters where they are written, and not when a training begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._arguments import check_bool
from autoaccum._callbacks import check_callbacks
from autoaccum._data.splits import check_split
from autoaccum._engine.batchnorm import check_batchnorm
from autoaccum._loss.objective import check_loss_reduction
from autoaccum._memory.limits import parse_limit
from autoaccum._memory.simulated import Simulated
from autoaccum._sizing.planner import check_finding
from autoaccum._system.notices import check_notices

if TYPE_CHECKING:
    from collections.abc import Mapping

# The device is not known yet, and only reading is checked: none is larger.
_LARGEST_BYTES = 2**60


def check_options(options: Mapping[str, Any]) -> None:
    """Check arguments of `autoaccum.Accumulator` that an adapter passes on later.

    Raises:
        InvalidInputError: One of them cannot be used, on any device.
    """
    check_finding(options["micro_batch"], "inline", options["strategy"])
    check_bool("cache", options["cache"])
    check_callbacks(options["callbacks"])
    check_batchnorm(options["batchnorm"])
    check_loss_reduction(options["loss_reduction"])
    check_split(options["split"])
    check_notices(options["notices"])
    parse_limit(options["memory_limit"], Simulated(_LARGEST_BYTES))
