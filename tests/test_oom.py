"""Which exceptions mean that memory ran out, and what is let go of afterwards."""

import errno
import weakref

import numpy as np
import pytest
import torch

from autoaccum import is_oom
from autoaccum._oom import (
    DEVICE_LOST_SIGNS,
    OOM_SIGNS,
    TOO_LARGE_SIGNS,
    clear_traceback_frames,
    first_line,
    is_device_lost,
    is_too_large,
)
from autoaccum.errors import DoesNotFitError

# Messages as the libraries write them, numbers and paths changed; every row of the table is met by one of them.
OOM_MESSAGES = [
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "parallel_for failed: cudaErrorMemoryAllocation: out of memory",
    "expandable_segments: memory mapping failed with OOM on device 0",
    "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated: 7.2 GiB",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "GET was unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity of 128.00 GiB",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "miopenStatusAllocFailed",
    "XPU out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 16.50 GiB.",
    "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: 27.20 GiB).",
    "NCCL error in: NCCLUtils.hpp:328, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc async 6291456 bytes",
    (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 70368744177664 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 5 bytes.",
    "unable to mmap 4096 bytes from file </torch_1_2>: Cannot allocate memory (12)",
    "could not create a primitive",
    (
        "could not create a primitive descriptor for the convolution forward propagation primitive. Run workload with "
        "environment variable ONEDNN_VERBOSE=all to get additional diagnostic information."
    ),
    "could not create a memory",
    "could not execute a primitive",
    "std::bad_alloc",
    "bad allocation",
    "NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 60.97 GiB total capacity; 59.8 GiB already allocated)",
    "C10 Out of Memory. Trying to allocate 4096 bytes",
    "CUDA out of memory. Allocation was preemptively rejected because it would exceed the fraction",
    "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
    "Triton Error [CUDA]: out of memory",
    "Triton Error [HIP]:  Code: 2, Messsage: out of memory",
    "Triton Error [ZE]: 0x70000003",
    "Triton Error [ZE] /tmp/tmp1/main.cpp:197: ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "CUDA failed with error out of memory",
    "CUDA NVRTC error: NVRTC_ERROR_OUT_OF_MEMORY",
    "CUDA error: out of memory when calling `cusparseCreate(handle)`",
    "CUDA error: insufficient resources when calling `cusparseSpGEMM_workEstimation(handle, opA, opB)`",
    "cuSPARSE: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
    "CURAND_STATUS_ALLOCATION_FAILED",
    "rocblas_status_memory_error",
    "cuDNN SDPA execution failed with error code 5: x\nCUDA ran out of memory outside PyTorch's allocator.",
    "Got cutlass error: Error Memory Allocation failed at: 117",
    "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::939524096 (896)MB",
    "call aclnnBatchMatMul failed, error code is 207001",
    "[Error]: Memory_Allocation_Failure(EL0004): Failed to allocate memory requested by APP module.",
    "Could not allocate tensor with 234881024 bytes. There is not enough GPU video memory available!",
    "Bad StatusOr access: RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.",
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 29.80G of 7.98G hbm.",
    "Resource exhausted: From /job:tpu_worker/replica:0/task:0:\nAttempting to reserve 3.95G at the bottom of memory.",
    "$ Torch: unable to mmap memory: you tried to mmap 3GB.",
    "Caught OSError in DataLoader worker process 0.\nOSError: [Errno 12] Cannot allocate memory",
    "unable to write to file </torch_77_3625483894_1>: No space left on device (28)",
    "NCCL error: system error\nError: failed to extend /dev/shm/nccl-z to 5 bytes, error: No space left on device (28)",
    "Unable to allocate 256. PiB for an array with shape (288230376151711744,) and data type uint8",
]
TOO_LARGE_MESSAGES = [
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false.",
    "input tensor must fit into 32-bit index math",
    "CUDA error: invalid configuration argument",
    "nonzero is not supported for tensors with more than INT_MAX elements",
    "Integer out of range (3000000000)",
    "value (4294967296) is too large to fit into a MKL_INT (int)",
    "Storage size calculation overflowed with sizes=[4611686018427387904, 8]",
    "numel: integer multiplication overflow",
    "Invalid buffer size: 19.45 GB",
    (
        "Output size of the matrix multiplication is larger than currently supported by the MPS backend: 72250,72250, "
        "needs to be less than 2**32 elements"
    ),
]
DEVICE_LOST_MESSAGES = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: misaligned address",
    "CUDA error: an illegal instruction was encountered",
    "CUDA error: invalid program counter",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: unknown error",
    "Native API failed. Native API returns: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
]
OTHER_MESSAGES = [
    "out of resource: shared memory, Required: 180224, Hardware limit: 101376. Reducing block sizes may help.",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1",
    "could not create a memory descriptor from blob",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
    "cuDNN error: CUDNN_STATUS_BAD_PARAM",
    "index 5 is out of bounds for dimension 0 with size 3",
    "my replay buffer is out of memory slots",
    "the block table cannot allocate memory slots",
    "out of resource: registers",
    "Triton Error [CUDA]: invalid argument",
    "CUDA error: too many resources requested for launch",
    "CUDA error: no kernel image is available for execution on the device",
    "XLA:TPU compile permanent error: RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.",
    "RESOURCE_EXHAUSTED: Received message larger than max (4194305 vs. 4194304)",
    "libgomp.so.1: cannot allocate memory in static TLS block",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnSgetrf(handle, m, n)`",
    "CUDA error: invalid value when calling `cusparseCreateCsr(descriptor)`",
    "PytorchStreamWriter failed writing file data/3: file write failed",
    "unable to write to file </checkpoints/last.pt>: No space left on device (28)",
    "unable to open shared memory object </torch_77_1> in read-write mode: Too many open files (24)",
    "received 0 items of ancdata",
    "can't start new thread",
    "no key 'memory' in the batch; the transformer's memory has 3 layers",
    "Pin memory thread exited unexpectedly",
    "",
]


def kinds(exception):
    asked = {"memory": is_oom, "too large": is_too_large, "lost": is_device_lost}
    return {name for name, ask in asked.items() if ask(exception)}


@pytest.mark.parametrize(
    ("signs", "messages", "kind"),
    [
        (OOM_SIGNS, OOM_MESSAGES, "memory"),
        (TOO_LARGE_SIGNS, TOO_LARGE_MESSAGES, "too large"),
        (DEVICE_LOST_SIGNS, DEVICE_LOST_MESSAGES, "lost"),
    ],
    ids=["memory", "too large", "lost"],
)
def test_messages_are_told_apart_and_every_row_of_a_table_is_met_by_one(signs, messages, kind):
    assert {message: kinds(RuntimeError(message)) for message in messages} == {one: {kind} for one in messages}
    assert [sign for sign in signs if not any(map(sign.matches, messages)) or not sign.device or not sign.seen] == []


def test_other_messages_are_none_of_the_three():
    assert [message for message in OTHER_MESSAGES if kinds(RuntimeError(message))] == []


def caused(exception, cause):
    exception.__cause__ = cause
    return exception


def in_context(exception, context):
    exception.__context__ = context
    return exception


LACK = torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("exception", "expected"),
    [
        (torch.OutOfMemoryError("?"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (OSError(errno.ENOSPC, "No space left on device", "/mnt/checkpoint.pt"), False),
        (OSError(errno.EMFILE, "Too many open files"), False),
        (OSError("libgomp.so.1: cannot allocate memory in static TLS block"), False),
        (IndexError("index 5 is out of memory bounds"), False),
        (ValueError("CUDA out of memory"), False),  # the words of somebody else
        (caused(ValueError("this step failed"), LACK), True),
        (in_context(ValueError("a bug in the handler"), LACK), False),
        (caused(DoesNotFitError("not even one sample fits"), LACK), False),  # a conclusion of our own
        (ExceptionGroup("two losses", [LACK, MemoryError()]), True),
        (ExceptionGroup("two losses", [LACK, ValueError()]), False),
    ],
    ids=repr,
)
def test_lack_of_memory_is_known_by_type_and_cause(exception, expected):
    assert is_oom(exception) is expected


class Failing(torch.utils.data.Dataset):
    """Fails as `how` says, in a worker."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 1

    def __getitem__(self, index):
        if self.how == "numpy":
            return np.empty(2**58, dtype=np.uint8)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize("how", ["numpy", "system"])
def test_lack_of_memory_in_a_worker_of_a_loader_is_recognised(how):
    with pytest.raises((RuntimeError, OSError)) as caught:
        list(torch.utils.data.DataLoader(Failing(how), num_workers=1))

    assert is_oom(caught.value)


@pytest.mark.parametrize(("sizes", "kind"), [((2**44,), "memory"), ((2**62, 8), "too large")])
def test_allocation_that_no_machine_can_satisfy(sizes, kind):
    with pytest.raises(RuntimeError) as caught:
        torch.empty(*sizes)

    assert kinds(caught.value) == {kind}


def test_first_line_is_short_and_alone():
    assert first_line(RuntimeError("\n  CUDA error: out of memory \nmore")) == "CUDA error: out of memory"
    assert first_line(MemoryError()) == "MemoryError"
    assert first_line(RuntimeError("x" * 500)) == "x" * 199 + "…"


def pin(bound, how):
    """Raise with a tensor in a local variable of the frame that fails."""
    activation = torch.ones(8)
    bound.append(weakref.ref(activation))
    if how == "plain":
        raise torch.OutOfMemoryError
    try:
        pin(bound, "plain")
    except torch.OutOfMemoryError as inner:
        if how == "cause":
            raise RuntimeError from inner
        if how == "group":
            parts = [inner]
        else:
            raise RuntimeError  # noqa: B904 - the context is what is tested
    # Raised after the handler, so that nothing but the group leads to its parts.
    raise ExceptionGroup("two", [*parts, ValueError()])


@pytest.mark.parametrize("how", ["plain", "cause", "context", "group"])
def test_letting_go_frees_what_the_frames_hold(how):
    bound = []
    try:
        pin(bound, how)
    except Exception as exception:  # noqa: BLE001 - each way raises another type
        kept = exception
    pinned = [reference() is not None for reference in bound]

    clear_traceback_frames(kept)

    assert all(pinned)
    assert all(reference() is None for reference in bound)
    assert kept.__traceback__ is not None  # the lines stay


def test_causes_that_form_a_circle_end():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__, two.__context__ = two, one, one

    clear_traceback_frames(one)

    assert not is_oom(one)
