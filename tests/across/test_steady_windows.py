"""A steady window launches what a loop by hand launches, and the copies of the savepoint; it waits for nothing."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import autoaccum
from support.faults.places import Fault
from support.models.small import runner_of

SAMPLES, MICRO_BATCH = 12, 4
WINDOWS = 6  # the sixth is neither the first nor a power of two


class Launched(TorchDispatchMode):
    """Counts operators, by name, but for views, which compute nothing."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if not operator.is_view:
            self.names[operator.overloadpacket.__name__] += 1
        return operator(*args, **kwargs or {})


def by_hand(model, optimizer, loss, inputs, targets, clip, precision):
    optimizer.zero_grad()
    for part in zip(inputs.split(MICRO_BATCH), targets.split(MICRO_BATCH), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            value = loss(model(part[0]), part[1])
        (value / (SAMPLES / MICRO_BATCH)).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def data():
    return torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,))


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def normalised():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def launched(step):
    for _ in range(WINDOWS - 1):
        step(data())
    given = data()
    with Launched() as launched:
        step(given)
    return launched.names


def launched_by_hand(model, clip, precision):
    optimizer, loss = torch.optim.AdamW(model.parameters(), foreach=False), nn.CrossEntropyLoss()
    return launched(lambda batch: by_hand(model, optimizer, loss, *batch, clip, precision))


def launched_by_runner(model, clip, precision):
    optimizer, options = torch.optim.AdamW(model.parameters(), foreach=False), {"clip_grad_norm": clip}
    return launched(runner_of(model, optimizer, SAMPLES, MICRO_BATCH, precision=precision, **options).step)


def launched_by_accumulator(model, clip, precision):
    optimizer, loss = torch.optim.AdamW(model.parameters(), foreach=False), nn.CrossEntropyLoss()
    accumulator = autoaccum.Accumulator(model, loss=loss, micro_batch=MICRO_BATCH, device="cpu", precision=precision)

    def step(batch):
        optimizer.zero_grad()
        accumulator.backward(batch)
        optimizer.step()

    return launched(step)


@pytest.mark.parametrize("model", [plain, normalised])
@pytest.mark.parametrize(
    ("train", "clip", "precision"),
    [
        (launched_by_runner, None, "fp32"),
        (launched_by_runner, 1.0, "bf16"),
        (launched_by_accumulator, None, "fp32"),
        (launched_by_accumulator, None, "bf16"),
    ],
)
def test_operators_are_those_of_a_loop_by_hand_and_the_savepoints_copies(model, train, clip, precision):
    torch.manual_seed(0)
    one = model()
    expected = launched_by_hand(copy.deepcopy(one), clip, precision)

    found = train(one, clip, precision)

    # Of each type of small buffer one: the statistics, and the counter.
    copies = Counter(cat=2) if model is normalised else Counter()
    further = found - expected - copies
    # Both multiply each loss once: by 1 / 3, or by its share of the window.
    assert found["mul"] - expected["mul"] == expected["div"] - found["div"]
    assert [name for name in further if name not in ("mul", "_unsafe_view")] == []
    assert "_local_scalar_dense" not in found - expected  # by which `item()` waits for a device


class TwoParts(nn.Module):
    """A body and a head, which can be replaced."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.fails = nn.Linear(6, 8), nn.Linear(8, 3), Fault()

    def forward(self, inputs):
        self.fails()
        return self.head(torch.tanh(self.body(inputs)))


def batch_of(samples):
    return torch.randn(samples, 6).double(), torch.randint(0, 3, (samples,))


def trained_alike(batches, *, before=lambda number, model, loss: None, make=TwoParts, optimizer=torch.optim.SGD):
    """Train by a runner and by hand, over the same batches; return the runner's model and the other."""
    model = make().double()
    by_hand, losses = copy.deepcopy(model), (nn.CrossEntropyLoss(), nn.CrossEntropyLoss())
    own, other = (optimizer(one.parameters(), lr=0.05) for one in (model, by_hand))
    runner = runner_of(model, own, SAMPLES, MICRO_BATCH, loss=losses[0])
    for number, (inputs, targets) in enumerate(batches, 1):
        before(number, model, losses[0])
        before(number, by_hand, losses[1])
        kind = list if number % 2 and type(batches[0]) is list else tuple
        report = runner.step(kind((inputs.clone(), targets)))
        other.zero_grad()
        value = losses[1](by_hand(inputs), targets)
        value.backward()
        other.step()
        assert report.loss == pytest.approx(value.item(), rel=1e-12)
        for mine, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)
    return model, by_hand


