"""MKL's buffers: what its matrix products keep for the next one, some MiB a thread and more for each larger size.

A limit on the process counts them, and neither PyTorch nor glibc can give them back. Where torch is built without MKL
nothing here does anything.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def free_buffers() -> None:
    """Give back the buffers that no product is using."""
    free = _function()
    if free is not None:
        free()


@functools.cache
def _function() -> Callable[[], None] | None:
    # MKL is linked into torch's own library; of its public functions only this name of mkl_free_buffers is left there.
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.exists():
        return None
    free = getattr(ctypes.CDLL(str(library)), "mkl_serv_free_buffers", None)
    if free is not None:
        free.restype = None
    return free
