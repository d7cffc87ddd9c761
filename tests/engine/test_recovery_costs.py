"""What a failure costs where finished micro-batches keep their weight: its own micro-batch; and when sizes grow."""

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._data.batches import as_window
from autoaccum._engine import micro_batches
from autoaccum._memory.host import Host
from autoaccum._records import MemoryReading
from autoaccum._sizing.backoff import CLEAN_WINDOWS, FIRST_WAIT_WINDOWS
from autoaccum._sizing.sizing import Cutting
from autoaccum._system.notices import Notices
from put_together import runner_of

SAMPLES = 24
LACK = torch.OutOfMemoryError("CUDA out of memory.")


class Failing(nn.Module):
    """Runs out of memory in the n-th forward or backward pass of training, counted from when it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.arm()

    def arm(self, *, forward=None, backward=None):
        self.countdown = {"forward": forward, "backward": backward}

    def forward(self, inputs):
        self.count("forward")
        # Behind the last layer on the way back, whose gradients have arrived by then.
        return self.body[3](Through.apply(self.body[:3](inputs), self))

    def count(self, where):
        if self.training and self.countdown[where] is not None:  # a few samples are compared in evaluation mode
            self.countdown[where] -= 1
            if self.countdown[where] == 0:
                raise LACK


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, model):
        ctx.model = model
        return outputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.model.count("backward")
        return gradient, None


class Roomy(Host):
    """Host memory that says how much is free."""

    def __init__(self, free_bytes=1 << 40):
        super().__init__()
        self.free_bytes = free_bytes
        self.retries = 0

    def reading(self):
        return MemoryReading(total_bytes=1 << 40, free_bytes=self.free_bytes, used_bytes=0)

    def peak_bytes(self):
        return None

    def alloc_retries(self):
        return self.retries


def made(memory=None, plan=None, **options):
    model = Failing()
    runner = autoaccum.Runner(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        plan or autoaccum.plan(SAMPLES, 6),
        loss=nn.CrossEntropyLoss(),
        device=memory or Roomy(),
        notices=Notices(silent=True),
        **options,
    )
    return model, runner


def window(seed=1):
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, 6, generator=chance), torch.randint(0, 3, (SAMPLES,), generator=chance)


@pytest.mark.parametrize(
    ("forward", "cut"),
    [(1, (5, 5, 5, 5, 4)), (2, (6, 5, 5, 4, 4)), (3, (6, 6, 4, 4, 4)), (4, (6, 6, 6, 3, 3))],
)
def test_forward_failure_costs_its_micro_batch_and_leaves_what_is_done(forward, cut):
    model, runner = made()
    torch.manual_seed(5)
    runner.step(window(0))
    model.arm(forward=forward)

    report = runner.step(window(1))

    assert report.micro_batches == cut
    assert (report.oom_events, report.recomputed_samples) == (1, 6)


def test_first_backward_failure_costs_what_the_window_had_done():
    model, runner = made()
    torch.manual_seed(5)
    runner.step(window(0))
    model.arm(backward=3)

    report = runner.step(window(1))

    assert report.micro_batches == (5, 5, 5, 5, 4)
    assert report.recomputed_samples == 18


def test_backward_failure_in_times_of_trouble_costs_its_micro_batch():
    model, runner = made()
    torch.manual_seed(5)
    reports = [runner.step(window(0))]
    model.arm(forward=1)
    reports.append(runner.step(window(1)))
    model.arm(backward=3)

    reports.append(runner.step(window(2)))

    assert reports[-1].micro_batches == (5, 5, 4, 4, 3, 3)
    assert reports[-1].recomputed_samples == 5


def test_without_room_for_a_second_set_of_gradients_a_backward_failure_costs_what_the_window_had_done():
    model, runner = made(Roomy(free_bytes=16))
    runner.step(window(0))
    model.arm(forward=1)
    runner.step(window(1))
    model.arm(backward=3)

    assert runner.step(window(2)).recomputed_samples == 15


def test_sizes_do_not_grow_where_no_memory_is_free():
    memory = Roomy()
    model, runner = made(memory)
    runner._sizing.bytes_per_sample = 1024
    runner.step(window(0))
    model.arm(forward=1)
    runner.step(window(1))
    memory.free_bytes = 512

    for _ in range(3 * FIRST_WAIT_WINDOWS):
        runner.step(window(2))

    assert runner.plan.micro_batch == 5


def test_plan_that_an_earlier_run_had_shrunk_to_grows_back_too():
    _, runner = made()
    planned = runner.plan
    step = runner._step
    runner = runner_of(step, planned, cutting=Cutting(autoaccum.plan(SAMPLES, 4), planned))
    first = runner.step(as_window(window(2)))

    for _ in range(FIRST_WAIT_WINDOWS + 2 * CLEAN_WINDOWS):
        runner.step(as_window(window(2)))

    assert first.micro_batches == (4, 4, 4, 4, 4, 4)
    assert runner.plan is planned


def test_allocator_that_gives_back_its_cache_again_and_again_gets_smaller_micro_batches(monkeypatch):
    monkeypatch.setattr("autoaccum._sizing.headroom._LOOK_INTERVAL_S", 0.0)
    memory = Roomy()
    _, runner = made(memory)
    runner.step(window(0))
    memory.retries = 1
    once = runner.step(window(0)), runner.step(window(0)), runner.plan.micro_batch
    memory.retries = 2
    runner.step(window(0))
    memory.retries = 3

    runner.step(window(0))

    assert once[2] == 6
    assert runner.plan.micro_batch == 5
    assert runner.oom_events == 0


@pytest.mark.parametrize("shape", [(1024, 1024), (3, 5, 2**19), (2**20,), (1, 2**20), (0, 4)])
def test_what_tells_whether_a_frozen_parameter_moved_is_summed_in_little_memory(shape):
    frozen = torch.randn(shape).mT if len(shape) == 2 else torch.randn(shape)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        total = micro_batches._sum(frozen)

    assert total.item() == pytest.approx(frozen.double().sum().item(), abs=1e-6)
    assert max(event.cpu_memory_usage for event in profile.events()) <= 2 * 2**20
