"""A window by length holds the same samples, the longest first, and each micro-batch as few columns as they need."""

import pytest
import torch

import autoaccum
from autoaccum._data.batches import Window
from autoaccum._data.by_length import ByLength, CannotBeOrderedError
from ragged import padded, texts


def by_length(*batches, lengths=None, split=None):
    return ByLength.of(Window(list(batches), split), lengths)


def labelled(batch, scale=1):
    """Every column has a label, also where there is padding."""
    return batch | {"labels": batch["input_ids"] * scale}


def rows_of(batch):
    """The real tokens of each row, whatever is around them."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def test_samples_of_all_batches_come_the_longest_first():
    each = texts(3, 7, 5, 2, 9)
    window = by_length(padded(each[:3]), padded(each[3:]))

    found = rows_of(window.cut(0, 5))

    assert found == [each[index].tolist() for index in (4, 1, 2, 0, 3)]
    assert window.lengths == (9, 7, 5, 3, 2)
    assert window.indices == (4, 1, 2, 0, 3)


@pytest.mark.parametrize("left", [False, True])
def test_micro_batch_has_the_columns_of_its_longest_sample(left):
    each = texts(3, 7, 5, 2, 9)
    window = by_length(*(padded(part, 12, left=left, positions=left) for part in (each[:3], each[3:])))

    batch = window.cut(2, 5)

    assert batch["input_ids"].shape == batch["labels"].shape == (3, 6 if left else 5)
    assert rows_of(batch) == [each[index].tolist() for index in (2, 0, 3)]
    assert all(tensor.is_contiguous() for tensor in batch.values())
    if left:
        assert batch["position_ids"][1].tolist() == [0, 0, 0, 0, 1, 2]


def test_samples_that_are_padded_further_have_padding_there():
    each = texts(3, 8)
    window = by_length(padded(each[:1]), padded(each[1:]))

    batch = window.cut(0, 2)

    assert batch["attention_mask"][1].tolist() == [1] * 3 + [0] * 5
    assert batch["labels"][1, 3:].tolist() == [-100] * 5


def test_loaders_batches_stay_as_they_are():
    batch = padded(texts(3, 7))
    before = {name: tensor.clone() for name, tensor in batch.items()}

    by_length(batch).cut(0, 1)["input_ids"].zero_()

    assert all(torch.equal(batch[name], before[name]) for name in before)


def test_samples_of_one_length_keep_the_loaders_order():
    assert by_length(padded(texts(4, 4, 4))).indices == (0, 1, 2)


def test_part_is_in_order_too():
    part = by_length(padded(texts(3, 7, 5))).part(1, 3)

    assert part.lengths == (5, 3)
    assert part.cut(0, 2)["input_ids"].shape == (2, 5)
    assert part.costs() == sorted(part.costs(), reverse=True)


def test_lists_of_samples_are_collated_by_length():
    each = texts(3, 7, 5, 2)
    seen = []

    def collate(samples):
        seen.append([len(one) for one in samples])
        return padded(samples)

    window = by_length(each[:2], each[2:], split=autoaccum.ListOfSamples(collate))

    assert window.lengths == (7, 5, 3, 2)
    assert window.cut(0, 2)["input_ids"].shape == (2, 7)
    assert window.cut(2, 4)["input_ids"].shape == (2, 3)
    assert seen == [[7, 5], [3, 2]]


def test_what_no_sample_shows_is_not_made_up():
    batches = [(text[None], text[None]) for text in texts(3, 7)]  # neither shows what the model takes for padding

    with pytest.raises(CannotBeOrderedError, match="no sample shows what stands in the padding"):
        by_length(*batches, lengths=lambda batch: [batch[0].shape[1]])


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        ([(torch.zeros(2, 3), torch.zeros(2))], "no attention_mask .* and lengths= is not given"),
        ([padded(texts(3, 7)) | {"num_items_in_batch": 10}, padded(texts(4, 4))], "a count of their own"),
        ([padded(texts(3, 7)), padded(texts(3, 7)) | {"further": torch.zeros(2, 4)}], "same columns|more than their"),
        (
            [padded(texts(3, 7), left=True, positions=True), padded(texts(3, 7), positions=True)],
            "padded in front, and others behind",
        ),
        (
            [padded(texts(3, 7), left=True, positions=True), padded(texts(5, 9), left=True, positions=True)],
            "a label in the first column would count",
        ),
        ([padded(texts(3, 7), left=True), padded(texts(5, 9), left=True)], "padded in front, and have no position_ids"),
        ([padded(texts(3, 7), left=True), padded(texts(9, 9))], "padded in front, and have no position_ids"),
        (
            [labelled(padded(texts(*lengths))) for lengths in ((3, 7), (5, 9))],
            "labels in the padding are not -100",
        ),
        (
            [labelled(padded(texts(*lengths)), scale=0.5) for lengths in ((3, 7), (5, 9))],
            "targets in floating point would have more columns",
        ),
    ],
)
def test_samples_that_cannot_be_ordered_say_why(batches, told):
    with pytest.raises(CannotBeOrderedError, match=told):
        by_length(*batches)


@pytest.mark.parametrize("left", [False, True])
def test_batches_of_one_width_are_ordered_wherever_their_padding_is(left):
    batches = [labelled(padded(texts(*lengths), 12, left=left)) for lengths in ((3, 7), (5, 9))]

    window = by_length(*batches)

    assert window.cut(0, 4)["input_ids"].shape == (4, 12)


def test_row_of_several_sequences_stays_one_sample():
    batch = padded(texts(6, 6)) | {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)}
    window = Window([batch])

    assert ByLength.of(window.part(0, 1)).samples == 1
    assert window.part(0, 1).reordered(torch.zeros(1, dtype=torch.int64)).samples == 1


def test_mask_of_pairs_of_tokens_keeps_the_batch_whole():
    batch = padded(texts(3, 7), 12)
    pairs = batch["attention_mask"][:, None, None, :].expand(2, 1, 12, 12).contiguous()

    window = by_length(batch | {"pairs": pairs})

    assert {name: tensor.shape[-1] for name, tensor in window.cut(0, 1).items()} == dict.fromkeys((*batch, "pairs"), 12)


def test_features_that_are_as_many_as_columns_keep_the_batch_whole():
    pictures = torch.randn(2, 12, 5)
    boxes = torch.randn(2, 12, 4) * padded(texts(3, 7), 12)["attention_mask"][..., None]

    window = by_length(padded(texts(3, 7), 12) | {"pictures": pictures})
    other = by_length(padded(texts(3, 7), 12) | {"boxes": boxes})

    assert torch.equal(window.cut(0, 2)["pictures"].sort(0).values, pictures.sort(0).values)
    assert other.cut(0, 2)["boxes"].shape == (2, 7, 4)


def test_columns_all_count_where_nothing_tells_what_is_padding():
    batch = padded(texts(3, 7))
    del batch["attention_mask"]

    window = by_length(batch)

    assert not window.is_trimmed
    assert window.lengths == (7, 7)
    assert window.cut(1, 2)["input_ids"].shape == (1, 7)


def test_sample_is_named_by_its_place_in_the_loaders_order():
    assert by_length(padded(texts(3, 1700))).named(0) == "sample 1 of the window, 1,700 columns long"


def test_lists_of_many_samples_name_each_tensor_once():
    each = texts(*range(2, 66))

    window = by_length(each[:32], each[32:], split=autoaccum.ListOfSamples(padded))

    assert len(window.tensors()) == 64
    assert window.costs() == sorted(range(2, 66), reverse=True)


@pytest.mark.parametrize("split", [None, autoaccum.ListOfSamples(padded)], ids=["padded", "lists"])
def test_in_another_order_samples_cost_as_much_as_the_longest_and_stay_trimmed(split):
    each = texts(3, 7, 5, 2, 9)
    window = by_length(each if split else padded(each), split=split)

    other = window.reordered(torch.tensor([3, 0, 1, 4, 2]))

    assert other.lengths == (3, 9, 7, 2, 5)
    assert other.costs() == [9 * window.column_bytes] * 5
    assert other.sample_bytes() == window.sample_bytes()
    assert rows_of(other.cut(3, 5)) == [each[index].tolist() for index in (3, 2)]
    assert other.cut(3, 5)["input_ids"].shape == (2, 5)
    assert other.named(1) == "sample 4 of the window, 9 columns long"