def test_batches_of_two_sizes_take_turns():
    trained_alike([batch_of(8 if number in {6, 9} else SAMPLES) for number in range(12)])


class WritesItsInput(TwoParts):
    """Changes its input in place, so that micro-batches are copies."""

    def forward(self, inputs):
        return super().forward(inputs.mul_(0.5))


def test_batches_of_two_sizes_take_turns_as_copies():
    model, loss = WritesItsInput().double(), nn.CrossEntropyLoss()
    runner = runner_of(model, torch.optim.SGD(model.parameters(), 0.0), SAMPLES, MICRO_BATCH, loss=loss)
    for number in range(12):
        inputs, targets = batch_of(8 if number == 5 else SAMPLES)
        report = runner.step((inputs.clone(), targets))
        assert report.loss == pytest.approx(loss(model(inputs.clone()), targets).item(), rel=1e-12)
        assert sum(report.micro_batches) == len(inputs)


def test_two_sizes_take_turns_with_and_without_earlier_gradients():
    model, loss = TwoParts().double(), nn.CrossEntropyLoss()
    by_hand = copy.deepcopy(model)
    accumulator = autoaccum.Accumulator(model, loss=loss, micro_batch=MICRO_BATCH, device="cpu")
    for number in range(12):
        for samples in (12, 8, 12) if number > 2 else (12, 12, 8):
            inputs, targets = batch_of(samples)
            accumulator.backward((inputs, targets))
            loss(by_hand(inputs), targets).backward()
        for mine, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-13)
        model.zero_grad()
        by_hand.zero_grad()


@pytest.mark.parametrize(
    "settings", [{}, {"ignore_index": 1}, {"weight": torch.tensor([1.0, 2.0, 0.5]).double()}, {"label_smoothing": 0.1}]
)
def test_targets_that_do_not_count_appear_in_some_steady_windows(settings):
    def before(number, _model, loss):
        vars(loss).update({name: value for name, value in settings.items() if name != "weight"})
        if number == 1:
            loss.weight = settings.get("weight")

    batches = [batch_of(SAMPLES) for _ in range(24)]
    for number in range(8, 24, 3):
        batches[number][1][: number % SAMPLES] = -100 if "ignore_index" not in settings else 1
    trained_alike(batches, before=before)


def test_outputs_are_kept_for_batches_of_every_structure():
    model = plain()
    accumulator = autoaccum.Accumulator(model, loss=nn.CrossEntropyLoss(), micro_batch=MICRO_BATCH, device="cpu")
    for number in range(15):
        batch = data() if number % 2 else list(data())
        report = accumulator.backward(batch, keep="outputs" if number > 8 else None)
        assert sum(map(len, report.outputs)) == (SAMPLES if number > 8 else 0)
        model.zero_grad()


@pytest.mark.parametrize("error", [None, ValueError("own")])
def test_a_buffer_registered_between_windows_survives_a_failure(error):
    model = TwoParts()
    runner = runner_of(model, torch.optim.SGD(model.parameters(), 0.1), SAMPLES, MICRO_BATCH)
    for _ in range(WINDOWS - 1):
        runner.step(data())
    model.register_buffer("average", torch.ones(3))
    model.fails.arm(1, error=error)
    if error:
        with pytest.raises(ValueError, match="own") as raised:
            runner.step(data())
        assert not any("had written" in note for note in raised.value.__notes__)
    else:
        assert runner.step(data()).oom_events == 1
    assert torch.equal(model.average, torch.ones(3))


def test_a_head_that_is_replaced_gets_its_gradients():
    model, loss = TwoParts().double(), nn.CrossEntropyLoss()
    model.body.requires_grad_(False)
    accumulator = autoaccum.Accumulator(model, loss=loss, micro_batch=MICRO_BATCH, device="cpu")
    for number in range(WINDOWS):
        if number == WINDOWS - 1:
            model.head = nn.Linear(8, 3).double()
        for _ in range(2):
            accumulator.backward(batch_of(SAMPLES))
        assert model.head.weight.grad is not None
        model.zero_grad()


