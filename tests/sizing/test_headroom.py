"""Whether larger micro-batches have room is judged by what windows need, not by what the process held for a while."""

import subprocess
import sys
import tracemalloc

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum import Simulated, Window
from autoaccum._sizing import headroom
from autoaccum._sizing.cutting import Cutting, SizingOptions
from autoaccum._sizing.events import Events
from autoaccum._sizing.headroom import Headroom
from autoaccum._sizing.sizing import Sizing
from autoaccum._system.notices import Notices  # an argument
from autoaccum.records import MemoryReading


class Counted(Simulated):
    def __init__(self):
        super().__init__(100)
        self.held, self.highest = 10, 10

    def reading(self):
        return MemoryReading(total_bytes=100, free_bytes=100 - self.held, used_bytes=self.held)

    def peak_bytes(self):
        return self.highest

    def reset_peak(self):
        self.highest = self.held

    def window(self, needs):
        self.highest = max(self.highest, self.held + needs)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(headroom, "_LOOK_INTERVAL_S", 0.0)
    return Counted()


def test_memory_that_was_held_for_a_while_does_not_count_for_ever(device):
    room = Headroom(device)
    room.follow(autoaccum.plan(8, 4))
    device.held = 60
    device.window(30)
    room.shortage(reads_peak=True)
    device.held = 10

    assert not room.is_free(20)  # windows seem to need 80, of which 70 are not in use now
    device.window(30)
    room.shortage(reads_peak=True)

    assert room.is_free(20)
    assert room.peak_bytes == 90


def test_what_windows_need_counts_also_after_a_refusal(device):
    room = Headroom(device)
    room.follow(autoaccum.plan(8, 4))
    for _ in range(3):
        device.window(60)
        room.shortage(reads_peak=True)

        assert not room.is_free(40)


@pytest.mark.slow
def test_long_samples_are_not_taken_for_short_ones_that_were_cut_alike():
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(8, 4), loss=loss, device="cpu", memory_limit="60MiB")

    cuts = []
    for length in (16, 16384, 16384):
        inputs = torch.randn(8, length, 64)
        cuts.append(runner.step((inputs, inputs)).micro_batches)

    assert cuts[:2] == [(4, 4), (4, 4)]
    assert len(cuts[2]) > 2


def test_sizes_are_made_smaller_for_a_peak_above_the_limit_as_long_as_that_helps(device):
    device.describe_overrun = lambda peak: "too much" if peak > 50 else None
    room = Headroom(device)

    def told(size, needs):
        room.follow(autoaccum.plan(8, size))
        device.window(needs)
        return room.shortage(reads_peak=True) is not None

    assert told(8, 70)
    assert told(6, 60)
    assert not told(4, 60)  # as native code that keeps memory for each size makes it
    assert not told(4, 40)
    assert told(6, 60)


GROWS_BACK = """
import torch, autoaccum
from torch import nn

class Neighbour(autoaccum.Callback):
    def on_step(self, report, *, epoch):
        self.held = torch.zeros(40 * 2**18) if 5 <= report.step < 10 else None
        size = max(report.micro_batches)
        if report.step == 5:
            self.first = size
        if report.step > 10 and size == self.first:
            raise autoaccum.StopTraining

torch.manual_seed(0)
torch.set_num_threads(1)  # two would wait for each other
body = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten()
result = autoaccum.fit(
    nn.Sequential(*body, nn.Linear(512, 10)), [(torch.randn(64, 1, 64, 32), torch.randint(10, (64,)))], 64,
    epochs=90, device="cpu", memory_limit="40MiB", micro_batch=32, callbacks=[Neighbour()], progress=False,
)
print(*(max(report.micro_batches) for report in result.history))
"""


def test_sizes_grow_back_after_the_process_has_released_what_it_held():
    # In a new process: memory that an earlier test left, and that is freed meanwhile, makes room.
    done = subprocess.run([sys.executable, "-c", GROWS_BACK], capture_output=True, text=True, check=True)

    sizes = [int(size) for size in done.stdout.split()]
    assert sizes[8] < sizes[4] == sizes[-1], sizes


class Retrying(Simulated):
    """A device whose allocator gives back its cache in each window of larger micro-batches than `most`."""

    def __init__(self, most):
        super().__init__("1GiB")
        self.most, self.retries = most, 0

    def alloc_retries(self):
        return self.retries


class Net(nn.Linear):
    """Counts the device's retries; runs out of memory in the third window."""

    def __init__(self, device, fails):
        super().__init__(4, 3)
        self.on, self.fails, self.passes = device, fails, 0

    def forward(self, features):
        self.passes += 1
        self.on.retries += len(features) > self.on.most
        if self.fails and self.passes == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(features)


@pytest.mark.parametrize(("fails", "sizes"), [(False, [48, 48, 48, 32, 32, 32]), (True, [48, 48, 32, 32, 32, 32])])
def test_allocator_that_keeps_giving_back_its_cache_makes_sizes_smaller_once(monkeypatch, fails, sizes):
    monkeypatch.setattr(headroom, "_LOOK_INTERVAL_S", 0.0)
    device = Retrying(40)
    windows = [(torch.randn(96, 4), torch.randint(3, (96,)))] * 6
    options = {"loss": nn.CrossEntropyLoss(), "loss_reduction": "mean", "micro_batch": 48, "progress": False}
    result = autoaccum.fit(Net(device, fails), windows, 96, device=device, **options)

    assert [report.micro_batches[0] for report in result.history] == sizes


class Soft(Counted):
    is_soft = True


class Copied(Counted):
    """A GPU as its memory is counted: what a micro-batch holds beside what is copied ahead."""

    def __init__(self):
        super().__init__()
        self.device, self.held, self.highest = torch.device("cuda"), 0, 0

    def synchronize(self):
        pass


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
def test_batches_that_are_copied_ahead_count_with_the_bytes_that_they_have(dtype):
    device = Copied()
    events = Events(device, [], Notices())
    sizing = Sizing(device, list, Cutting.of(autoaccum.plan(8, 2)), SizingOptions(learns=True), events)
    batch = torch.zeros(8, 5, dtype=dtype)

    sizing.begin(Window([batch]))
    for start in (0, 2):  # the first makes gradients, too
        sizing.enter(start, 2)
        device.window(30)
        sizing.leave(start, 2)

    assert sizing.cutter.frontier.expected_bytes(2, (5,)) == 30 + batch[:2].nbytes


def test_windows_of_ever_new_kinds_take_no_more_memory():
    room = Headroom(Soft())
    room.follow(autoaccum.plan(8, 4))

    def windows(numbers):
        for number in numbers:
            room.measure((number,))
            room.shortage((4, 4), reads_peak=True)

    windows(range(2048))
    tracemalloc.start()
    windows(range(2048, 10240))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert grown < 2**19
