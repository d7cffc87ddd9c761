"""What NVML tells of the GPUs, by a stand-in for it: machines without a GPU have no such library."""

import ctypes
import uuid
from types import SimpleNamespace

import pytest

from autoaccum._memory import nvml

GIB = 1 << 30


UUIDS = ("aaaaaaaa-0000-0000-0000-000000000001", "bbbbbbbb-0000-0000-0000-000000000002")
INSTANCES = ("cccccccc-0000-0000-0000-000000000003", "dddddddd-0000-0000-0000-000000000004")


def library(*, divided=False):
    """A machine with two GPUs, on the second of which a process without a name holds memory; MIG may divide it."""

    class NVMLError(Exception):
        pass

    uuids = [f"GPU-{one}" for one in UUIDS] + [f"MIG-{one}" for one in INSTANCES]

    def fails(*_):
        raise NVMLError

    def mig_mode(handle):
        return (handle == 1, handle == 1) if divided and handle < 2 else fails()

    def instance(handle, place):
        return 2 + place if handle == 1 and place < 2 else fails()

    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: uuids[handle],
        "nvmlDeviceGetHandleByUUID": lambda name: uuids.index(name) if name in uuids else fails(),
        "nvmlDeviceGetMigMode": mig_mode,
        "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": instance,
        "nvmlDeviceGetName": lambda handle: f"GPU {handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(
            total=80 * GIB, free=(80 - handle) * GIB, used=handle * GIB
        ),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: (
            [SimpleNamespace(pid=(1 << 22) + 1, usedGpuMemory=handle * GIB)] if handle else []
        ),
    }
    return SimpleNamespace(**functions)


class Cuda:
    """The driver of CUDA, which shows some GPUs in an order of its own."""

    def __init__(self, *shown, code=0):
        self.shown, self.code = shown, code

    def cuInit(self, _):  # noqa: N802 - the driver's name
        return self.code

    def cuDeviceGetCount(self, found):  # noqa: N802 - the driver's name
        found._obj.value = len(self.shown)
        return 0

    def cuDeviceGet(self, found, number):  # noqa: N802 - the driver's name
        found._obj.value = number
        return 0

    def cuDeviceGetUuid_v2(self, found, device):  # noqa: N802 - the driver's name
        found[:] = uuid.UUID(self.shown[device.value]).bytes
        return 0


def test_gpus_have_the_numbers_that_cuda_gives_them(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Cuda(*reversed(UUIDS)))

    assert nvml.visible_uuids() == tuple(reversed(UUIDS))


@pytest.mark.parametrize(("driver", "found"), [(Cuda(code=100), ()), (Cuda(code=999), None), (object(), None)])
def test_where_the_driver_hides_all_there_are_none_and_where_it_fails_they_are_unknown(monkeypatch, driver, found):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)

    assert nvml.visible_uuids() == found


def test_a_gpu_is_told_with_who_holds_its_memory(monkeypatch):
    monkeypatch.setattr(nvml, "pynvml", library())

    gpus = nvml.all_gpus()

    assert [gpu.uuid for gpu in gpus] == list(UUIDS)
    assert (gpus[1].total_bytes, gpus[1].free_bytes) == (80 * GIB, 79 * GIB)
    assert [(one.name, one.used_bytes) for one in gpus[1].neighbours] == [("?", GIB)]


def test_a_gpu_that_mig_divides_is_told_by_its_instances(monkeypatch):
    monkeypatch.setattr(nvml, "pynvml", library(divided=True))

    assert [gpu.uuid for gpu in nvml.all_gpus()] == [UUIDS[0], *INSTANCES]
    assert nvml.usage_of(INSTANCES[0]) == (2 * GIB, {(1 << 22) + 1: 2 * GIB})
    assert nvml.usage_of(UUIDS[1]) is None  # it says nothing of the instance that a process has
    assert nvml.usage_of(UUIDS[0]) == (0, {})


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

    assert nvml.all_gpus() == ()
    assert nvml.read_driver() is None
