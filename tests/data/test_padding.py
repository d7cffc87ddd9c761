"""What a batch says of its padding: never more than its mask, its lengths and the labels that count allow."""

import pytest
import torch

from autoaccum._data.padding import padding_of
from autoaccum._data.splits import ByDefault
from autoaccum.errors import InvalidInputError
from ragged import padded, texts


def padding(batch, lengths=None):
    return padding_of(ByDefault().piece(batch), lengths)


def test_mask_tells_the_columns_that_each_sample_needs():
    found = padding(padded(texts(3, 7, 5)))

    assert found.lengths == (3, 7, 5)
    assert found.width == 7
    assert len(found.columns) == 3
    assert not found.is_left


def test_mask_that_has_holes_ends_at_its_last_real_column():
    batch = padded(texts(6, 6))
    batch["attention_mask"][0, 1:3] = 0
    batch["attention_mask"][1, 4:] = 0
    batch["labels"][1, 4:] = -100

    assert padding(batch).lengths == (6, 4)


def test_label_that_counts_keeps_its_column_whatever_the_mask_says():
    batch = padded(texts(3, 6))
    batch["labels"][0, 4] = 2

    assert padding(batch).lengths == (5, 6)


def test_labels_alone_tell_no_padding():
    batch = padded(texts(3, 6))
    del batch["attention_mask"]

    assert padding(batch) is None


def test_padding_in_front_goes_only_where_positions_are_given():
    in_front = padded(texts(3, 6), left=True)

    assert padding(in_front).lengths == (6, 6)
    with_positions = padding(padded(texts(3, 6), 8, left=True, positions=True))
    assert with_positions.is_left
    assert with_positions.lengths == (4, 7)  # with the column from which a causal model predicts the first label


def test_weights_of_tokens_keep_their_columns_unless_they_are_zero():
    batch = padded(texts(3, 6))
    batch["weights"] = batch["attention_mask"].double()
    assert padding(batch).lengths == (3, 6)

    batch["weights"][0, 3] = 0.5
    assert padding(batch).lengths == (4, 6)


def test_targets_in_floating_point_keep_all_columns():
    batch = padded(texts(3, 6))
    pair = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}, torch.zeros(2, 6)

    assert padding(pair).lengths == (6, 6)


@pytest.mark.parametrize(
    "further",
    [torch.arange(12).view(2, 6), torch.randn(2, 6), torch.zeros(2, 6, 6), torch.arange(72).view(2, 6, 6)],
    ids=["features", "numbers", "pairs", "pairs of numbers"],
)
def test_entry_that_is_as_wide_by_accident_is_kept_whole(further):
    batch = padded(texts(3, 6)) | {"further": further}

    assert padding(batch).lengths == (6, 6)


def test_positions_may_go_on_in_the_padding():
    batch = padded(texts(3, 6)) | {
        "position_ids": torch.arange(6).expand(2, 6),
        "token_type_ids": torch.zeros(2, 6).long(),
    }

    assert padding(batch).lengths == (3, 6)


def test_sample_without_a_real_column_keeps_one():
    batch = padded(texts(3, 6))
    batch["attention_mask"][0] = 0
    batch["labels"][0] = -100

    assert padding(batch).lengths == (1, 6)


@pytest.mark.parametrize("lengths", ["lengths", lambda batch: batch["lengths"].tolist()], ids=["name", "function"])
def test_lengths_stand_for_a_mask(lengths):
    batch = padded(texts(3, 6)) | {"lengths": torch.tensor([3, 6])}
    del batch["attention_mask"]

    found = padding(batch, lengths)

    assert found.lengths == (3, 6)
    assert found.columns == (0, 1)


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        (lambda batch: [3], "gave \\[3\\] for a batch of 2 samples"),
        (lambda batch: [3.5, 2.0], "one whole number for each"),
        (lambda batch: [3, 9], "numbers from 0 to 6, the columns of the batch"),
        (lambda batch: [-1, 3], "numbers from 0"),
        (lambda batch: None, "one whole number for each"),
        ("other", "no entry of that name"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths, told):
    with pytest.raises(InvalidInputError, match=told):
        padding(padded(texts(3, 6)), lengths)
