"""Records check what users write into them, and wait for the device only when they are read."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch

import autoaccum
from autoaccum._arguments import check_positive_int
from autoaccum._records import DeviceScalar, Plan
from autoaccum.errors import InvalidInputError
from record_examples import EVALUATION, OOM, PLAN, PROBE, TRIALS, CountingScalar, fit_result, step_report


@pytest.mark.parametrize("value", [2, 2.0, torch.tensor(2.0), np.float64(2.0)], ids=["int", "float", "tensor", "numpy"])
def test_scalar_is_read_as_a_float(value):
    assert repr(DeviceScalar(value).read()) == "2.0"


class Waiting:
    """What a tensor on a device is to a scalar."""

    waits = 0

    def __float__(self):
        self.waits += 1
        return 0.5


def test_device_is_waited_for_once_and_only_when_read():
    value = Waiting()
    scalar = DeviceScalar(value)
    assert repr(scalar) == "<on the device>"
    assert value.waits == 0

    values = [scalar.read(), scalar.read()]

    assert values == [0.5, 0.5]
    assert value.waits == 1
    assert repr(scalar) == "0.5"


def test_report_waits_for_nothing_until_its_loss_is_read():
    loss, norm = CountingScalar(1.0), CountingScalar(2.0)
    report = step_report(loss=loss, device_grad_norm=norm)
    repr(report)
    assert (loss.reads, norm.reads) == (0, 0)

    read = (report.loss, report.grad_norm)

    assert read == (1.0, 2.0)


def test_losses_are_reported_by_name_and_added():
    report = step_report(device_losses={"tokens": DeviceScalar(1.0), "energy": DeviceScalar(0.5)})

    assert report.loss == 1.5
    assert dict(report.losses) == {"tokens": 1.0, "energy": 0.5}


def test_norm_that_was_not_asked_for_is_none():
    assert step_report().grad_norm is None


@pytest.mark.parametrize("record", [PLAN, TRIALS[0], PROBE, OOM, EVALUATION, step_report(), fit_result()], ids=repr)
def test_records_cannot_be_changed(record):
    name = dataclasses.fields(record)[0].name

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, None)


def test_plan_tells_its_largest_cut_and_its_length():
    plan = Plan(100, (34, 33, 33))

    assert (plan.micro_batch, plan.accum_steps) == (34, 3)


def test_plan_from_a_list_is_equal_to_one_from_a_tuple():
    assert Plan(3, [2, 1]) == Plan(3, (2, 1))
    assert hash(Plan(3, [2, 1])) == hash(Plan(3, (2, 1)))


@pytest.mark.parametrize(
    ("target", "sizes", "text"),
    [
        (100, (50, 49), r"sum to 99, but target_batch=100; autoaccum\.plan\(100"),
        (100, (), "sum to 0, but target_batch=100"),
        (100, (100, 0), "each of micro_batches must be at least 1, got 0"),
        (100, (101, -1), "at least 1, got -1"),
        (100, (50.0, 50.0), "whole number, got 50.0"),
        (2, (True, True), "whole number, got True"),
        (0, (), "target_batch must be at least 1, got 0"),
        (100, 100, "micro_batches=100"),
        (100, None, "micro_batches=None"),
    ],
)
def test_plan_that_cannot_be_followed_is_refused_with_its_numbers(target, sizes, text):
    with pytest.raises(InvalidInputError, match=text):
        Plan(target, sizes)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, False, "1", None, float("nan")])
def test_number_of_samples_is_a_positive_int_and_nothing_else(value):
    with pytest.raises(InvalidInputError, match=rf"n must be .*{value}"):
        check_positive_int("n", value)


@pytest.mark.parametrize("loss", [0.25, float("nan"), torch.tensor(0.25)])
def test_pickled_result_equals_the_first(loss):
    result = fit_result((step_report(1, loss=loss), step_report(2, device_grad_norm=DeviceScalar(2.0))))

    assert pickle.loads(pickle.dumps(result)) == result  # noqa: S301 - made here


def test_results_with_other_losses_differ():
    assert fit_result((step_report(1, loss=0.25),)) != fit_result((step_report(1, loss=0.5),))
    assert DeviceScalar(0.25) != 0.25


def test_result_prints_as_a_dozen_lines():
    torch.manual_seed(0)
    batches = [(torch.randn(4, 3), torch.randint(0, 2, (4,))) for _ in range(30)]
    result = autoaccum.fit(
        torch.nn.Linear(3, 2),
        batches,
        4,
        micro_batch=2,
        device="cpu",
        progress=False,
        val_loader=batches[:1],
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()},
    )

    lines = str(result).splitlines()

    assert lines[0].startswith("30 updates of 120 samples in ")
    assert any(line.startswith("last of 1 evaluations: loss ") and "accuracy" in line for line in lines)
    assert "micro-batches: 2 of at most 2 samples" in lines
    assert 4 <= len(lines) <= 12
