"""The numbers that a batch carries beside its samples are found, wherever a mapping holds them."""

from collections import OrderedDict, UserDict

import numpy as np
import pytest
import torch

from autoaccum._data.batches import Window
from autoaccum._data.numbers import is_count, number_at, numbers_in

X = torch.zeros(4, 2)


def test_python_numpy_and_tensor_numbers_are_found_and_nothing_else():
    batch = {
        "x": X,
        "int": 3,
        "float": 0.5,
        "tensor": torch.tensor(7),
        "numpy": np.int64(2),
        "flag": True,
        "mask": torch.tensor(True),
        "name": "a",
        "names": ["a", "b", "c", "d"],
        "none": None,
    }

    assert numbers_in(batch) == {("int",): 3.0, ("float",): 0.5, ("tensor",): 7.0, ("numpy",): 2.0}


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        ((X, {"labels": X, "items": 3}), (1, "items")),
        ([{"x": X, "items": 3}, X], (0, "items")),
        ({"x": X, "more": {"items": 3}}, ("more", "items")),
        (UserDict({"x": X, "items": 3}), ("items",)),
        (OrderedDict({"x": X, "items": np.float32(3)}), ("items",)),
        ({"x": X, "items": torch.tensor(3)}, ("items",)),
        ((X, X, 3), (2,)),
        ([X, X, torch.tensor(3.0)], (2,)),
    ],
    ids=["targets", "inputs", "nested", "another mapping", "ordered", "tensor", "of a tuple", "tensor of a list"],
)
def test_number_is_read_where_it_is(batch, path):
    assert numbers_in(batch) == {path: 3.0}
    assert number_at(batch, path) == 3.0


@pytest.mark.parametrize("batch", [X, (X, X), [X, X, X], "text", (X, [{"image_id": 3}])])
def test_batches_of_samples_alone_carry_no_number(batch):
    assert numbers_in(batch) == {}


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("num_items_in_batch", True),
        ("numBoxes", True),
        ("batch_size", True),
        ("n_tokens", True),
        ("temperature", False),
        ("beta", False),
        ("number", True),
        ("renumbered", False),
        ("step", False),
    ],
)
def test_count_is_told_by_the_words_of_its_name(name, counts):
    assert is_count((name,)) is counts


def test_window_carries_counts_if_it_is_not_one_whole_batch():
    batch = {"x": X, "num_items_in_batch": 4}

    assert not Window([batch]).carries_counts()
    assert Window([batch]).part(0, 3).carries_counts()
    assert Window([batch, batch]).carries_counts()
    assert not Window([{"x": X, "temperature": 0.5}] * 2).carries_counts()
