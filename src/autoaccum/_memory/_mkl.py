"""MKL's buffers: what its matrix products keep for the next one, some MiB a thread and more for each larger size.

A limit on the process counts them, and neither PyTorch nor glibc can give them back. A product that does not get its
buffer does not fail: it computes in another order, and its last bits differ. Where torch is built without MKL, or
without libgomp's name for a parallel region, nothing here does anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from pathlib import Path
from typing import Any

import torch

from autoaccum._system import signals

_MIB = 2**20
_ALIGNED_TO = 128  # as MKL asks for them
# MKL keeps up to five buffers a thread; a product gets the smallest of them that is large enough. In the thread that
# calls, a product that is split among threads takes up to five at once (at most 22.3 MiB was seen for the largest of
# them, 9.2 for the second, 4.3 for the third, some bytes for the rest); in another thread it takes one (16.4).
_OF_THE_CALLER = tuple(size * _MIB for size in (32, 20, 8, 1, 1))
_OF_A_WORKER = (24 * _MIB,)


def hold_buffers() -> None:
    """Have MKL keep buffers for the products to come in each thread; those that it has of these sizes stay.

    They are address space and take well under a millisecond: no product runs, and nothing becomes resident before one
    does. It is 62 MiB in the thread that calls and 24 MiB in each other that `torch.get_num_threads()` counts now; a
    limit that others set on the process counts it. Where memory is short, what is not to be had is not taken.

    Enough for every product that was tried: thousands of random shapes with sides of 2 to 4096 and some up to 60000, in
    float32 and float64, plain and transposed, with 1, 2, 4 and 8 threads on AMD's kernels and, fewer of them, on
    Intel's for AVX2 and AVX-512. That is no proof for the shapes in between, for more threads, or for other versions of
    MKL. What may take more, of the limit or in other bits where it is used up: on Intel's processors, products with a
    long inner side that MKL splits among many threads, since each takes a copy of the result (16.7 MiB with 8 of them);
    and anywhere, products in other threads than the one in which the limit begins, and in threads added since.
    """
    mkl = _library()
    if mkl is None:
        return

    # libgomp gives each of its threads, which are those of torch and of MKL, a turn. One of them is this one.
    caller = threading.get_ident()

    def take(_: object) -> None:
        with contextlib.suppress(MemoryError):
            _keep(mkl, _OF_THE_CALLER if threading.get_ident() == caller else _OF_A_WORKER)

    # What a handler raised inside the callback would be lost.
    with signals.held():
        mkl.GOMP_parallel(_PARALLEL(take), None, torch.get_num_threads(), 0)


def free_buffers() -> None:
    """Give back the buffers that no product is using."""
    mkl = _library()
    if mkl is not None:
        mkl.mkl_serv_free_buffers()


def _keep(mkl: ctypes.CDLL, sizes: tuple[int, ...]) -> None:
    # All at once, so that each is another one. MKL keeps what it gets back.
    taken = [mkl.mkl_serv_allocate(size, _ALIGNED_TO) for size in sizes]
    for address in taken:
        if address is not None:
            mkl.mkl_serv_deallocate(address)


_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# MKL is linked into torch's own library; of its public functions only these names are left there.
_TYPES: dict[str, tuple[Any, list[Any]]] = {
    "mkl_serv_free_buffers": (None, []),
    "mkl_serv_allocate": (ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int]),
    "mkl_serv_deallocate": (None, [ctypes.c_void_p]),
    "GOMP_parallel": (None, [_PARALLEL, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]),
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not path.exists():
        return None
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _TYPES.items():
        function = getattr(library, name, None)
        if function is None:
            return None
        function.restype, function.argtypes = result, arguments
    return library
