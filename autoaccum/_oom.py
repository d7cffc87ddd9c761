"""Classifies exceptions that a smaller micro-batch or a new process may fix, and releases the memory they pin.

Either memory ran out (`is_oom`), a kernel cannot index that many elements (`is_too_large`), or the device is lost for
this process (`is_device_lost`). Exceptions are classified by type first, then by message, since most native libraries
provide only a message. This module does not free device memory or decide what to do next.
"""

from __future__ import annotations

import errno
import re
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoaccum._arguments import shown
from autoaccum.errors import AutoaccumError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIRST_LINE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Sign:
    """A pattern that identifies a failure by its message.

    Attributes:
        pattern: Regular expression, searched for in the whole message, ignoring case.
        device: The kind of device, or the library, that raises it.
        seen: Where the message was found: a source file, the strings of a library, or an issue.
    """

    pattern: str
    device: str
    seen: str

    def matches(self, message: str) -> bool:
        """Return whether the message matches."""
        return re.search(self.pattern, message, re.IGNORECASE) is not None


OOM_SIGNS = (
    Sign(
        r"\b(CUDA|HIP|XPU|MPS backend) out of memory|out of memory\. Try?(ied|ing) to allocate",
        "any device, by PyTorch's allocator for it",
        "pytorch c10/cuda/CUDACachingAllocator.cpp, ATen/mps/MPSAllocator.mm; torch_npu, torch_mlu, torch_musa, older "
        "versions by types of their own; issues 138002 of pytorch/pytorch, 1324 of intel/torch-xpu-ops",
    ),
    Sign(
        r"\b(CUDA|HIP|MUSA|Triton) [^\n]{0,40}?\berror\b[^\n]{0,30}\bout of memory\b",
        "what passes the allocator by: pinned memory, handles, kernels that are loaded",
        "pytorch c10/cuda/CUDAException.cpp (older: 'cuda runtime error (2) : '); cusparseGetErrorString (12.7); "
        "driver.c of triton 3.9, for NVIDIA and AMD; issue 82 of NVlabs/tiny-cuda-nn",
    ),
    Sign(
        r"\b(cuda|hip|musa)Error(MemoryAllocation|OutOfMemory)|(CUDA|HIP|NVRTC|NVVM)_ERROR_OUT_OF_MEMORY",
        "CUDA, HIP",
        "names of error 2 in cuda.h and hip_runtime_api.h, of error 1 in nvrtc.h; seen from extensions",
    ),
    Sign(
        r"memory mapping failed with OOM|would exceed allowed memory|ran out of memory outside|Error Memory Allocation",
        "expandable segments, cudaMallocAsync, attention by cuDNN, CUTLASS",
        "strings of libc10_cuda and libtorch_cuda (torch 2.15)",
    ),
    Sign(
        r"_STATUS_\w*ALLOC(ATION)?_FAILED|FFT_ALLOC_FAILED|rocblas_status_memory_error|miopenStatusAllocFailed",
        "cuBLAS, cuSOLVER, cuSPARSE, cuRAND, cuFFT, cuDNN, and those of HIP",
        "status names in the public headers of these libraries; pytorch aten/src/ATen/cuda/CUDABlas.cpp: the workspace",
    ),
    Sign(
        r"CUBLAS_STATUS_NOT_INITIALIZED when calling .?cublas(Lt)?Create"
        r"|CUSOLVER_STATUS_(INTERNAL_ERROR|NOT_INITIALIZED), when calling .?cusolver\w*Create\b"
        r"|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES|insufficient resources when calling .?cusparse",
        "cuBLAS, cuSOLVER, cuSPARSE",
        "pytorch aten/src/ATen/cuda/CublasHandlePool.cpp, issue 13 of JIA-Lab-research/UVTR: no room for the handle; "
        "cusparseGetErrorString (12.7), issue 38 of CUDALibrarySamples",
    ),
    Sign(
        r"unable to find an engine to execute this computation|unable to find a valid cuDNN algorithm",
        "cuDNN",
        "pytorch ATen/native/cudnn/Conv_v8.cpp ('FIND was', 'GET was'; no plan's workspace fits), Conv_v7.cpp; issue "
        "101 of marqo-ai/marqo",
    ),
    Sign(
        r"_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY|(UR_RESULT|PI|ZE_RESULT)_ERROR_OUT_OF_RESOURCES"
        r"|Triton Error \[ZE\].* 0x7000000[23]\b",
        "XPU",
        "issues 854 of intel-extension-for-pytorch, 1324 of torch-xpu-ops: memory was full; numbers of ze_api.h",
    ),
    Sign(r"CallbackErrorOutOfMemory", "MPS", "Metal, kIOGPUCommandBufferCallbackErrorOutOfMemory of a command buffer"),
    Sign(r"PT_DEVMEM Allocation failed", "HPU", "README of optimum-habana, on generating text; Lightning"),
    Sign(r"Memory_Allocation_Failure\(EL0004\)|error code is 207001", "NPU", "CANN, as torch_npu passes it on"),
    Sign(r"not enough GPU video memory available", "DirectML", "issue 579 of microsoft/DirectML"),
    Sign(
        r"RESOURCE[_ ]EXHAUSTED: [\s\S]*?"
        r"(out of memory (allocating|while|in memory space hbm)|attempting to (reserve|allocate))",
        "XLA, TPU",
        "issues 1735, 2569, 3470, 3532 of pytorch/xla; a kernel's vmem is not meant (issue 9524)",
    ),
    Sign(
        r"(CUDA|HIP) failure (\d+ )?'out of memory'|Failed to (CUDA|HIP) (host )?(calloc|alloc|malloc)",
        "NCCL, RCCL",
        "issue 1235 of NVIDIA/nccl; torch appends NCCL's last error to its own message",
    ),
    Sign(
        r"DefaultCPUAllocator: (can't allocate|not enough) memory|unable to mmap memory: you tried",
        "CPU",
        "pytorch c10/core/impl/alloc_cpu.cpp on POSIX (raised here under RLIMIT_DATA) and Windows, MapAllocator.cpp",
    ),
    Sign(
        r"cannot allocate memory(?! *\w)|(</torch_|/dev/shm/)[^\n]*No space left on device",
        "CPU, shared memory",
        "ENOMEM's text, as in issue 87861 of pytorch/pytorch ('in static TLS block' is a library refused); "
        "aten/src/ATen/MapAllocator.cpp, issue 20 of idiap/ESLAM; strings of libnccl (2.30)",
    ),
    Sign(
        r"unable to allocate [\d.]+ \w+ for an array",
        "NumPy",
        "its MemoryError, as a loader's worker hands it on: RuntimeError (torch/_utils.py, ExceptionWrapper)",
    ),
    Sign(
        r"could not (create|execute) a primitive|could not create a memory(?! descriptor)",
        "oneDNN",
        "ResNet-18 under RLIMIT_DATA (torch 2.15), also in a longer form; issue 914 of oneDNN: the scratchpad",
    ),
    Sign(r"std::bad_alloc|\bbad allocation\b", "CPU", "C++ operator new, as torch passes it on (two spellings)"),
)

