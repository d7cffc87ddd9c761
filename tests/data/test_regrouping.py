"""Windows of tokens: whole samples, as near to the target as they come, each sample once and in order."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

import autoaccum
from autoaccum._data.regrouping import stream, tokens_of
from autoaccum._data.splits import piece_of
from support.data.ragged import padded, texts


def batches_of(lengths, size):
    each = texts(*lengths)
    return [padded(each[at : at + size]) for at in range(0, len(each), size)]


def windows_of(batches, tokens, **options):
    return list(stream(batches, tokens, in_tokens=True, **options))


def labels_of(window):
    return [int((row != -100).sum()) for batch in window for row in batch["labels"]]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), size=st.integers(1, 7), target=st.integers(1, 120)
)
def test_no_other_end_of_a_window_is_nearer_to_its_target(lengths, size, target):
    windows = [labels_of(window) for window in windows_of(batches_of(lengths, size), target)]

    assert [count for window in windows for count in window] == lengths
    for window, after in itertools.pairwise(windows):
        miss = abs(sum(window) - target)
        assert miss <= abs(sum(window) + after[0] - target)
        if len(window) > 1:
            assert miss <= abs(sum(window[:-1]) - target)


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
