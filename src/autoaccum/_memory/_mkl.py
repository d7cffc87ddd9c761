"""MKL's buffers: what its matrix products keep for the next one, some MiB a thread and more for each larger size.

A limit on the process counts them, and neither PyTorch nor glibc can give them back. A product that does not get its
buffer does not fail: it computes in another order, and its last bits differ. Where torch is built without MKL nothing
here does anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


# In float64 the largest buffers (7.5 MiB a thread) among some 300 shapes, and larger than any of float32: a wide block
# of rows and few columns. The product takes 20 MiB and some 20 ms on two cores with AVX2.
_WIDEST = 8192, 192, 96


def hold_buffers() -> None:
    """Take buffers that are large enough for the products to come, in each thread, unless they are held already.

    Enough for any product in float32; one in float64 may take some MiB more. Nothing is taken where memory is short.
    """
    if _function() is None:
        return
    rows, inner, columns = _WIDEST
    with (
        contextlib.suppress(MemoryError, RuntimeError),
        torch.inference_mode(mode=False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        left = torch.zeros(rows, inner, dtype=torch.float64, device="cpu")
        torch.mm(left, torch.zeros(inner, columns, dtype=torch.float64, device="cpu"))


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
