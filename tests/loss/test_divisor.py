"""What the loss of a window is divided by, from the counts that the loader's batches carry."""

import pytest
import torch

from autoaccum._data.batches import Window
from autoaccum._loss.divisor import counts_targets, of_micro_batches, of_window

PATH = ("items",)
LABELS = torch.tensor([[1, -100], [2, 3], [-100, -100], [4, 5]])


def batch(labels=LABELS, items=None):
    return {"labels": labels, "items": int(labels.ne(-100).sum()) if items is None else items}


def test_whole_batches_add_their_numbers_whatever_these_are():
    assert of_window(PATH, Window([batch(items=7), batch(items=2.5)])) == (9.5, True, False)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (5, 3),  # labels that count
        (2, 1),  # labels that count, but the first of each row
        (8, 4),  # elements
        (4, 2),  # samples
    ],
)
def test_part_of_a_batch_has_the_count_of_its_own(items, expected):
    assert of_window(PATH, Window([batch(items=items)]).part(0, 2)) == (expected, True, False)


def test_part_of_a_batch_with_another_number_has_a_share_by_samples():
    assert of_window(PATH, Window([batch(items=100)]).part(0, 1)) == (25.0, False, False)


def test_number_that_is_the_count_of_the_window_on_each_batch_is_not_added_up():
    assert of_window(PATH, Window([batch(items=10), batch(items=10)])) == (10, True, True)


def test_equal_counts_of_batches_are_added_up():
    assert of_window(PATH, Window([batch(), batch()])) == (10, True, False)


def test_micro_batches_carry_the_number_of_their_batch():
    window = Window([batch(), batch(items=7)])

    assert of_micro_batches(PATH, window, (3, 1, 2, 2)) == [5, 5, 7, 7]


@pytest.mark.parametrize(
    ("targets", "number"),
    [
        ({"mask": torch.tensor([[True, False], [True, True]])}, 3),
        ({"attention_mask": torch.tensor([[1, 0], [1, 1]])}, 3),
        ({"labels": torch.tensor([[1, -1], [1, 0]])}, 3),
        ({"labels": torch.zeros(2, 3)}, 6),
    ],
    ids=["bool", "mask", "another value", "elements"],
)
def test_targets_are_counted_in_every_usual_way(targets, number):
    assert counts_targets(targets, 2, number)
    assert not counts_targets(targets, 2, 5)
