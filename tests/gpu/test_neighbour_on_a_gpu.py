"""Another process takes the GPU's memory in the middle of a training, and gives it back.

On a CUDA GPU; where there is none, with small sizes on a simulated device whose memory this process takes.
"""

import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn

import autoaccum
from support.faults.modes import differences, state_of

# What an operator has no deterministic form of is told by a warning, and equal in these trainings all the same.
pytestmark = pytest.mark.filterwarnings("ignore")

ON_GPU = torch.cuda.is_available()
SAMPLES, POSITIONS, WIDTH = (64, 256, 2048) if ON_GPU else (8, 64, 16)
STEPS, TAKEN_AFTER, GIVEN_AFTER = 120, 16, 40
ROOM = 0.6  # share of a whole window's memory, beside what is always held
# Takes all memory of the GPU but so many bytes, or for "all" gives it back, and says what it holds.
NEIGHBOUR = """
import sys, torch
blocks = [torch.zeros(1, device="cuda")]
for line in sys.stdin:
    if line.strip() == "all":
        blocks.clear()
        torch.cuda.empty_cache()
    for block in (2**30, 2**27, 2**24, 2**21) if line.strip() != "all" else ():
        try:
            while torch.cuda.mem_get_info()[0] - int(line) >= block:
                blocks.append(torch.empty(block, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
    torch.cuda.synchronize()
    print(sum(block.nbytes for block in blocks), flush=True)
"""


class Neighbour:
    """Another process on the GPU; without one, a tensor of this process on a simulated device."""

    def __init__(self, device):
        self.device, self.block, self.process = device, None, None
        if ON_GPU:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], **pipes)
            self.leave(None)

    def leave(self, room_bytes):
        """Take all memory but this, or with None give all back; return the bytes held."""
        if self.process:
            self.process.stdin.write(f"{'all' if room_bytes is None else room_bytes}\n")
            self.process.stdin.flush()
            return int(self.process.stdout.readline())
        self.block, reading = None, self.device.reading()
        taken = 0 if room_bytes is None else max(0, reading.total_bytes - reading.used_bytes - room_bytes)
        self.block = torch.empty(taken, dtype=torch.uint8)
        return taken


class Watch(autoaccum.Callback):
    """Lets the neighbour take memory after some steps, and give it back later."""

    def __init__(self, neighbour, device):
        self.neighbour, self.device = neighbour, device
        self.reports, self.taken = [], 0

    def on_step(self, report, *, epoch):
        self.reports.append(report)
        if report.step == TAKEN_AFTER:
            # Nobody can take what this process's allocator holds, so it lets go of its cache, as evaluations do.
            if ON_GPU:
                peak = torch.cuda.max_memory_reserved()
                torch.cuda.empty_cache()
                held = torch.cuda.memory_reserved()
            else:
                peak, held = self.device.peak_bytes(), self.device.reading().used_bytes
            self.taken = self.neighbour.leave(int(ROOM * (peak - held)))
        elif report.step == GIVEN_AFTER:
            self.neighbour.leave(None)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, features):
        hidden = torch.relu(self.norm(self.first(features.flatten(0, 1))))
        return self.head(torch.tanh(nn.functional.dropout(hidden, 0.2, self.training)).view_as(features).mean(1))


def made():
    torch.manual_seed(1)
    model = Layers()
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def test_training_goes_on_beside_a_neighbour_and_is_that_of_its_sizes_bit_for_bit(monkeypatch):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", "")  # nothing is remembered
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    device = "cuda" if ON_GPU else autoaccum.Simulated("1GiB")
    neighbour = Neighbour(device)
    watch = Watch(neighbour, device)
    torch.manual_seed(5)
    batches = [(torch.randn(SAMPLES, POSITIONS, WIDTH), torch.randint(5, (SAMPLES,))) for _ in range(4)]
    options = {"loss": nn.CrossEntropyLoss(), "device": device, "precision": "fp32"}
    model, optimizer = made()

    try:
        autoaccum.fit(
            model,
            batches,
            SAMPLES,
            optimizer=optimizer,
            epochs=STEPS // len(batches),
            micro_batch=SAMPLES,
            callbacks=[watch],
            progress=False,
            **options,
        )
    finally:
        if neighbour.process:
            neighbour.process.kill()
            neighbour.process.communicate()

    assert watch.taken > 0
    before, during = watch.reports[:TAKEN_AFTER], watch.reports[TAKEN_AFTER:GIVEN_AFTER]
    assert sum(report.oom_events for report in before) == 0
    assert sum(report.oom_events for report in during) > 0
    assert watch.reports[-1].micro_batches == (SAMPLES,)
    # An undisturbed run with these sizes.
    state = state_of(model, optimizer)
    model, optimizer = made()
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(SAMPLES, SAMPLES), **options)
    for batch, report in zip(itertools.cycle(batches), watch.reports, strict=False):
        runner.plan = autoaccum.Plan(SAMPLES, report.micro_batches)
        runner.step(batch)
    torch.use_deterministic_algorithms(mode=False)
    assert differences(state, state_of(model, optimizer)) == []
