"""Models, optimizers and flags that change between two windows: the next window is of what there is then."""

import copy
import importlib

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.errors import InvalidInputError
from support.faults.modes import FailAt
from support.models.small import assert_bitwise, classifier, labelled, runner_of

SAMPLES = 12


class Scores(nn.Module):
    """A classifier whose parts can be exchanged; without dropout, so that every cut has the same gradient."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, features):
        return self.head(self.body(features))


def append(model, optimizer):
    torch.manual_seed(5)
    model.body.append(nn.Linear(8, 8).double())
    optimizer.add_param_group({"params": list(model.body[-1].parameters())})


def append_without_the_optimizer(model, optimizer):
    torch.manual_seed(5)
    model.body.append(nn.Linear(8, 8).double())


def append_statistics(model, optimizer):
    torch.manual_seed(5)
    model.body.append(nn.BatchNorm1d(8).double())
    optimizer.add_param_group({"params": list(model.body[-1].parameters())})


def replace_head(model, optimizer):
    torch.manual_seed(5)
    model.head = nn.Linear(8, 3).double()
    optimizer.param_groups[0]["params"] = list(model.parameters())


def unfreeze(model, optimizer):
    model.body.requires_grad_(requires_grad=True)


def freeze(model, optimizer):
    model.head.requires_grad_(requires_grad=False)


def add_a_scale(model, optimizer):
    """A parameter that no module holds."""
    scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    model.body.register_forward_hook(lambda module, inputs, outputs: outputs * scale)
    optimizer.add_param_group({"params": [scale]})


CHANGES = [append, append_without_the_optimizer, append_statistics, replace_head, unfreeze, freeze, add_a_scale]


def begun(change):
    torch.manual_seed(0)
    model = Scores().double()
    if change is unfreeze:
        model.body.requires_grad_(requires_grad=False)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def windows_of(count):
    torch.manual_seed(1)
    return [labelled(SAMPLES) for _ in range(count)]


def by_hand(change, clip):
    model, optimizer = begun(change)
    for number, (inputs, targets) in enumerate(windows_of(5)):
        if number == 2:
            change(model, optimizer)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        optimizer.step()
        model.zero_grad()
    return model.state_dict()


def by_runner(change, clip=None, *, sizes=(5, 4, 3), late_sizes=None, point=None):
    model, optimizer = begun(change)
    runner = autoaccum.Runner(
        model, optimizer, autoaccum.Plan(SAMPLES, sizes), loss=nn.CrossEntropyLoss(), device="cpu", clip_grad_norm=clip
    )
    counting = FailAt(*([] if point is None else [point]))
    # Up to there, since an optimizer that memory fails half-way says so.
    optimizer.register_step_pre_hook(lambda *_: setattr(counting, "before_step", counting.count))
    for number, window in enumerate(windows_of(5)):
        if number == 2:
            change(model, optimizer)
        runner.plan = autoaccum.Plan(SAMPLES, sizes)
        if number == 3:
            runner.plan = autoaccum.Plan(SAMPLES, late_sizes or sizes)
            with counting:
                counting.cut = runner.step(window).micro_batches
            counting.in_window_3 = counting.before_step
        else:
            runner.step(window)
    assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
    assert all(parameter.grad is None for parameter in model.parameters())
    return model.state_dict(), counting


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("change", CHANGES)
def test_change_between_windows_trains_as_the_loop_written_by_hand(change, clip):
    sizes = (SAMPLES,) if change is append_statistics else (5, 4, 3)
    found, _ = by_runner(change, clip, sizes=sizes)

    torch.testing.assert_close(found, by_hand(change, clip), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("every", [97, pytest.param(11, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("change", [append_statistics, add_a_scale])
def test_what_has_come_is_put_back_where_memory_runs_out(change, every):
    _, counting = by_runner(change, sizes=(6, 6))

    for point in range(2, counting.in_window_3, every):
        found, failing = by_runner(change, sizes=(6, 6), point=point)
        expected, _ = by_runner(change, sizes=(6, 6), late_sizes=failing.cut)
        assert failing.hits == 1
        assert_bitwise(found, expected)


def test_parameters_that_are_left_out_of_the_optimizer_are_named_once(capsys):
    by_runner(append_without_the_optimizer)

    (text,) = (line for line in capsys.readouterr().err.splitlines() if "not in the optimizer" in line)
    assert "2 parameters" in text
    assert "add_param_group" in text


def test_optimizer_that_is_set_makes_the_next_updates():
    def train(take):
        torch.manual_seed(0)
        model = classifier()
        runner = runner_of(model, torch.optim.Adam(model.parameters(), lr=1e-2), SAMPLES, SAMPLES, clip_grad_norm=0.1)
        torch.manual_seed(1)
        runner.step(labelled(SAMPLES))
        take(model, runner)
        for _ in range(2):
            runner.step(labelled(SAMPLES))
        return model, runner

    def set_it(model, runner):
        runner.optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    found, runner = train(set_it)
    torch.manual_seed(0)
    expected = classifier()
    torch.manual_seed(1)
    adam = torch.optim.Adam(expected.parameters(), lr=1e-2)
    sgd = torch.optim.SGD(expected.parameters(), lr=0.5, momentum=0.9)
    for optimizer in (adam, sgd, sgd):
        inputs, targets = labelled(SAMPLES)
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(inputs), targets).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        optimizer.step()

    assert_bitwise(found.state_dict(), expected.state_dict())
    assert isinstance(runner.optimizer, torch.optim.SGD)


def test_optimizer_that_is_set_is_scaled_and_taken_back_like_the_first(monkeypatch):
    torch.manual_seed(0)
    model, window = classifier().float(), [half.float() if half.is_floating_point() else half for half in labelled(8)]
    runner = runner_of(model, samples=8, micro_batch=4, precision="fp16", clip_grad_norm=0.1)
    runner.step(tuple(window))
    runner.optimizer = other = torch.optim.Adam(model.parameters(), lr=0.1)
    fails = [True, False]
    kernels = importlib.import_module("torch.optim.adam")  # torch.optim hides it
    write = kernels.adam

    def failing(*arguments, **named):
        write(*arguments, **named)
        if fails.pop(0):  # within the step, which is not done before its hooks are called
            raise torch.OutOfMemoryError("out of memory (injected)")

    monkeypatch.setattr(kernels, "adam", failing)
    before = copy.deepcopy(model.state_dict())

    report = runner.step(window)

    assert (report.oom_events, report.skipped, fails) == (1, False, [])
    assert {int(state["step"]) for state in other.state.values()} == {1}
    # Adam's first step moves each number by its learning rate; twice would be more.
    moved = max(float((model.state_dict()[name] - before[name]).abs().max()) for name, _ in model.named_parameters())
    assert moved == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("optimizer", None, "runner.optimizer cannot be set to None"),
        ("step", print, "step cannot be set"),
        ("optimizer", torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), "1 of them not the model's"),
        ("plan", 7, "plan=7 is not an autoaccum.Plan"),
        ("model", nn.Linear(2, 2), "runner.model cannot be set"),
        ("clip_grad_norm", 1.0, "only plan and optimizer can"),
    ],
)
def test_what_cannot_be_set_on_a_runner_is_refused_and_nothing_changes(name, value, text):
    model = classifier()
    runner = runner_of(model, samples=SAMPLES, micro_batch=6)
    before = runner.plan, runner.optimizer

    with pytest.raises(InvalidInputError, match=text):
        setattr(runner, name, value)

    assert (runner.plan, runner.optimizer) == before
    assert runner.step(labelled(SAMPLES)).micro_batches == (6, 6)


def test_optimizer_cannot_be_set_within_a_window():
    model = classifier()
    runner = runner_of(model, samples=SAMPLES, micro_batch=6)

    def set_it(*_):
        runner.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    hook = model.register_forward_pre_hook(set_it)
    with pytest.raises(InvalidInputError, match="within a window"):
        runner.step(labelled(SAMPLES))
    hook.remove()
    set_it()

    assert runner.step(labelled(SAMPLES)).step == 1


def test_parameters_that_come_later_have_to_be_finite_in_checkpoints(tmp_path, capsys):
    class Late(nn.Sequential):
        pass

    model, batch = Late(nn.Linear(3, 2)), (torch.randn(6, 3), torch.randint(0, 2, (6,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Adds(autoaccum.Callback):
        def on_step(self, report, **_):
            if report.step == 2:
                model.append(nn.Linear(2, 2))
                optimizer.add_param_group({"params": list(model[1].parameters())})
            if report.step == 4:
                with torch.no_grad():
                    model[1].bias.fill_(float("nan"))

    autoaccum.fit(
        model, [batch] * 5, 6, loss=nn.functional.cross_entropy, optimizer=optimizer, callbacks=[Adds()],
        checkpoint=tmp_path, checkpoint_every=1, progress=False,
    )  # fmt: skip
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003"]
    assert "step 4: no checkpoint is written, since it would hold NaN or infinity (1.bias)" in capsys.readouterr().err


def weighted(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, weight=torch.tensor([0.3, 2.0, 7.0]).double())


def pair(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="sum"), len(targets)


@pytest.mark.parametrize("change", [append, replace_head])
@pytest.mark.parametrize("loss", [weighted, pair])
def test_accumulator_sees_parameters_that_come_between_two_batches(change, loss):
    torch.manual_seed(0)
    model = Scores().double()
    accumulator = autoaccum.Accumulator(model, loss=loss, micro_batch=5, device="cpu", precision="fp32")
    generator = torch.Generator().manual_seed(1)
    for number in range(14):
        if number == 10:
            change(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs, targets = torch.randn(SAMPLES, 4, generator=generator).double(), torch.arange(SAMPLES) % 3
        model.zero_grad()
        value = loss(model(inputs), targets)
        value = value[0] / value[1] if isinstance(value, tuple) else value
        expected = torch.autograd.grad(value, list(model.parameters()))

        accumulator.backward((inputs, targets))

        found = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(found, list(expected), rtol=1e-9, atol=1e-12)
