"""What only a card can show, quickly: real lack of memory in each phase, the transfer beside the computing, the limit.

benchmarks/gpu.py does the same at length, and more.
"""

import contextlib
import functools
import gc
import pickle

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._memory import backend_for
from autoaccum._system.notices import Notices
from faults import FailAt, differences, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card here"),
    # What an operator has no deterministic form of is told by a warning, and equal in these trainings all the same.
    pytest.mark.filterwarnings("ignore"),
]

SAMPLES, POSITIONS, FEATURES, WIDTH = 16, 64, 96, 768
MIB = 2**20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(WIDTH, 4)

    def forward(self, features):
        # Made of a few: what a micro-batch leaves free is less than the optimizer reserves.
        hidden = torch.relu(self.norm(self.first(features.flatten(0, 1).repeat(1, WIDTH // FEATURES))))
        return self.head(self.drop(hidden).view(len(features), POSITIONS, WIDTH).mean(1))


class Taken(autoaccum.Callback):
    """Takes all memory that a limit leaves, once; gives it back when memory has run out."""

    def __init__(self, memory):
        self.memory, self.blocks, self.phases, self.armed = memory, [], [], False

    def take(self):
        if not self.armed:
            return
        self.armed = False
        torch.cuda.empty_cache()
        block = self.memory.reading().free_bytes
        least = 2 * MIB  # smaller tensors have segments of their own
        while True:
            try:
                self.blocks.append(torch.empty(block, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                if block <= least:
                    return
                block = max(block // 2, least)

    def on_oom(self, event, *, step):
        self.phases.append(event.phase)
        self.blocks.clear()


@pytest.fixture
def memory():
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    yield backend_for(torch.device("cuda"))
    torch.use_deterministic_algorithms(mode=False)
    gc.collect()
    torch.cuda.empty_cache()


def train(memory, precision, *, where="", cuts=(), fault=None):
    """Train three windows, memory taken in the third, which makes no checks; return states, cuts and failed phases."""
    torch.manual_seed(0)
    windows = [(torch.randn(SAMPLES, POSITIONS, FEATURES), torch.randint(4, (SAMPLES,))) for _ in range(3)]
    model, taken = Net(), Taken(memory)
    runner = autoaccum.Runner(
        model,
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        autoaccum.plan(SAMPLES, SAMPLES),
        loss=nn.CrossEntropyLoss(),
        device=memory,
        precision=precision,
        callbacks=[taken],
        notices=Notices(silent=True),
    )
    if where == "forward":
        model.first.register_forward_pre_hook(lambda *_: taken.take())
    elif where == "backward":
        model.head.register_forward_hook(lambda module, inputs, outputs: _at_backward(outputs, taken.take))
    elif where == "reserve":
        # When the only backward pass has ended, the optimizer's reservation comes next.
        after = functools.partial(torch.autograd.Variable._execution_engine.queue_callback, taken.take)
        model.head.register_forward_hook(lambda module, inputs, outputs: _at_backward(outputs, after))
    memory.release()
    states, seen = [], []
    with memory.limited(memory.reading().used_bytes + 512 * MIB):
        for number, window in enumerate(windows):
            if number < len(cuts):
                runner.plan = autoaccum.Plan(SAMPLES, cuts[number])
            taken.armed = bool(where) and number == 2
            with fault if fault is not None and number == 2 else contextlib.nullcontext():
                report = runner.step(window)
            seen.append(report.micro_batches)
            state = state_of(model, runner.optimizer, runner._step.precision.scaler)
            states.append(state | {"card": torch.cuda.get_rng_state().tolist()})
    return states, seen, taken.phases


def _at_backward(outputs, take):
    if outputs.requires_grad:
        outputs.register_hook(lambda gradient: take())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("where", ["forward", "backward", "reserve"])
def test_real_lack_of_memory_leaves_what_the_same_cuts_leave(memory, where, precision):
    states, cuts, phases = train(memory, precision, where=where)
    reference, _, none = train(memory, precision, cuts=cuts)

    assert phases == [where]
    assert none == []
    assert [differences(one, other) for one, other in zip(states, reference, strict=True)] == [[], [], []]


def test_injected_failures_reach_the_backward_pass_on_the_card(memory):
    counting = FailAt()
    train(memory, "fp32", fault=counting)

    for point in (counting.count // 4, counting.count // 3, counting.count // 2):
        states, cuts, phases = train(memory, "fp32", fault=FailAt(point))
        reference, _, _ = train(memory, "fp32", cuts=cuts)

        assert len(phases) == 1
        assert [differences(one, other) for one, other in zip(states, reference, strict=True)] == [[], [], []]


def test_fit_finds_a_size_that_a_limit_allows_and_stays_within_it(memory):
    torch.manual_seed(0)
    # All 16 samples take some 500 MiB; cuBLAS takes up to 64 for itself.
    limit = memory.reading().used_bytes + 256 * MIB
    windows = [(torch.randn(SAMPLES, 32 * POSITIONS, WIDTH), torch.randint(4, (SAMPLES,)))] * 3
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

    result = autoaccum.fit(
        net,
        windows,
        SAMPLES,
        loss=nn.CrossEntropyLoss(),
        forward=lambda model, batch: model(batch[0]).mean(1),
        device=memory,
        precision="fp32",
        memory_limit=limit,
        progress=False,
    )

    assert result.plan.accum_steps > 1
    assert result.samples == 3 * SAMPLES
    assert all(report.peak_bytes <= limit for report in result.history)


def test_report_of_lack_of_memory_holds_the_allocators_own_record(tmp_path):
    memory = backend_for(torch.device("cuda"))
    taken = Taken(memory)
    torch.manual_seed(0)
    model = Net()
    taken.armed = True

    def forward(model, batch):
        hidden = model(batch[0].clone())
        taken.take()
        return hidden + model(batch[0])

    autoaccum.fit(
        model,
        [(torch.randn(SAMPLES, POSITIONS, FEATURES), torch.randint(0, 4, (SAMPLES,))) for _ in range(2)],
        SAMPLES,
        device=memory,
        micro_batch=SAMPLES,
        precision="fp32",
        forward=forward,
        loss=nn.CrossEntropyLoss(),
        callbacks=[taken],
        progress=False,
        memory_limit="1GiB",
        oom_report=tmp_path,
    )

    (text,), (snapshot,) = tmp_path.glob("*.txt"), tmp_path.glob("*.pickle")
    assert "first.weight" in text.read_text()
    assert pickle.loads(snapshot.read_bytes())["segments"]  # noqa: S301 - written above
