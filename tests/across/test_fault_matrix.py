"""A failure at any point of a window: lack of memory changes the sizes of micro-batches alone, any other error nothing.

A `Runner` trains a tiny model for four windows and is made to fail in one of them. What it ends with is compared, bit
for bit, with a loop by hand over the sizes that its reports name. Windows hold 16 samples and weights add up to powers
of two, so that it does not matter in which order a loss is weighted.
"""

import contextlib
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import autoaccum
from support.faults.modes import differences, state_of
from support.faults.places import Fault, passed_back

SAMPLES, MICRO_BATCH, WINDOWS = 16, 4, 4
FEATURES = ("plain", "BatchNorm", "Dropout", "pair", "window loss", "clipping", "two optimizers", "generator", "draws")
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# The place that fails, when it is passed for which times, and in which window, all counted from 0; in the first window
# from its end, since a loss is tried out at its beginning.
PHASES = {
    "first transfer": ("transfer", [0], 2),
    "transfer": ("transfer", [1], 2),
    "first forward": ("forward", [0], 2),
    "third forward": ("forward", [2], 2),
    "last forward": ("forward", [3], 2),
    "two forwards": ("forward", [2, 4], 2),
    "loss": ("loss", [0], 2),
    "first backward": ("backward", [0], 2),
    "last backward": ("backward", [3], 2),
    "unscale": ("unscale", [0], 2),
    "clip": ("clip", [0], 2),
    "step": ("step", [0], 2),
    "forward of the first window": ("forward", [-2], 0),
    "backward of the first window": ("backward", [-2], 0),
    "clip of the first window": ("clip", [-1], 0),
    "first step": ("step", [0], 0),
    "first step, written": ("written", [0], 0),
    "first step, scale updated": ("update", [0], 0),
}
CASES = [
    pytest.param(
        phase,
        feature,
        "fp16" if PHASES[phase][0] in ("unscale", "update") else list(PRECISIONS)[(row + column) % 3],
        [ValueError, KeyboardInterrupt][(row + column) % 2],
        id=f"{phase}-{feature}",
    )
    for row, phase in enumerate(PHASES)
    for column, feature in enumerate(FEATURES)
]
# Each phase meets a third of the features, and the sweep the others; of another error a third is all: nothing is made
# smaller, so that less can go wrong.
TURNS = [(number // len(FEATURES) + number) % 3 for number in range(len(CASES))]
SOME_CASES = [case for case, turn in zip(CASES, TURNS, strict=True) if turn == 0]
OF_MEMORY = [
    pytest.param(*case.values, id=case.id, marks=() if turn == 1 else pytest.mark.sweep)
    for case, turn in zip(CASES, TURNS, strict=True)
]
BY_TURNS = list(zip(FEATURES, [*PRECISIONS] * 3, strict=True))


class AtPlace(Fault):
    """A fault of one place, which all of them ask for."""

    def arm(self, place=None, times=(), error=None):
        self.place = place
        super().arm(*times, error=error)

    def at(self, place):
        if place == self.place:
            self()


FAULT = AtPlace()


@pytest.fixture(autouse=True)
def no_fault():
    FAULT.arm()


class Net(nn.Module):
    def __init__(self, feature):
        super().__init__()
        torch.manual_seed(0)
        layers = {"BatchNorm": nn.BatchNorm1d(8), "Dropout": nn.Dropout(0.3), "window loss": nn.Dropout(0.3)}
        self.body = nn.Sequential(nn.Linear(4, 8), layers.get(feature, nn.Tanh()))
        self.head = nn.Linear(8, 3)
        self.noise = torch.Generator().manual_seed(3) if feature == "generator" else None

    def forward(self, inputs):
        hidden = self.body(inputs)
        if self.noise is not None:
            hidden = hidden + torch.randn(hidden.shape, generator=self.noise)
        FAULT.at("forward")
        return self.head(passed_back(hidden, lambda: FAULT.at("backward")))  # with the last layer's gradients there


def loss_of(feature):
    def pair(outputs, targets):
        FAULT.at("loss")
        labels, weights = targets.unbind(1)
        return (functional.cross_entropy(outputs, labels, reduction="none") * weights).sum(), weights.sum()

    def of_all(outputs, targets):
        FAULT.at("loss")
        return functional.cross_entropy(outputs - outputs.mean(0), targets)

    def drawing(outputs, targets):
        noise = [random.random() + np.random.random() for _ in targets]  # noqa: NPY002, S311
        FAULT.at("loss")
        return functional.cross_entropy(outputs * torch.tensor(noise)[:, None], targets)

    usual = nn.CrossEntropyLoss()
    usual.register_forward_hook(lambda *_: FAULT.at("loss"))
    return {"pair": pair, "window loss": of_all, "draws": drawing}.get(feature, usual)


def failing(kind):
    class Failing(kind):
        def step(self, closure=None):
            FAULT.at("step")
            torch.empty(2**20, dtype=torch.uint8)  # what a step takes for its own length
            super().step(closure)
            FAULT.at("written")

    return Failing


class AtNorm(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket in (torch.ops.aten._foreach_norm, torch.ops.aten.linalg_vector_norm):
            FAULT.at("clip")
        return operator(*args, **(kwargs or {}))


class Scaler(torch.amp.GradScaler):
    """Grows with every update, so that its state shows each of them."""

    newest = None

    def __init__(self, device):
        super().__init__(device, init_scale=2.0**12, growth_interval=1)
        Scaler.newest = self

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        FAULT.at("unscale")

    def update(self, new_scale=None):
        super().update(new_scale)
        FAULT.at("update")


@pytest.fixture(autouse=True)
def scaler(monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", Scaler)
    monkeypatch.setattr(Scaler, "newest", None)


class Training:
    """A model with a feature, and what trains it; `clips` follows from the feature or the phase."""

    def __init__(self, feature, precision, place=""):
        self.feature, self.precision, self.place = feature, precision, place
        self.clips = feature == "clipping" or self.place in ("clip", "unscale")
        self.model, self.loss = Net(feature), loss_of(feature)
        adam, sgd = failing(torch.optim.Adam), failing(torch.optim.SGD)
        if feature == "two optimizers":
            self.optimizers = [adam(self.model.body.parameters(), 0.1), sgd(self.model.head.parameters(), 0.1, 0.9)]
        else:
            self.optimizers = [adam(self.model.parameters(), 0.1)]
        if feature == "clipping":  # an optimizer that has stepped before, as after a resume
            self.model(torch.ones(1, 4)).sum().backward()
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()
        self.scaler = None

    def runner(self, micro_batch=MICRO_BATCH, **options):
        options = {"clip_grad_norm": 0.5 if self.clips else None, "device": "cpu"} | options
        if self.place == "transfer":
            options["split"] = autoaccum.ListOfSamples(self.collate)
        if self.feature == "window loss":
            options["loss_scope"] = "window"
        if self.feature == "draws":
            options["loss_reduction"] = "mean"
        optimizer = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        plan = autoaccum.plan(SAMPLES, micro_batch)
        runner = autoaccum.Runner(self.model, optimizer, plan, loss=self.loss, precision=self.precision, **options)
        self.scaler = Scaler.newest
        seed()
        return runner

    def collate(self, samples):
        FAULT.at("transfer")
        return tuple(torch.stack(values) for values in zip(*samples, strict=True))

    def window(self, number):
        """Samples that differ; pairs weigh 2 in the first window, then 1 and 3 in turns."""
        chance = torch.Generator().manual_seed(number)
        inputs, labels = torch.randn(SAMPLES, 4, generator=chance), torch.randint(0, 3, (SAMPLES,), generator=chance)
        weights = 2 + (number > 0) * torch.tensor([1, -1]).repeat(SAMPLES // 2)
        return inputs, torch.stack([labels, weights], 1) if self.feature == "pair" else labels

    def step(self, runner, number):
        window = self.window(number)
        with AtNorm() if self.place == "clip" else contextlib.nullcontext():
            return runner.step(list(zip(*window, strict=True)) if self.place == "transfer" else window)

    def arm(self, place, times, window, error=None):
        if times[0] < 0:
            undisturbed = type(self)(self.feature, self.precision, self.place)
            runner = undisturbed.runner()
            FAULT.arm(place)
            undisturbed.step(runner, window)
            times = [FAULT.passed + time for time in times]
            seed()
        FAULT.arm(place, times, error)

    def state(self):
        held = {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return state_of(self.model, SimpleNamespace(state=held, param_groups=groups), self.scaler)


def seed():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002


class ByHand(Training):
    """The same training as a loop that nobody helps, over micro-batches of given sizes."""

    def run(self, cuts):
        self.scaler = Scaler("cpu") if self.precision == "fp16" else None
        seed()
        return [self.update(self.window(number), sizes) for number, sizes in enumerate(cuts)]

    def update(self, window, sizes):
        pieces = list(zip(*(half.split(sizes) for half in window), strict=True))
        backward = torch.Tensor.backward if self.scaler is None else lambda loss: self.scaler.scale(loss).backward()
        if self.feature == "window loss" and len(sizes) > 1:
            loss = self.backward_of_all(pieces, window[1], backward)
        else:
            loss = sum(self.backward_of_one(*piece, backward) for piece in pieces)
        if self.clips and self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5).item() if self.clips else None
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
            optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.update()
        return loss, norm

    def forward(self, inputs):
        with self.autocast():
            return self.model(inputs)

    def autocast(self):
        dtype = PRECISIONS[self.precision]
        return torch.autocast("cpu", dtype, enabled=dtype is not None)

    def backward_of_one(self, inputs, targets, backward):
        with self.autocast():
            loss = self.loss(self.model(inputs), targets)
        loss = loss[0] / (2 * SAMPLES) if self.feature == "pair" else loss * (len(inputs) / SAMPLES)
        backward(loss)
        return loss.item()

    def backward_of_all(self, pieces, targets, backward):
        states, outputs = [], []
        for inputs, _ in pieces:
            states.append(torch.get_rng_state())
            with torch.no_grad():
                outputs.append(self.forward(inputs))
        joined = torch.cat(outputs).requires_grad_()
        with self.autocast():
            loss = self.loss(joined, targets)
        backward(loss)
        after = torch.get_rng_state()
        for (inputs, _), state, share in zip(pieces, states, joined.grad.split([len(o) for o in outputs]), strict=True):
            torch.set_rng_state(state)
            self.forward(inputs).backward(share)
        torch.set_rng_state(after)
        return loss.item()


def assert_as_by_hand(training, reports):
    FAULT.arm()
    assert all(sum(report.micro_batches) == SAMPLES for report in reports)
    hand = ByHand(training.feature, training.precision, training.place)
    losses, norms = zip(*hand.run([report.micro_batches for report in reports]), strict=True)
    assert differences(training.state(), hand.state()) == []
    assert [report.loss for report in reports] == pytest.approx(losses, rel=1e-6)
    assert [report.grad_norm for report in reports] == list(norms)


@pytest.mark.parametrize(("phase", "feature", "precision", "_"), OF_MEMORY)
def test_memory_that_runs_out_changes_the_sizes_of_micro_batches_alone(phase, feature, precision, _):
    place, times, failing_window = PHASES[phase]
    training = Training(feature, precision, place)
    runner = training.runner()
    reports = [training.step(runner, number) for number in range(failing_window)]
    training.arm(place, times, failing_window)

    reports += [training.step(runner, number) for number in range(failing_window, WINDOWS)]

    assert FAULT.hits == reports[failing_window].oom_events == len(times)
    assert_as_by_hand(training, reports)


@pytest.mark.parametrize(("phase", "feature", "precision", "kind"), SOME_CASES)
def test_another_error_is_raised_and_leaves_everything_as_before(phase, feature, precision, kind):
    (place, times, failing_window), error = PHASES[phase], kind("mine")
    training = Training(feature, precision, place)
    runner = training.runner()
    reports = [training.step(runner, number) for number in range(failing_window)]
    before = training.state()
    training.arm(place, times, failing_window, error)

    with pytest.raises(kind) as caught:
        training.step(runner, failing_window)

    assert caught.value is error
    assert differences(training.state(), before) == []
    FAULT.arm()
    reports += [training.step(runner, number) for number in range(failing_window, WINDOWS)]
    assert_as_by_hand(training, reports)


@pytest.mark.parametrize(("feature", "precision"), BY_TURNS)
def test_memory_that_is_missing_for_a_later_step_is_seen_before_it_begins(feature, precision):
    hoard, phases = [], []

    class Release(autoaccum.Callback):
        def on_oom(self, event, *, step):
            phases.append(event.phase)
            hoard.clear()

    def take(*_):
        if not phases and not hoard:
            hoard.append(torch.empty(7 * 2**19, dtype=torch.uint8))

    training = Training(feature, precision)
    runner = training.runner(device=autoaccum.Simulated("4MiB"), callbacks=[Release()])
    reports = [training.step(runner, number) for number in range(2)]
    training.model.register_forward_hook(take)

    reports += [training.step(runner, number) for number in range(2, WINDOWS)]

    assert phases == ["reserve"]
    assert_as_by_hand(training, reports)


@pytest.mark.parametrize(("feature", "precision"), BY_TURNS)
def test_state_and_losses_are_those_of_a_runner_that_began_with_the_smaller_size(feature, precision):
    training, other = Training(feature, precision), Training(feature, precision)
    runner = training.runner()
    training.arm("forward", [-8 if feature == "window loss" else -4], 0)
    reports = [training.step(runner, number) for number in range(WINDOWS)]
    FAULT.arm()

    smaller = other.runner(max(reports[0].micro_batches))
    expected = [other.step(smaller, number) for number in range(WINDOWS)]

    assert [report.oom_events for report in reports] == [1] + [0] * (WINDOWS - 1)
    assert differences(training.state(), other.state()) == []
    for name in ("micro_batches", "loss", "losses", "grad_norm", "skipped"):
        assert [getattr(report, name) for report in reports] == [getattr(report, name) for report in expected]


@pytest.mark.parametrize(
    ("feature", "precision", "kind"),
    [(*case, [torch.OutOfMemoryError, ValueError, KeyboardInterrupt][row // 3]) for row, case in enumerate(BY_TURNS)],
)
def test_a_later_step_that_fails_after_it_wrote_is_told_as_damage(feature, precision, kind):
    training, error = Training(feature, precision), kind("CUDA out of memory.")
    runner = training.runner()
    training.step(runner, 0)
    training.arm("written", [0], 1, error)

    with pytest.raises(autoaccum.StateDamagedError) as caught:
        training.step(runner, 1)

    assert caught.value.__cause__ is error
    assert FAULT.hits == 1
