"""Micro-batches arrive on the device, in order and unchanged. (With a card: tests/gpu.)"""

import dataclasses

import pytest
import torch
from torch.nn.utils import rnn

import autoaccum
from autoaccum._data.batches import Window
from autoaccum._data.nesting import tensors_in
from autoaccum._data.transfer import Transfer
from autoaccum.errors import InvalidInputError
from helpers import CPU

META = torch.device("meta")


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


def test_batches_elsewhere_are_moved_one_by_one_in_their_nesting():
    collated = Window([[1, 2, 3]], autoaccum.ListOfSamples(lambda some: (torch.tensor(some), [torch.zeros(4)], "name")))

    fed = Transfer(META).feed(Window([piece(0, 10)]), (5, 5))
    ((numbers, [zeros], name),) = Transfer(META).feed(collated, [3])

    assert [(batch["inputs"].device, batch["inputs"].shape) for batch in fed] == [(META, (5,)), (META, (5,))]
    assert numbers.device == zeros.device == META
    assert name == "name"


@dataclasses.dataclass
class Record:
    inputs: torch.Tensor
    name: str


class Graph:
    def __init__(self, nodes):
        self.nodes = nodes

    def to(self, device):
        return Graph(self.nodes.to(device))


class Stubborn:
    def __init__(self):
        self.nodes = torch.zeros(2)


def test_objects_with_tensors_inside_are_found_and_moved():
    batch = (torch.zeros(1), Record(torch.zeros(2), "a"), Graph(torch.zeros(3)), rnn.pack_sequence([torch.zeros(4, 2)]))

    _, record, graph, packed = Transfer(META).place(batch)

    assert [len(tensor) for tensor in tensors_in(batch)][:3] == [1, 2, 3]
    assert {one.device.type for one in (record.inputs, graph.nodes, packed.data)} == {"meta"}
    assert record.name == "a"
    with pytest.raises(InvalidInputError, match=r"holds a Stubborn.*method to\(device\)"):
        Transfer(META).place(Stubborn())
