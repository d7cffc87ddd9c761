"""Manages MKL's buffers, which matrix products keep for the next one: some MiB per thread, growing with the size.

A limit on the process counts them, and neither PyTorch nor glibc can free them. A product that does not get its buffer
does not fail: it computes in another order, and its last bits differ. If torch is built without MKL, or without
libgomp's symbol for a parallel region, these functions do nothing.
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
# MKL keeps up to five buffers per thread; a product gets the smallest of them that is large enough. A product split
# among threads takes up to five at once in the calling thread (at most 22.3 MiB was seen for the largest, 9.2 for the
# second, 4.3 for the third, some bytes for the rest), and one in each other thread (16.4).
_OF_THE_CALLER = tuple(size * _MIB for size in (32, 20, 8, 1, 1))
_OF_A_WORKER = (24 * _MIB,)


def hold_buffers() -> None:
    """Have MKL keep buffers for future products in each thread; buffers that it has of these sizes stay.

    This takes well under a millisecond and only address space: nothing becomes resident before a product runs. It is 62
    MiB in the calling thread and 24 MiB in each other that `torch.get_num_threads()` counts now, which any external
    limit on the process counts. Buffers for which memory does not suffice are skipped.

    It was enough for every product tested: thousands of random shapes with sides of 2 to 4096 and some up to 60000, in
    float32 and float64, plain and transposed, with 1, 2, 4 and 8 threads on AMD's kernels and, fewer of them, on
    Intel's for AVX2 and AVX-512. That does not prove it for other shapes, more threads, or other versions of MKL. Some
    products may need more, and use up the limit or give other bits once it is used up: on Intel's processors, products
    with a long inner side that MKL splits among many threads, since each takes a copy of the result (16.7 MiB with 8 of
    them); and on any, products in threads other than the one that entered the limit, and in threads added since.
    """
    mkl = _library()
    if mkl is None:
        return

    # libgomp runs this once in each of its threads, which torch and MKL share. One of them is this one.
    caller = threading.get_ident()

    def take(_: object) -> None:
        with contextlib.suppress(MemoryError):
            _keep(mkl, _OF_THE_CALLER if threading.get_ident() == caller else _OF_A_WORKER)

    # An exception of a signal handler inside the callback would be lost.
    with signals.held():
        mkl.GOMP_parallel(_PARALLEL(take), None, torch.get_num_threads(), 0)


def free_buffers() -> None:
    """Free the buffers that no product is using."""
    mkl = _library()
    if mkl is not None:
        mkl.mkl_serv_free_buffers()


def _keep(mkl: ctypes.CDLL, sizes: tuple[int, ...]) -> None:
    # All at once, so that the buffers are distinct. MKL keeps them when they are deallocated.
    taken = [mkl.mkl_serv_allocate(size, _ALIGNED_TO) for size in sizes]
    for address in taken:
        if address is not None:
            mkl.mkl_serv_deallocate(address)


_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# MKL is linked into torch's own library, which exports only these of its functions.
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
