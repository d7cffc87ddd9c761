"""What the numbers of a batch do to its loss is found by making them smaller, and said once."""

import numpy as np
import pytest
import torch
from autoaccum._loss.batch_numbers import DifferingNumbers
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._data.batches import Window
from autoaccum._system.notices import Notices
from helpers import CPU

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def batch(**numbers):
    return {"input": X, "labels": Y, **numbers}


def said(loss, given, steps=1):
    notices = Notices(silent=True)
    runner = autoaccum.Runner(nn.Linear(4, 3), None, autoaccum.plan(8, 4), loss=loss, device=CPU, notices=notices)
    for _ in range(steps):
        runner.step(given)
    return [text for text in notices.texts if "divided by" in text]


def total(outputs, batch):
    return functional.cross_entropy(outputs, batch["labels"], reduction="sum")


@pytest.mark.parametrize("number", [7, 8, 2, 7.5, torch.tensor(7), torch.tensor(0.3), np.int64(29)], ids=str)
def test_divisor_is_found_whatever_kind_of_number_it_is(number):
    (text,) = said(lambda outputs, batch: total(outputs, batch) / batch["n_items"], batch(n_items=number))

    assert "divided by 'n_items', which each of the loader's batches carries" in text


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_divisor_is_found_whatever_the_number(kind):
    """Half of 27, as 27 / (27 / 13), is a little less than 13."""

    def found(number):
        loss = said(lambda outputs, batch: total(outputs, batch) / batch["n_items"], batch(n_items=kind(number)))
        return len(loss) == 1

    assert [number for number in range(2, 40) if not found(number)] == []


def test_number_is_never_made_larger_since_it_may_be_an_index():
    seen = []

    def of_task(outputs, batch):
        seen.append(batch["task_number"])
        return total(outputs, batch) * torch.arange(4)[batch["task_number"]]

    assert said(of_task, batch(task_number=3)) == []
    assert set(seen) == {1, 3}


def test_loss_that_fails_with_another_number_is_not_divided_by_it():
    def checked(outputs, batch):
        assert batch["n_classes"] == outputs.shape[1]
        return total(outputs, batch)

    assert said(checked, batch(n_classes=3)) == []


def test_number_that_changes_the_loss_otherwise_does_not_divide_it():
    assert said(lambda outputs, batch: total(outputs, batch) / batch["n_items"] ** 2, batch(n_items=8)) == []
    assert said(lambda outputs, batch: total(outputs, batch) * batch["n_items"], batch(n_items=8)) == []


def test_mean_is_not_asked_for_a_divisor():
    def mean(outputs, batch):
        return functional.cross_entropy(outputs, batch["labels"]) / batch["n_items"]

    assert said(mean, batch(n_items=8)) == []


def test_each_number_that_differs_is_said_once():
    notices = Notices(silent=True)
    numbers = DifferingNumbers(notices)

    for other in (1.0, 2.0, 3.0):
        numbers.look(Window([batch(beta=1.0, step=5), batch(beta=other, step=5)]), set())

    (text,) = notices.texts
    assert text.startswith("'beta' differs between the loader's batches of a window (1 and 2)")
    assert numbers.may_differ  # the other number


def test_batches_without_numbers_are_not_looked_at_again():
    numbers = DifferingNumbers(Notices(silent=True))

    numbers.look(Window([batch(), batch()]), set())

    assert not numbers.may_differ


def test_samples_of_a_list_are_no_numbers_of_a_batch():
    notices = Notices(silent=True)
    split = autoaccum.ListOfSamples(torch.utils.data.default_collate)
    samples = [[{"x": row, "label": number} for number, row in enumerate(X)] for _ in range(2)]

    DifferingNumbers(notices).look(Window([samples[0], samples[1][::-1]], split), set())

    assert notices.texts == ()
