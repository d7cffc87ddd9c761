"""Memory runs out for real: the state is bit for bit that of an undisturbed run of the same sizes.

On a CUDA GPU; where there is none, with small sizes on a simulated device.
"""

import contextlib
import functools
import gc
import itertools
import pickle
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from support.faults.modes import differences, state_of

# What an operator has no deterministic form of is told by a warning, and equal in these trainings all the same.
ON_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    # Without a GPU they only rehearse what tests/across/test_fault_matrix.py shows.
    *([] if ON_GPU else [pytest.mark.slow]),
]
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="no CUDA GPU here")
MIB, GIB = 2**20, 2**30
WINDOWS, CLASSES = 3, 5
MOMENTS = ("forward", "backward", "reserve", "optimizer")
OPTIMIZERS = {
    "Adam, foreach": functools.partial(torch.optim.Adam, lr=1e-3, foreach=True),
    "Adam, for-loop": functools.partial(torch.optim.Adam, lr=1e-3, foreach=False),
    "AdamW, fused": functools.partial(torch.optim.AdamW, lr=1e-3, fused=True),
}
# Samples, positions, width: large enough on a GPU that a tensor has its own segment of the allocator.
SHAPES = {"layers": (48, 256, 768), "attention": (48, 256, 768), "convolutions": (48, 64, 256)}


class Layers(nn.Module):
    """Layers with BatchNorm and dropout, applied at many positions of each sample."""

    def __init__(self, width):
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.second, self.head = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, features):
        hidden = torch.relu(self.norm(self.first(features.flatten(0, 1))))
        hidden = torch.tanh(self.second(functional.dropout(hidden, 0.2, self.training)))
        return self.head(hidden.view_as(features).mean(1))


