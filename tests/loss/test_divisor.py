"""What the loss of a window is divided by, from the counts that the loader's batches carry."""

import pytest
import torch

from autoaccum._data.batches import Window
from autoaccum._loss.divisor import Divisor, of_micro_batches, of_window

PATH = ("items",)
LABELS = torch.tensor([[1, -100], [2, 3], [-100, -100], [4, 5]])


def batch(labels=LABELS, items=None):
    return {"labels": labels, "items": int(labels.ne(-100).sum()) if items is None else items}


def test_whole_batches_add_their_numbers_whatever_these_are():
    assert of_window(PATH, Window([batch(items=7), batch(items=2.5)])) == Divisor(9.5, is_counted=True)


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
    assert of_window(PATH, Window([batch(items=items)]).part(0, 2)) == Divisor(expected, is_counted=True)


def test_part_of_a_batch_with_another_number_has_a_share_by_samples():
    assert of_window(PATH, Window([batch(items=100)]).part(0, 1)) == Divisor(25.0, is_counted=False)


def test_number_that_is_the_count_of_the_window_on_each_batch_is_not_added_up():
    assert of_window(PATH, Window([batch(items=10), batch(items=10)])) == Divisor(10, is_counted=True)


def test_equal_counts_of_batches_are_added_up():
    assert of_window(PATH, Window([batch(), batch()])) == Divisor(10, is_counted=True)


def test_micro_batches_carry_the_number_of_their_batch():
    window = Window([batch(), batch(items=7)])

    assert of_micro_batches(PATH, window, (3, 1, 2, 2)) == [5, 5, 7, 7]
