"""What NVML tells of the GPUs, by a stand-in for it: machines without a GPU have no such library."""

import os
from types import SimpleNamespace

import pytest

from autoaccum._memory import nvml

GIB = 1 << 30


def library():
    """A machine with two GPUs, on the second of which a process without a name holds memory."""

    class NVMLError(Exception):
        pass

    uuids = ("GPU-aaaa-1", "GPU-bbbb-2")
    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: uuids[handle],
        "nvmlDeviceGetName": lambda handle: f"GPU {handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 * GIB, free=(80 - handle) * GIB),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: (
            [SimpleNamespace(pid=(1 << 22) + 1, usedGpuMemory=handle * GIB)] if handle else []
        ),
    }
    return SimpleNamespace(**functions)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["GPU 0", "GPU 1"]),
        ("1", ["GPU 1"]),
        ("1,0", ["GPU 0", "GPU 1"]),
        ("GPU-bbbb", ["GPU 1"]),
        ("", []),
        ("MIG-cccc", []),
    ],
)
def test_only_visible_gpus_are_told(monkeypatch, visible, names):
    monkeypatch.setattr(nvml, "pynvml", library())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert [gpu.name for gpu in nvml.gpus_of(os.environ.get("CUDA_VISIBLE_DEVICES"))] == names


def test_a_gpu_is_told_with_who_holds_its_memory(monkeypatch):
    monkeypatch.setattr(nvml, "pynvml", library())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")

    (gpu,) = nvml.gpus_of(os.environ.get("CUDA_VISIBLE_DEVICES"))

    assert (gpu.total_bytes, gpu.free_bytes) == (80 * GIB, 79 * GIB)
    assert [(one.name, one.used_bytes) for one in gpu.neighbours] == [("?", GIB)]


def test_driver_is_told_with_the_newest_cuda_that_it_supports(monkeypatch):
    stand_in = library()
    stand_in.nvmlSystemGetDriverVersion = lambda: "580.65.06"
    stand_in.nvmlSystemGetCudaDriverVersion_v2 = lambda: 12090
    monkeypatch.setattr(nvml, "pynvml", stand_in)

    driver = nvml.read_driver()

    assert (driver.version, driver.cuda) == ("580.65.06", (12, 9))
    assert driver.text == "580.65.06, for CUDA up to 12.9"


@pytest.mark.parametrize("found", [None, "driver"])
def test_without_the_library_or_the_driver_there_are_no_gpus(monkeypatch, found):
    if found is not None:
        found = library()

        def fails():
            raise found.NVMLError

        found.nvmlInit = fails
    monkeypatch.setattr(nvml, "pynvml", found)

    assert nvml.gpus_of(os.environ.get("CUDA_VISIBLE_DEVICES")) == ()
    assert nvml.read_driver() is None