def test_a_failure_after_a_head_is_replaced_loses_no_gradient_of_the_batches_before_it():
    model = TwoParts().double()
    accumulator = autoaccum.Accumulator(model, loss=nn.CrossEntropyLoss(), micro_batch=MICRO_BATCH, device="cpu")
    for _ in range(WINDOWS):
        for _ in range(2):
            accumulator.backward(batch_of(SAMPLES))
        model.zero_grad()
    model.head, batches = nn.Linear(8, 3).double(), [batch_of(SAMPLES), batch_of(SAMPLES)]
    accumulator.backward(batches[0])
    model.fails.arm(1)
    accumulator.backward(batches[1])
    found = [parameter.grad.clone() for parameter in model.parameters()]

    model.zero_grad()
    for inputs, targets in batches:
        functional.cross_entropy(model(inputs), targets).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()], rtol=1e-10, atol=1e-12)


def test_a_steady_window_without_gradients_says_why():
    model = plain()
    accumulator = autoaccum.Accumulator(model, loss=nn.CrossEntropyLoss(), micro_batch=MICRO_BATCH, device="cpu")
    for _ in range(WINDOWS - 1):
        accumulator.backward(data())
        model.zero_grad()
    with torch.no_grad(), pytest.raises(autoaccum.InvalidInputError, match=r"look for .*torch.no_grad\(\)"):
        accumulator.backward(data())


class WritesThroughData(torch.optim.Optimizer):
    """An optimizer of the old style, which moves no version counters; lacks memory in the middle of a step."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.lacks = False

    def step(self):
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if self.lacks and number == 2:
                self.lacks = False
                raise torch.OutOfMemoryError("CUDA out of memory")
            parameter.data.add_(parameter.grad, alpha=-0.1)


def runner_with(optimizer):
    model = TwoParts().double()
    made = optimizer(model.parameters(), lr=0.1)
    options = {"loss": nn.CrossEntropyLoss(), "device": "cpu"}
    return autoaccum.Runner(model, made, autoaccum.plan(SAMPLES, MICRO_BATCH), **options), made


def test_an_optimizer_that_writes_unseen_and_fails_is_damage():
    runner, optimizer = runner_with(WritesThroughData)
    for _ in range(WINDOWS):
        runner.step(batch_of(SAMPLES))
    optimizer.lacks = True
    with pytest.raises(autoaccum.StateDamagedError, match="part old, part new"):
        runner.step(batch_of(SAMPLES))


def test_a_number_that_becomes_a_pair_is_refused():
    is_pair = False

    def loss(outputs, targets):
        each = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return (each.sum(), torch.tensor(float(len(each)))) if is_pair else each.sum() / (targets >= 0).sum()

    model = plain()
    options = {"loss": loss, "device": "cpu"}
    runner = autoaccum.Runner(
        model, torch.optim.SGD(model.parameters(), 0.1), autoaccum.plan(SAMPLES, MICRO_BATCH), **options
    )
    inputs, targets = data()
    for _ in range(WINDOWS):
        runner.step((inputs, targets.index_fill(0, torch.tensor([1]), -100)))
    is_pair = True
    with pytest.raises(autoaccum.InvalidInputError, match="was a number in earlier windows"):
        runner.step((inputs, targets))


class OfWideTexts(nn.Module):
    """Has no memory for more than `most` texts of nine tokens."""

    def __init__(self):
        super().__init__()
        self.embedded, self.last, self.most = nn.Embedding(50, 4), nn.Linear(4, 1), 100

    def forward(self, tokens):
        if tokens.shape[1] == 9 and len(tokens) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory: for this test")
        return self.last(self.embedded(tokens).mean(1)).squeeze(1)


def test_steady_window_of_another_width_than_the_first_gets_smaller_when_memory_runs_out():
    model = OfWideTexts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = autoaccum.Simulated("1GiB")
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(16, 8), loss=nn.MSELoss(), device=device)
    narrow, wide = [(torch.randint(50, (16, tokens)), torch.randn(16)) for tokens in (5, 9)]
    for _ in range(12):
        runner.step(narrow)
        runner.step(wide)

    model.most = 4

    assert runner.step(wide).micro_batches == (4, 4, 4, 4)
