"""Micro-batches arrive on the device, in order and unchanged. (With a GPU: tests/gpu.)"""

import torch

from autoaccum._data.batches import Window
from autoaccum._data.transfer import Transfer
from helpers import CPU


def piece(start, stop):
    return {"inputs": torch.arange(start, stop), "names": [str(i) for i in range(start, stop)], "scale": 0.5}


def test_micro_batches_are_the_samples_in_order_and_made_when_they_are_asked_for():
    window = Window([piece(0, 4), piece(4, 10)])

    fed = list(Transfer(CPU).feed(window, (3, 3, 4)))
    (_, second) = Transfer(CPU).feed(window, (4, 6))
    first = next(Transfer(CPU).feed(window, (3, 100)))

    assert [batch["inputs"].tolist() for batch in fed] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert [batch["names"] for batch in fed] == [["0", "1", "2"], ["3", "4", "5"], ["6", "7", "8", "9"]]
    assert all(batch["scale"] == 0.5 for batch in fed)
    assert second["inputs"].data_ptr() == window[1]["inputs"].data_ptr()  # it is where it is needed
    assert first["inputs"].tolist() == [0, 1, 2]
