"""Lists of samples are taken from the largest to the smallest."""

import pytest
import torch

import autoaccum
from autoaccum._data.sample_sizes import by_size, elements_of, largest_first


class Graph:
    def __init__(self, nodes):
        self.edges, self.x = torch.zeros(2, 1), torch.zeros(nodes, 4)


@pytest.mark.parametrize(
    ("sample", "elements"),
    [
        (torch.ones(2, 3), 6),
        ({"ids": torch.ones(5), "pair": (torch.ones(2, 4), 3)}, 8),
        ({"ids": [1, 2, 3], "name": "a file"}, 3),
        (Graph(7), 28),
        (3, 0),
        ("a text", 0),
    ],
)
def test_size_of_a_sample_is_that_of_its_largest_tensor(sample, elements):
    assert elements_of(sample) == elements


def test_largest_samples_come_first_and_equal_ones_as_they_came():
    split = autoaccum.ListOfSamples(lambda samples: samples)
    window = autoaccum.Window([[("a", [1]), ("b", [1, 2])], [("c", [1, 2]), ("d", [1, 2, 3])]], split).part(0, 4)

    found = largest_first(window)

    assert [name for name, _ in found.cut(0, 4)] == ["d", "b", "c", "a"]
    assert found.named(1) == "sample 1 of the window"
    assert found.named(0) == "sample 3 of the window"
    assert found.sample_bytes() == [0]
    assert by_size([[1], [1, 2]], split) == [[1, 2], [1]]


def test_batches_of_tensors_stay_as_they_are():
    window = autoaccum.Window([torch.ones(2, 3), torch.ones(2, 5)])

    assert largest_first(window) is window
    assert by_size(window, None) is window
