"""Micro-batches arrive on the device, in order and unchanged. (With a card: tests/gpu.)"""

import pytest
import torch

from autoaccum._data.batches import Window
from autoaccum._data.transfer import Transfer
from helpers import CPU, assert_bitwise

META = torch.device("meta")


@pytest.fixture
def window():
    def piece(start, stop):
        return {"inputs": torch.arange(start, stop), "names": [str(i) for i in range(start, stop)], "scale": 0.5}

    return Window([piece(0, 4), piece(4, 10)])


def test_micro_batches_are_the_samples_in_order(window):
    fed = list(Transfer(CPU).feed(window, (3, 3, 4)))

    assert [batch["inputs"].tolist() for batch in fed] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert [batch["names"] for batch in fed] == [["0", "1", "2"], ["3", "4", "5"], ["6", "7", "8", "9"]]
    assert all(batch["scale"] == 0.5 for batch in fed)


def test_batch_that_is_where_it_is_needed_is_not_copied(window):
    inputs = window[1]["inputs"]

    (_, second) = Transfer(CPU).feed(window, (4, 6))

    assert second["inputs"].data_ptr() == inputs.data_ptr()


def test_micro_batches_are_made_when_they_are_asked_for(window):
    feed = Transfer(CPU).feed(window, (3, 100))

    first = next(feed)

    assert first["inputs"].tolist() == [0, 1, 2]


def test_batch_is_placed_in_its_nesting(window):
    placed = Transfer(META).place((window[0], [torch.zeros(4)]))

    assert placed[0]["inputs"].device == META
    assert placed[1][0].device == META
    assert placed[0]["names"] == ["0", "1", "2", "3"]


def test_batches_elsewhere_are_moved_one_by_one(window):
    fed = Transfer(META).feed(window, (5, 5))

    assert [(batch["inputs"].device, batch["inputs"].shape) for batch in fed] == [(META, (5,)), (META, (5,))]


def test_placed_tensor_holds_what_it_held():
    values = torch.randn(3, 2)

    assert_bitwise(Transfer(CPU).place(values), values)
