"""Splits count, cut and join batches whose samples do not run along the first dimension of every tensor."""

import itertools

import numpy as np
import pytest
import torch

import autoaccum
from autoaccum._data.batches import Window, repeated
from autoaccum.errors import InvalidInputError


def time_first(samples, start=0, time=3):
    """Inputs (T, N, 1) and targets (N,), which tell which sample they are of."""
    numbers = torch.arange(start, start + samples)
    return numbers.reshape(1, -1, 1).expand(time, samples, 1).clone(), numbers


@pytest.mark.parametrize(
    ("dims", "batch"),
    [
        (1, torch.zeros(3, 5)),
        ((1, 0), (torch.zeros(3, 5, 2), torch.zeros(5))),
        ({"frames": 1, "labels": 0}, {"frames": torch.zeros(3, 5), "labels": torch.zeros(5, 2)}),
        ({"frames": 1, "mel": None}, {"frames": torch.zeros(3, 5), "mel": torch.zeros(80, 40)}),
        ((1, 0), (torch.zeros(3, 5), {"a": torch.zeros(5), "b": torch.zeros(5, 9)})),
        (1, (torch.zeros(3, 5), torch.tensor(0.5))),
        (1, np.zeros((2, 5))),
    ],
)
def test_along_counts_the_dimension_it_names(dims, batch):
    split = autoaccum.Along(dims)

    assert split.count(batch) == 5
    assert [split.count(part) for part in split.cut(batch, [2, 3])] == [2, 3]


def test_along_cuts_and_joins_windows():
    split, whole = autoaccum.Along((1, 0)), time_first(6)
    window = Window([time_first(3), time_first(4, 3)], split)

    inputs, targets = window.cut(1, 6)

    assert window.groups() == [7]
    assert targets.tolist() == [1, 2, 3, 4, 5]
    assert inputs[:, :, 0].tolist() == [[1, 2, 3, 4, 5]] * 3
    assert all(map(torch.equal, split.join(split.cut(whole, [1, 3, 2])), whole))
    assert Window([time_first(3, time=4), time_first(3, time=5)], split).groups() == [3, 3]


# --- lists of samples -------------------------------------------------------------------------------------------------


def test_list_of_samples_is_cut_and_its_parts_collated_from_copies():
    samples = [{"ids": 1}, {"ids": 2}, {"ids": 3}]
    split = autoaccum.ListOfSamples(lambda given: torch.tensor([one.pop("ids") for one in given]))
    window = Window([samples, tuple(samples)], split)

    assert window.groups() == [6]
    assert window.cut(2, 5).tolist() == window.cut(2, 5).tolist() == [3, 1, 2]
    assert samples == [{"ids": 1}, {"ids": 2}, {"ids": 3}]


def test_collated_batch_is_no_list_of_samples():
    with pytest.raises(InvalidInputError, match=r"it yields a Tensor; pass collate_fn=list"):
        Window([torch.zeros(4)], autoaccum.ListOfSamples(torch.tensor))


# --- splits of one's own ----------------------------------------------------------------------------------------------


class Text:
    """Samples are the letters of a text."""

    def count(self, batch):
        return len(batch)

    def cut(self, batch, sizes):
        bounds = np.cumsum([0, *sizes])
        yield from (batch[start:stop] for start, stop in itertools.pairwise(bounds))

    def join(self, batches):
        return "".join(batches)


def test_split_of_ones_own_cuts_windows():
    window = Window(["abc", "defg"], Text())

    assert isinstance(Text(), autoaccum.Split)
    assert window.samples == 7
    assert window.cut(1, 5) == "bcde"
    assert [window.cut(at, at + 1) for at in range(7)] == list("abcdefg")
    assert window.part(2, 6).raw() == ["c", "def"]
    assert window.chosen([6, 0, 0]).cut(0, 3) == "gaa"
    assert window.joined() is window
    made = autoaccum.windows(["abc", "defg", "h"], 5, split=Text())
    assert [(one.cut(0, one.samples), one.samples) for one in made] == [("abcde", 5), ("fgh", 3)]
    assert repeated("abc", 7, Text()) == "abcabca"