class Attention(nn.Module):
    """One block of attention, written out: the fused kernels' backward passes are not deterministic."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, features):
        queries, keys, values = self.mix(self.norm(features)).chunk(3, dim=-1)
        weights = torch.softmax(queries @ keys.transpose(1, 2) / keys.shape[-1] ** 0.5, dim=-1)
        mixed = functional.dropout(weights, 0.1, self.training) @ values
        return self.head((features + self.out(mixed)).mean(1))


class Convolutions(nn.Module):
    """Two convolutions with BatchNorm between them, of positions and width seen as an image."""

    def __init__(self, width):
        super().__init__()
        channels = max(4, width // 16)
        self.first, self.norm = nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.second, self.head = nn.Conv2d(channels, channels, 3, padding=1), nn.Linear(channels, CLASSES)

    def forward(self, features):
        hidden = torch.relu(self.norm(self.first(features.unsqueeze(1))))
        return self.head(self.second(functional.dropout(hidden, 0.2, self.training)).mean((2, 3)))


BODIES = {"layers": Layers, "attention": Attention, "convolutions": Convolutions}
# Body, precision, optimizer.
CASES = (
    ("layers", "fp32", "Adam, foreach"),
    ("layers", "fp16", "Adam, foreach"),
    ("layers", "bf16", "AdamW, fused"),
    ("attention", "fp16", "Adam, for-loop"),
    ("convolutions", "fp32", "Adam, foreach"),
    ("layers", "fp32", "Adam, for-loop"),
    ("attention", "bf16", "Adam, foreach"),
    ("convolutions", "bf16", "Adam, for-loop"),
    ("layers", "fp16", "AdamW, fused"),
)
TRIED = CASES if ON_GPU else CASES[1:2]


class Hog(autoaccum.Callback):
    """Takes all memory at one moment of one window, and frees it after memory ran out.

    Args:
        moment: One of `MOMENTS`, or none. In forward and backward that of the second micro-batch, so that a part of the
            window is complete; "reserve" is when the last backward pass ends.
        window: The window, counted from 0.
        keeps: Whether it never frees the memory.
    """

    def __init__(self, moment="", window=2, *, keeps=False):
        self.moment, self.window, self.keeps = moment, window, keeps
        self.now, self.passes, self.armed, self.blocks, self.phases = 0, 0, bool(moment), [], []

    def hang_on(self, model, optimizer):
        self.parameter = next(model.parameters())
        if self.moment == "forward":
            model.register_forward_pre_hook(lambda *_: self.take() if self.is_second() else None)
        elif self.moment in ("backward", "reserve"):
            model.register_forward_hook(self.before_backward)
        elif self.moment == "optimizer":
            optimizer.register_step_pre_hook(lambda *_: self.take() if self.is_time() else None)

    def on_oom(self, event, *, step):
        self.phases.append(event.phase)
        if not self.keeps:
            self.blocks.clear()

    def before_backward(self, _module, _inputs, outputs):
        after = functools.partial(torch.autograd.Variable._execution_engine.queue_callback, self.take)
        take = after if self.moment == "reserve" else self.take
        if outputs.requires_grad and self.is_second():
            outputs.register_hook(lambda _: take())

    def take(self):
        if not self.armed:
            return
        self.armed = False
        if ON_GPU:
            torch.cuda.empty_cache()
        # On a GPU the loss and its like, which have segments of their own, must fail nothing before the reservation.
        block, least = (2**40, 2 * MIB if self.moment == "reserve" else MIB) if ON_GPU else (GIB, 256)
        while block >= least:  # ever smaller, to take free memory inside the allocator's segments as well
            try:
                self.blocks.append(torch.empty(block, dtype=torch.uint8, device=self.parameter.device))
            except torch.OutOfMemoryError:
                block //= 2

    def is_second(self):
        self.passes += self.is_time()
        return self.is_time() and self.passes == 2

    def is_time(self):
        return self.armed and self.now == self.window


@dataclass
class Trained:
    """States before the first window and after each, sizes, the highest peak; how it ended, and the state then."""

    states: list = field(default_factory=list)
    sizes: tuple = ()
    peak_bytes: int = 0
    error: Exception | None = None
    left: dict | None = None


@pytest.fixture(autouse=True)
def equal_work_gives_equal_bits():
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    yield
    torch.use_deterministic_algorithms(mode=False)
    torch.backends.cudnn.deterministic = False


def settle():
    """Free everything unreferenced; return what is held all the same."""
    if not ON_GPU:
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def train(case, *, sizes=(), limit_bytes=None, hog=None, fault=None):
    """Train three windows of two micro-batches, or of these sizes; a fault is of the third window."""
    settle()
    body, precision, optimizer = case
    samples, positions, width = SHAPES[body] if ON_GPU else (8, 6, 16)
    torch.manual_seed(0)
    batches = [(torch.randn(samples, positions, width), torch.randint(CLASSES, (samples,))) for _ in range(WINDOWS)]
    trained, hog, model = Trained(), hog or Hog(), BODIES[body](width)
    runner = autoaccum.Runner(
        model,
        OPTIMIZERS[optimizer],
        autoaccum.plan(samples, samples // 2),
        loss=nn.CrossEntropyLoss(),
        precision=precision,
        device="cuda" if ON_GPU else autoaccum.Simulated(limit_bytes or GIB),
        memory_limit=limit_bytes if ON_GPU else None,
        callbacks=[hog],
    )
    hog.hang_on(model, runner.optimizer)

    def state():
        found = state_of(model, runner.optimizer, runner._step.precision.scaler)
        return found | ({"gpu": torch.cuda.get_rng_state().tolist()} if ON_GPU else {})

    trained.states.append(state())
    for number, batch in enumerate(batches):
        if number < len(sizes):
            runner.plan = autoaccum.Plan(samples, sizes[number])
        hog.now = number
        try:
            with fault if fault is not None and number == 2 else contextlib.nullcontext():
                report = runner.step(batch)
        except (autoaccum.StateDamagedError, autoaccum.DoesNotFitError) as error:
            hog.blocks.clear()
            trained.error, trained.left = type(error), state()
            break
        trained.sizes += (report.micro_batches,)
        trained.peak_bytes = max(trained.peak_bytes, report.peak_bytes or 0)
        trained.states.append(state())
    hog.blocks.clear()
    return trained


@functools.lru_cache(maxsize=64)
def undisturbed(case, sizes=()):
    return train(case, sizes=sizes)


def room_for(case):
    return 2 * undisturbed(case).peak_bytes + (settle() + 64 * MIB if ON_GPU else 0)


def check(case, trained):
    """It did as an undisturbed run of its sizes, or gave up with all as before the window, or told of damage."""
    if trained.error is autoaccum.DoesNotFitError:
        assert differences(trained.states[-1], trained.left) == []
    elif trained.error is None:
        pairs = zip(undisturbed(case, trained.sizes).states, trained.states, strict=True)
        assert list(itertools.starmap(differences, pairs)) == [[]] * (WINDOWS + 1)


# The third window is neither the first, in which the optimizer makes its state, nor one that makes checks.
@pytest.mark.parametrize(
    ("case", "moment", "window"),
    [(case, moment, 2) for case in TRIED for moment in MOMENTS]
    + [(case, moment, 0) for case in TRIED[:2] for moment in MOMENTS],
    ids=str,
)
def test_memory_that_runs_out_leaves_what_the_same_sizes_leave(case, moment, window):
    hog = Hog(moment, window)
    trained = train(case, hog=hog, limit_bytes=room_for(case))

    # A step that needs no more memory than was reserved cannot fail.
    assert hog.phases or trained.error or moment in ("reserve", "optimizer")
    assert trained.error is not autoaccum.DoesNotFitError
    check(case, trained)


# Of convolutions cuDNN takes other kernels where there is no memory for the first one's workspace.
@pytest.mark.parametrize("case", [case for case in TRIED if case[0] != "convolutions"], ids=str)
@pytest.mark.parametrize("part", [0.85, 0.5, 0.2])
def test_limit_in_which_the_whole_window_does_not_fit_leaves_what_the_same_sizes_leave(case, part):
    samples = sum(undisturbed(case).sizes[0])
    whole = undisturbed(case, ((samples,),) * WINDOWS).peak_bytes
    half = undisturbed(case, ((samples // 2,) * 2,) * WINDOWS).peak_bytes
    limit_bytes = max(int(half + part * (whole - half)), settle() + MIB)

    check(case, train(case, sizes=((samples,),), limit_bytes=limit_bytes))


@pytest.mark.parametrize("moment", MOMENTS)
def test_memory_that_stays_taken_ends_with_an_error_or_with_smaller_sizes(moment):
    case = CASES[0]

    check(case, train(case, hog=Hog(moment, keeps=True), limit_bytes=room_for(case)))


@pytest.mark.gpu
@needs_gpu
def test_report_of_lack_of_memory_holds_the_allocators_own_record(tmp_path):
    torch.manual_seed(0)
    model, hog = Layers(768), Hog("backward", 0)
    hog.hang_on(model, None)

    autoaccum.fit(
        model,
        [(torch.randn(16, 64, 768), torch.randint(CLASSES, (16,))) for _ in range(2)],
        16,
        device="cuda",
        micro_batch=8,
        precision="fp32",
        loss=nn.CrossEntropyLoss(),
        callbacks=[hog],
        progress=False,
        memory_limit="1GiB",
        oom_report=tmp_path,
    )

    (text,), (snapshot,) = tmp_path.glob("*.txt"), tmp_path.glob("*.pickle")
    assert "first.weight" in text.read_text()
    assert pickle.loads(snapshot.read_bytes())["segments"]  # noqa: S301 - written above
