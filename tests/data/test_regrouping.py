"""Windows of tokens: whole samples, as near to the target as they come, each sample once and in order."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autoaccum
from autoaccum._data.regrouping import stream_of_tokens, tokens_of
from autoaccum._data.splits import piece_of
from autoaccum.errors import InvalidInputError
from ragged import padded, texts


def batches_of(lengths, size):
    each = texts(*lengths)
    return [padded(each[at : at + size]) for at in range(0, len(each), size)]


def windows_of(batches, tokens, **options):
    return list(stream_of_tokens(batches, tokens, **options))


def labels_of(window):
    return [int((row != -100).sum()) for batch in window for row in batch["labels"]]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    size=st.integers(1, 7),
    target=st.integers(1, 120),
)
def test_no_other_end_of_a_window_is_nearer_to_its_target(lengths, size, target):
    windows = [labels_of(window) for window in windows_of(batches_of(lengths, size), target)]

    assert [count for window in windows for count in window] == lengths
    for window, after in itertools.pairwise(windows):
        miss = abs(sum(window) - target)
        assert miss <= abs(sum(window) + after[0] - target)
        if len(window) > 1:
            assert miss <= abs(sum(window[:-1]) - target)


def test_windows_end_with_the_data_begin_after_what_was_used_and_hold_at_least_a_sample():
    batches = batches_of([5, 5, 5, 5, 5], 2)
    void = [padded(texts(4, 6)), padded(texts(3, 3))]
    void[1]["labels"][:] = -100

    assert [sum(labels_of(window)) for window in windows_of(batches, 10)] == [10, 10, 5]
    assert [sum(labels_of(window)) for window in windows_of(batches, 10, drop_last=True)] == [10, 10]
    assert [window.samples for window in windows_of(void, 10)] == [2]
    assert [labels_of(window) for window in windows_of(batches_of([5, 6, 7, 8], 4), 15, skip=1)] == [[6, 7], [8]]
    assert [labels_of(window) for window in windows_of(batches_of([50, 2, 3], 3), 5)] == [[50], [2, 3]]


def test_labels_are_counted_before_the_mask_and_that_before_elements():
    batch = padded(texts(4, 6))
    by_time = {name: tensor.T for name, tensor in batch.items()}
    pair = (torch.zeros(2, 3), torch.tensor([[1, 2, -100], [1, -100, -100]]))
    masked = batch["labels"].clone()
    masked[:, :2] = -100

    assert tokens_of(piece_of(batch | {"labels": masked}, None)) == [2, 4]
    assert tokens_of(piece_of(pair, None)) == [2, 1]
    assert tokens_of(piece_of(by_time, autoaccum.Along(1))) == [4, 6]
    assert tokens_of(piece_of(batch | {"labels": torch.tensor([1, 2])}, None)) == [4, 6]  # one for each sample
    del batch["labels"]
    assert tokens_of(piece_of(batch, None)) == [4, 6]
    del batch["attention_mask"]
    assert tokens_of(piece_of(batch, None)) == [6, 6]


LISTS = {
    "labels": ({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [1], "labels": [1]}, [2, 1]),
    "mask": ({"input_ids": [1, 2], "attention_mask": [1, 0]}, {"input_ids": [1], "attention_mask": [1]}, [1, 1]),
    "class": ({"input_ids": [1, 2], "labels": 4}, {"input_ids": [1], "labels": 0}, [2, 1]),
    "tensors": ({"image": torch.ones(3, 2, 2), "n": 1}, {"image": torch.ones(3, 1, 1), "n": 1}, [12, 3]),
    "arrays": (np.ones((2, 3)), np.ones(4), [6, 4]),
    "tuples": ((torch.ones(3), 1), (torch.ones(1), 0), [3, 1]),
    "numbers": ([1, 2, 3], [1], [3, 1]),
}


@pytest.mark.parametrize(("one", "other", "tokens"), LISTS.values(), ids=LISTS)
def test_samples_of_lists_are_counted_one_by_one(one, other, tokens):
    assert tokens_of(piece_of([one, other], autoaccum.ListOfSamples(list))) == tokens


class Whole:
    """Cuts batches of which nothing is known."""

    def count(self, batch):
        return 2

    def cut(self, batch, sizes):
        return [batch] * len(sizes)

    def join(self, batches):
        return batches[0]


def test_batches_that_do_not_tell_their_samples_are_refused():
    with pytest.raises(InvalidInputError, match="cannot tell the tokens of each sample in a str"):
        windows_of(["a batch"], 5, split=Whole())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "there is no target"),
        ({"target_batch": 4, "target_tokens": 10}, "two targets of one update"),
        ({"target_tokens": 0}, "target_tokens must be"),
        ({"target_tokens": 1.5}, "target_tokens must be"),
        *(({"target_batch": target}, rf"target_batch.*{target}") for target in (0, -1, 2.0, True, "4")),
    ],
)
def test_targets_that_cannot_be_are_refused(given, told):
    for call in (autoaccum.windows, lambda loader, **given: autoaccum.fit(torch.nn.Linear(1, 1), loader, **given)):
        with pytest.raises(InvalidInputError, match=told):
            call(batches_of([2, 5], 2), **given)