TOO_LARGE_SIGNS = (
    Sign(
        r"CUDNN_STATUS_NOT_SUPPORTED(?!_)",
        "cuDNN",
        "pytorch aten/src/ATen/cudnn/Exceptions.h ('if you passed in a non-contiguous input'); issues 3038, 4107 of "
        "pytorch: batches beyond 65,535, and tensors beyond what its kernels index",
    ),
    Sign(
        r"canUse32BitIndexMath", "CUDA", "strings of libtorch_cuda (torch 2.15): the checks before pooling, upsampling"
    ),
    Sign(
        r"must fit in(to)? (a )?32[- ]bit|32[- ]bit (unsigned |integer )?index",
        "CUDA",
        "pytorch aten/src/ATen/native/cuda: kernels whose indices are 32-bit",
    ),
    Sign(r"invalid configuration argument", "CUDA, HIP", "CUDA error 9: a launch whose grid is beyond the limits"),
    Sign(
        r"\bINT_MAX\b", "CUDA", "pytorch aten/src/ATen/native: nonzero, sort and others on more than INT_MAX elements"
    ),
    Sign(
        r"integer out of range|too large to fit into a (MKL_)?int\b|too large for the channels_last CUDA",
        "CPU, CUDA",
        "strings of libtorch_cpu and libtorch_cuda (torch 2.15)",
    ),
    Sign(
        r"Storage size calculation overflowed|numel: integer multiplication overflow",
        "any",
        "pytorch aten/src/ATen/EmptyTensor.cpp; raised here by a size beyond 2**63",
    ),
    Sign(r"Invalid buffer size", "MPS", "issue 141909 of pytorch/pytorch: one buffer beyond what Metal allows"),
    Sign(r"needs to be less than 2\*\*32 elements", "MPS", "issue 141909 of pytorch/pytorch"),
)

