"""What a function returned for parts of a batch is joined as it would have returned it for the batch."""

from typing import NamedTuple

import pytest
import torch

from autoaccum._data.batches import Window
from autoaccum._loss.batch_counts import LABELS
from autoaccum._loss.objective import Objective
from autoaccum._loss.terms import Form, TermForm
from autoaccum._system.notices import Notices
from autoaccum.integrations._joined_parts import Weights, joined, mean


class Pair(NamedTuple):
    inputs: torch.Tensor
    name: str


SIZES = Weights([2, 1], None, None)


@pytest.mark.parametrize(
    ("values", "whole"),
    [
        ([torch.tensor([1, 2]), torch.tensor([3])], torch.tensor([1, 2, 3])),
        ([torch.tensor(3.0), torch.tensor(6.0)], torch.tensor(4.0)),
        ([3.0, 6.0], 4.0),
        ([["a", "b"], ["c"]], ["a", "b", "c"]),
        ([{"x": torch.zeros(2, 4)}, {"x": torch.ones(1, 4)}], {"x": torch.tensor([[0.0] * 4] * 2 + [[1.0] * 4])}),
        ([(torch.zeros(2), "same"), (torch.zeros(1), "same")], (torch.zeros(3), "same")),
        ([Pair(torch.zeros(2), "n"), Pair(torch.ones(1), "n")], Pair(torch.tensor([0.0, 0.0, 1.0]), "n")),
        ([None, None], None),
        ([3, 3], 3),
        ([2, 1], 3),
        (["one", "other"], ["one", "other"]),
        ([torch.zeros(5), torch.ones(5)], [torch.zeros(5), torch.ones(5)]),
    ],
)
def test_rows_are_put_together_and_numbers_averaged(values, whole):
    found = joined(values, SIZES)

    assert type(found) is type(whole)
    assert str(found) == str(whole)


def weights_of(form, sizes=(2, 1)):
    batch = torch.zeros(3, 1), torch.tensor([1, -100, 2])
    objective = Objective(torch.nn.Linear(1, 1), None, forward=None, loss_reduction=None, notices=Notices(silent=True))
    objective.weights.learn({"loss": [form]})
    return Weights(sizes, Window([batch]), objective)


def test_parts_weigh_the_targets_that_count():
    weights = weights_of(TermForm(Form.MEAN, counts={(LABELS, "[1]"): 1.0}))

    assert weights.of_loss == weights.usual == [1.0, 1.0]


@pytest.mark.parametrize("number", [None, ("items",)], ids=["alone", "divided by a number of the batch"])
def test_a_sum_is_added_up(number):
    assert weights_of(TermForm(Form.SUM, number=number)).is_sum


def test_a_mean_over_nothing_does_not_count():
    assert mean([torch.tensor(2.0), torch.tensor(float("nan"))], [3.0, 0.0]) == 2.0
