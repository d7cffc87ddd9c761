"""Splits count, cut and join batches whose samples do not run along the first dimension of every tensor."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.utils import rnn
from torch.utils.data import default_collate
from transformers import BatchEncoding

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
        ([1, 0], [torch.zeros(3, 5, 2), torch.zeros(5)]),
        ({"frames": 1, "labels": 0}, {"frames": torch.zeros(3, 5), "labels": torch.zeros(5, 2)}),
        ({"frames": 1, "mel": None}, {"frames": torch.zeros(3, 5), "mel": torch.zeros(80, 40)}),
        ((1, {"a": 0, "b": 2}), (torch.zeros(3, 5), {"a": torch.zeros(5), "b": torch.zeros(1, 1, 5)})),
        ((1, 0), (torch.zeros(3, 5), {"a": torch.zeros(5), "b": torch.zeros(5, 9)})),
        (1, (torch.zeros(3, 5), torch.tensor(0.5))),
        (0, {"inputs": np.zeros((5, 2)), "labels": np.zeros(5)}),
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


def test_what_all_samples_share_is_passed_on_whole_and_lists_are_cut():
    batch = BatchEncoding({"frames": torch.zeros(3, 5), "mel": torch.zeros(5, 5), "names": list("abcde")})

    cut = Window([batch], autoaccum.Along({"frames": 1, "mel": None, "names": 0})).cut(1, 3)

    assert cut["frames"].shape == (3, 2)
    assert cut["mel"] is batch["mel"]
    assert cut["names"] == ["b", "c"]
    assert Window([dict(batch)], autoaccum.Along(1)).cut(1, 3)["names"] == ["b", "c"]


@pytest.mark.parametrize("dims", [None, (), "1", -1, 1.0, True, (0, -2), {"a": None}])
def test_dimensions_that_are_none_are_refused(dims):
    with pytest.raises(InvalidInputError, match=r"a dimension is a number from 0"):
        autoaccum.Along(dims)


@pytest.mark.parametrize(
    ("dims", "batch", "message"),
    [
        (1, (torch.zeros(3, 5), torch.zeros(5)), r"shape \(5,\) has no dimension 1.*Along\(\(1, 0\)\)"),
        ((1, 0, 0), (torch.zeros(3, 5), torch.zeros(5)), r"gives 3 dimensions for a tuple of 2"),
        ({"a": (0, 0)}, {"a": [torch.zeros(5)]}, r"gives 2 dimensions for a list of 1"),
        ((1,), (torch.zeros(3, 5), torch.zeros(5)), r"says nothing of the batch's entry 1"),
        ({"a": 1}, {"a": torch.zeros(3, 5), "b": torch.zeros(5)}, r"says nothing of the batch's entry b"),
        (((1, 0), 0), (torch.zeros(3, 5), torch.zeros(5)), r"nests deeper than the batch at 0"),
        ((1, 0), (torch.zeros(3, 5), torch.zeros(4)), r"must agree"),
        (1, (rnn.pack_sequence([torch.zeros(3)]),), r"PackedSequence.*split="),
    ],
)
def test_batch_that_the_dimensions_do_not_fit_is_refused(dims, batch, message):
    with pytest.raises(InvalidInputError, match=message):
        autoaccum.Along(dims).count(batch)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": lambda self, batch: -1}, r"count\(batch\) returned -1"),
        ({"count": lambda self, batch: 2.5}, r"count\(batch\) returned 2.5"),
        ({"count": lambda self, batch: True}, r"count\(batch\) returned True"),
        ({"cut": lambda self, batch, sizes: [batch]}, r"cut\(batch, \[1, 2\]\) returned 1 parts"),
        ({"cut": lambda self, batch, sizes: [batch] * 2}, r"cut to 1 samples counts 3"),
    ],
)
def test_split_that_contradicts_itself_is_named(changes, message):
    split = type("Odd", (Text,), changes)()

    with pytest.raises(InvalidInputError, match=rf"split=Odd.*{message}"):
        Window(["abc"], split).cut(0, 1)


@pytest.mark.parametrize(
    ("split", "found"),
    [(Text, "a class"), (object(), "without count, cut, join"), (1, "without"), ("along", "without cut;")],
)
def test_what_is_no_split_is_refused(split, found):
    with pytest.raises(InvalidInputError, match=rf"split=.*{found}.*autoaccum.Along\(1\)"):
        autoaccum.windows(["abc"], 2, split=split)


@pytest.mark.parametrize(
    ("name", "function", "called"),
    [
        ("count", lambda: 3, r"\(batch\)"),
        ("cut", lambda batch: [batch], r"\(batch, sizes\)"),
        ("join", lambda one, other: one, r"\(batches\)"),
        ("weight", lambda: 3, r"\(batch\)"),
        ("weight", 3, None),
    ],
)
def test_method_that_takes_other_arguments_is_refused(name, function, called):
    split = Text()
    setattr(split, name, function)

    message = rf"split\.{name}=.* is called with {called}, but takes" if called else "weight is no function"
    with pytest.raises(InvalidInputError, match=message):
        autoaccum.windows(["abc"], 2, split=split)


def test_collator_that_fails_on_collated_tensors_says_what_the_loader_should_do():
    def fails(samples):
        raise KeyError("label")

    with pytest.raises(RuntimeError) as caught:
        autoaccum.ListOfSamples(default_collate).join([[torch.zeros(6, 2), torch.zeros(6)]])
    with pytest.raises(KeyError) as of_samples:
        autoaccum.ListOfSamples(fails).join([[{"image": torch.zeros(2)}]])

    assert "shapes 0: (6, 2), 1: (6,)" in caught.value.__notes__[0]
    assert "pass collate_fn=list" in caught.value.__notes__[0]
    assert not hasattr(of_samples.value, "__notes__")
