"""What a function returned for parts of a batch is joined as it would have returned it for the batch."""

from typing import NamedTuple

import pytest
import torch

from autoaccum.integrations._joined_parts import joined, mean


class Pair(NamedTuple):
    inputs: torch.Tensor
    name: str


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
    found = joined(values, [2, 1])

    assert type(found) is type(whole)
    assert str(found) == str(whole)


def test_a_mean_over_nothing_does_not_count():
    assert mean([torch.tensor(2.0), torch.tensor(float("nan"))], [3.0, 0.0]) == 2.0