DEVICE_LOST_SIGNS = (
    Sign(r"illegal memory access", "CUDA, HIP", "CUDA error 700"),
    Sign(r"device-side assert", "CUDA, HIP", "CUDA error 710: an index outside its table"),
    Sign(r"unspecified launch failure", "CUDA, HIP", "CUDA error 719"),
    Sign(r"misaligned address", "CUDA", "CUDA error 716"),
    Sign(r"illegal instruction was encountered", "CUDA", "CUDA error 715"),
    Sign(
        r"invalid program counter|hardware stack error|operation not supported on global/shared",
        "CUDA",
        "CUDA errors 714, 717, 718",
    ),
    Sign(r"uncorrectable (NVLink|ECC) error|ECC error encountered", "CUDA", "CUDA errors 214, 220"),
    Sign(r"launch timed out and was terminated", "CUDA", "CUDA error 702"),
    Sign(r"CUDA error: unknown error", "CUDA", "CUDA error 999"),
    Sign(r"ERROR_DEVICE_LOST", "XPU", "issue 780 of intel-extension-for-pytorch"),
)


def is_oom(exception: BaseException) -> bool:
    """Return whether the exception reports that memory ran out.

    True for torch.OutOfMemoryError, MemoryError and OSError with ENOMEM; for a RuntimeError (such as
    torch.AcceleratorError) or OSError with a message from the table `OOM_SIGNS`; for a group of only such exceptions;
    and for an exception that was raised *from* one of these, as wrappers around a step do. An exception raised while
    another was handled (`__context__`) is a failure of its own. Errors raised by autoaccum itself never count.

    Raises:
        InvalidInputError: The argument is not an exception.
    """
    if not isinstance(exception, BaseException):
        raise InvalidInputError(f"exception={shown(exception)} is not an exception; pass the one that was caught")
    return any(_says_oom(link) for link in _causes(exception))


def is_too_large(exception: BaseException) -> bool:
    """Return whether a kernel rejected the size as too large for its indices or its grid.

    A smaller micro-batch helps here too, but memory did not run out, and `is_oom` is False.
    """
    return not is_oom(exception) and any(_shows(link, TOO_LARGE_SIGNS) for link in _causes(exception))


def is_device_lost(exception: BaseException) -> bool:
    """Return whether the device can no longer be used by this process; only a new process helps."""
    return any(_shows(link, DEVICE_LOST_SIGNS) for link in _causes(exception))


def first_line(exception: BaseException) -> str:
    """Return the first line of the message, at most 200 characters; of an empty message, the name of the type."""
    lines = str(exception).strip().splitlines()
    line = lines[0].rstrip() if lines else type(exception).__name__
    return line if len(line) <= _FIRST_LINE_CHARS else line[: _FIRST_LINE_CHARS - 1] + "…"


def clear_traceback_frames(exception: BaseException) -> None:
    """Clear the frames that the exception keeps alive, with its causes, contexts and exceptions in groups.

    The traceback holds the frames, the frames hold the local variables, and those hold the activations of the failed
    step. File names and line numbers stay, so the traceback can still be printed.

    Call this last, before memory is released: afterwards a debugger or a logger finds no local variables. Frames that
    are still running (the handler's own and its callers) cannot be cleared, so `release` still belongs after the
    handler.
    """
    pending: list[BaseException | None] = [exception]
    seen: set[int] = set()
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        pending += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            pending += link.exceptions


def _causes(exception: BaseException) -> Iterator[BaseException]:
    """Yield the exception and its causes, each once; autoaccum's own errors end the chain."""
    link: BaseException | None = exception
    seen: set[int] = set()
    while link is not None and id(link) not in seen and not isinstance(link, AutoaccumError):
        yield link
        seen.add(id(link))
        link = link.__cause__


def _says_oom(exception: BaseException) -> bool:
    import torch  # noqa: PLC0415 - `autoaccum run` reads the tables, and starts without it

    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(exception, BaseExceptionGroup):  # of losses or parts that run side by side
        return all(map(is_oom, exception.exceptions))
    if isinstance(exception, OSError):  # from a loader's worker it comes with its message alone
        return exception.errno == errno.ENOMEM or (exception.errno is None and _says(exception, OOM_SIGNS))
    return _shows(exception, OOM_SIGNS)


def _shows(exception: BaseException, signs: tuple[Sign, ...]) -> bool:
    # Native errors reach Python as RuntimeError. A ValueError or a user's own type with the same words does not report
    # a failed allocation.
    return isinstance(exception, RuntimeError) and _says(exception, signs)


def _says(exception: BaseException, signs: tuple[Sign, ...]) -> bool:
    message = str(exception)
    return any(sign.matches(message) for sign in signs)
