"""The scripts in examples/, each at a size for a test: they run, and do what they are about."""

import copy
import math
import sys
from types import ModuleType

import pytest
import torch

import autoaccum
from support.processes.folders import ROOT
from support.training.calls import call_of, loaded

EXAMPLES = ROOT / "examples"


def train_of(name):
    return loaded(EXAMPLES / f"{name}.py").train


def call(name, **sizes):
    """Return the arguments with which an example trains, with the same random numbers every time."""
    torch.manual_seed(0)
    return call_of(train_of(name), **sizes)


def run(arguments, **changes):
    return autoaccum.fit(**arguments | {"device": "cpu", "progress": False} | changes)


def keep(made, make):
    def keeping(*arguments):
        made.append(make(*arguments))
        return made[-1]

    return keeping


def test_every_example_is_tested_here():
    names = {path.stem for path in EXAMPLES.glob("*.py")}

    own = {"digits", "resnet101", "fixed_micro_batch", "mean_and_sum", "two_losses", "half_precision", "preferences"}
    assert names == own | {"ray_train"}  # in Ray itself: tests/across/test_ranks_ray.py


@pytest.mark.slow  # a hundred layers
def test_resnet_101_steps_its_last_window_too():
    result = run(call("resnet101", images=6, side=32, target_batch=4), micro_batch=2)

    assert [(report.samples, report.micro_batches) for report in result.history] == [(4, (2, 2)), (2, (2,))]


def test_fixed_micro_batch_makes_each_step_from_four_times_256():
    result = run(call("fixed_micro_batch"))

    assert [report.micro_batches for report in result.history] == [(256,) * 4] * 5


def test_mean_and_sum_train_alike_with_a_mean_and_with_a_sum():
    mean, summed = call("mean_and_sum"), call("mean_and_sum", reduction="sum", lr=0.1 / 128)

    run(mean)
    result = run(summed)

    assert result.plan.micro_batches == (32,) * 4
    for one, other in zip(mean["model"].parameters(), summed["model"].parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_preferences_are_learnt_from_log_probabilities_in_chunks():
    made = call("preferences", samples=16, target_batch=8, vocabulary=50, length=12)
    reference = copy.deepcopy(made["model"].reference)

    result = run(made, micro_batch=3, epochs=4)

    losses = [report.loss for report in result.history]
    assert losses[0] == pytest.approx(math.log(2))
    assert losses[-1] < losses[0]
    for one, other in zip(made["model"].reference.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other)


def test_two_losses_are_added_and_the_learning_rate_is_scaled():
    given, optimizers = call("two_losses"), []

    result = run(given, optimizer=keep(optimizers, given["optimizer"]))

    assert [group["lr"] for group in optimizers[0].param_groups] == [pytest.approx(8 * 0.001)]
    for report in result.history:
        assert len(report.losses) == 2
        assert report.loss == pytest.approx(sum(report.losses.values()))


def test_half_precision_computes_in_fp16_and_steps_its_last_window_too():
    given, outputs = call("half_precision"), []
    before = [parameter.clone() for parameter in given["model"].parameters()]

    result = run(given, micro_batch=16, forward=keep(outputs, given["forward"]))

    # Of a few samples gradients are compared, in float64.
    assert {output.dtype for output in outputs if output.requires_grad and len(output) > 4} == {torch.float16}
    assert [report.samples for report in result.history] == [32, 32, 16]
    assert not any(report.skipped for report in result.history)
    assert all(not torch.equal(old, new) for old, new in zip(before, given["model"].parameters(), strict=True))


@pytest.mark.slow  # it trains until it can read
def test_the_demo_learns_to_read_digits_that_it_was_not_trained_on():
    digits = loaded(EXAMPLES / "digits.py")

    result = run(call_of(digits.train, memory_limit=None, side=32), micro_batch=50)

    assert result.evaluations[-1].metrics["accuracy"] >= 0.9
    assert "so each batch of 100 ran as 50+50." in digits.outcome(result, "280MiB")
    assert result.history[-1].loss < result.history[0].loss / 4


@pytest.mark.parametrize(
    ("name", "sizes", "target"),
    [
        ("fixed_micro_batch", {"micro_batch": 8, "windows": 1}, 32),
        ("mean_and_sum", {"target_batch": 16, "windows": 1}, 16),
        ("mean_and_sum", {"target_batch": 16, "windows": 1, "reduction": "sum", "lr": 0.1 / 16}, 16),
        ("two_losses", {}, None),
        ("half_precision", {}, None),
        pytest.param("digits", {"memory_limit": None}, None, marks=pytest.mark.sweep),
        pytest.param("resnet101", {"images": 4, "side": 32, "target_batch": 4}, 4, marks=pytest.mark.sweep),
    ],
)
def test_example_is_right_however_its_batch_is_split(name, sizes, target):
    def train(micro_batch, accum_steps):
        run(call(name, **sizes), micro_batch=micro_batch, max_steps=1)

    target = target or call(name, **sizes)["target_batch"]
    if name == "resnet101":  # whose hundred layers make rounding of float32 larger than verify allows
        torch.set_default_dtype(torch.float64)
    try:
        found = autoaccum.verify(train, target, micro_batch=16 if target > 32 else None)
    finally:
        torch.set_default_dtype(torch.float32)

    assert found, str(found)


class Storage:
    """What `ray.train.report` writes to; not there for the first report."""

    def __init__(self):
        self.rows, self.is_there = [], False

    def report(self, row):
        if not self.is_there:
            self.is_there = True
            raise OSError("no storage")
        self.rows.append(row)


@pytest.fixture
def storage(monkeypatch):
    """Names of Ray's that the example needs in one process; it may not be installed."""
    storage, ray, train, torchs = Storage(), ModuleType("ray"), ModuleType("ray.train"), ModuleType("ray.train.torch")
    ray.train, train.torch, train.report, torchs.get_device = train, torchs, storage.report, lambda: "cpu"
    for module in (ray, train, torchs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return storage


def test_ray_train_reports_each_epoch_also_first_of_all_after_a_resume(storage, tmp_path):
    config = {"width": 4, "epochs": 2, "target_batch": 500, "folder": str(tmp_path)}

    with pytest.raises(OSError, match="no storage"):
        train_of("ray_train")(config, progress=False)
    train_of("ray_train")(config, progress=False)

    assert [(sorted(row), row["epoch"]) for row in storage.rows] == [(["epoch"], 1), (["epoch", "loss", "step"], 2)]


@pytest.mark.usefixtures("storage")
def test_ray_train_passes_only_arguments_that_fit_has():
    given = call_of(train_of("ray_train"), config={"width": 4, "epochs": 2, "target_batch": 500, "folder": "runs"})

    assert given["checkpoint"] == "runs"
