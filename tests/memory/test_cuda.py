"""The CUDA backend without a GPU: its sums and its order of calls, against a stand-in for torch.cuda's allocator.

What a real GPU does is tested by test_base.py where there is one.
"""

import contextlib
import gc
import os
import subprocess
import types

import pytest
import torch

from autoaccum._memory import nvml
from autoaccum._memory.cuda import Cuda
from autoaccum._memory.limits import describe_neighbours
from autoaccum.errors import InvalidInputError

GIB = 2**30


class GPU:
    """16 GiB, of which this process reserved 2 (1 of it allocated) and others hold 3."""

    def __init__(self):
        self.fraction = 1.0
        self.reserved, self.allocated, self.cached = 2 * GIB, GIB, 0
        self.calls = []

    def empty_cache(self):
        self.calls.append("empty_cache")
        self.reserved -= self.cached
        self.cached = 0


@pytest.fixture
def gpu(monkeypatch):
    gpu = GPU()
    properties = types.SimpleNamespace(name="NVIDIA Test", total_memory=16 * GIB, uuid="abc")
    stand_ins = {
        "current_device": lambda: 1,
        "get_device_properties": lambda index: properties,
        "mem_get_info": lambda device: (16 * GIB - 3 * GIB - gpu.reserved, 16 * GIB),
        "memory_reserved": lambda device: gpu.reserved,
        "memory_allocated": lambda device: gpu.allocated,
        "max_memory_reserved": lambda device: 5 * GIB,
        "max_memory_allocated": lambda device: 3 * GIB,
        "reset_peak_memory_stats": lambda device: None,
        "get_per_process_memory_fraction": lambda device: gpu.fraction,
        "set_per_process_memory_fraction": lambda value, device: setattr(gpu, "fraction", value),
        "empty_cache": gpu.empty_cache,
        "device": lambda device: contextlib.nullcontext(),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(gc, "collect", lambda: gpu.calls.append("collect"))
    return gpu


def cuda():
    return Cuda(torch.device("cuda"))


def test_limit_is_a_fraction_of_the_whole_gpu_and_put_back_on_an_exception(gpu):
    gpu.fraction = 0.9

    with contextlib.suppress(KeyError), cuda().limited(4 * GIB):
        inside = gpu.fraction
        raise KeyError

    assert inside == 0.25
    assert gpu.fraction == 0.9


def test_limit_never_widens_one_that_holds_already(gpu):
    gpu.fraction = 0.5

    with cuda().limited(12 * GIB):
        assert gpu.fraction == 0.5


def test_limit_below_what_the_process_holds_is_refused(gpu):
    with pytest.raises(InvalidInputError, match=r"1\.0 GiB on NVIDIA Test is below the 2\.0 GiB"), cuda().limited(GIB):
        pass

    assert gpu.fraction == 1.0


def test_cached_memory_is_given_back_before_a_limit_is_refused(gpu):
    gpu.cached = GIB

    with cuda().limited(int(1.5 * GIB)):
        assert gpu.reserved == GIB


def test_reading_counts_what_is_reserved_under_the_limit(gpu, monkeypatch):
    monkeypatch.setattr(nvml, "pynvml", None)
    backend = cuda()

    with backend.limited(4 * GIB):
        reading = backend.reading()

    assert (reading.used_bytes, reading.limit_bytes, reading.free_bytes) == (2 * GIB, 4 * GIB, 2 * GIB)
    assert reading.total_bytes == 16 * GIB


def test_peak_in_use_is_that_of_tensors_and_not_of_the_cache(gpu):
    assert (cuda().peak_in_use_bytes(), cuda().peak_bytes()) == (3 * GIB, 5 * GIB)


@pytest.mark.parametrize(("asked", "calls"), [(GIB, []), (GIB + 1, ["empty_cache", ("reserve", GIB + 1)])])
def test_memory_is_secured_as_a_whole_once_a_cache_that_does_not_suffice_is_given_back(gpu, monkeypatch, asked, calls):
    gpu.cached = GIB
    monkeypatch.setattr(Cuda, "reserve", lambda _, extra_bytes: gpu.calls.append(("reserve", extra_bytes)))

    cuda().secure(asked)

    assert gpu.calls == calls


@pytest.mark.parametrize(
    ("shares", "others"),
    [
        ([(os.getpid(), int(2.5 * GIB)), (1, 3 * GIB)], 3.5),
        ([(1, 3 * GIB)], 4),  # in a container NVML does not show this process: what is reserved is taken for it
        ([(os.getpid(), None)], 4),  # permission denied
    ],
)
def test_others_hold_what_nvml_counts_less_our_share(gpu, monkeypatch, shares, others):
    monkeypatch.setattr(nvml, "pynvml", nvml_with(shares))

    assert cuda().others_bytes() == others * GIB


def test_others_are_named_with_what_they_hold(gpu, monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as other:
        shares = [(os.getpid(), GIB), (2**22 + 1, None), (other.pid, 3 * GIB)]
        monkeypatch.setattr(nvml, "pynvml", nvml_with(shares))
        text = describe_neighbours(cuda())
        other.kill()

    assert text.endswith(f"hold memory of NVIDIA Test: sleep (pid {other.pid}) 3.0 GiB, ? (pid {2**22 + 1})")


def nvml_with(shares):
    def has_no_mig(_):
        raise RuntimeError

    return types.SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMigMode=has_no_mig,
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=6 * GIB),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in shares
        ],
    )
