"""Lists in a loader's batch are read as samples or as fields; what stays open is refused."""

import pytest
import torch
from torch.utils.data import default_collate
from transformers import BatchEncoding, DataCollatorWithFlattening

import autoaccum
from autoaccum._data.batches import Window, count
from autoaccum.errors import InvalidInputError

IMAGE = (3, 8, 8)


def images(number, *shape):
    return [torch.rand(*(shape or IMAGE)) for _ in range(number)]


def boxes(number, each=2):
    return [{"boxes": torch.rand(each, 4), "labels": torch.ones(each, dtype=torch.long)} for _ in range(number)]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ((images(5), boxes(5, 3)), 5),
        ((tuple(images(5)), tuple(boxes(5, 3))), 5),
        ([images(5), boxes(5, 3)], 5),
        ((images(1), boxes(1)), 1),
        ((torch.rand(4, *IMAGE), boxes(4)), 4),
        ({"pixel_values": torch.rand(4, *IMAGE), "labels": boxes(4)}, 4),
        (BatchEncoding({"pixel_values": torch.rand(4, *IMAGE), "labels": boxes(4)}), 4),
    ],
    ids=[
        "images with dictionaries",
        "as tuples",
        "as a list of lists",
        "one image",
        "stacked images with dictionaries",
        "mapping",
        "BatchEncoding",
    ],
)
def test_list_beside_targets_of_its_length_holds_samples(batch, samples):
    assert count(batch) == samples


def test_lists_of_samples_are_cut_and_joined():
    first, second = (images(3), boxes(3)), (images(2), boxes(2, 5))
    window = Window([first, second])

    pictures, targets = window.cut(2, 5)

    assert [id(one) for one in pictures] == [id(one) for one in (first[0][2], *second[0])]
    assert [len(one["boxes"]) for one in targets] == [2, 5, 5]
    assert len(window.tensors()) == 3 * 5


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.rand(10), torch.rand(1)) for _ in range(32)],
        [tuple(torch.randint(9, (7,)) for _ in range(3)) for _ in range(32)],
        [(torch.rand(10), torch.rand(10), torch.rand(10)) for _ in range(32)],
        [([torch.rand(3, 8, 8) for _ in range(12)], 1) for _ in range(32)],
        [((torch.rand(5), torch.rand(5)), (torch.rand(1), torch.rand(1))) for _ in range(32)],
        [({"ids": torch.rand(4)}, {"ids": torch.rand(4)}, {"ids": torch.rand(4)}) for _ in range(32)],
        [{"ids": torch.rand(4), "views": [torch.rand(3), torch.rand(3)]} for _ in range(32)],
    ],
    ids=["pair", "ids, mask, labels", "three inputs", "twelve views", "two inputs, two targets", "triplet", "views"],
)
def test_what_default_collate_makes_is_read_by_its_first_dimension(samples):
    assert count(default_collate(samples)) == 32


@pytest.mark.parametrize(
    ("batch", "samples", "fields"),
    [
        (images(5), 5, 3),
        (images(16, 100, 5), 16, 100),
        ([torch.rand(3, 8, 9), torch.rand(3, 7, 8), torch.rand(3, 5, 5)], 3, 3),
        (([torch.rand(3, 8, 9), torch.rand(3, 7, 8)], [torch.rand(8, 9), torch.rand(7, 8)]), 2, 3),
        (([torch.rand(7, 6)], [torch.rand(7)]), 1, 7),
        ((images(4, 7, 6), images(4, 7)), 4, 7),
        ({"images": images(5)}, 5, 3),
        ((torch.rand(2, *IMAGE), boxes(2, 2)), 2, 2),
        ((images(3), torch.zeros(3)), 3, 3),
        ((images(5), torch.zeros(5)), 5, 3),
        ((images(5), images(5, 3, 8, 8)), 5, 3),
        ((images(5), [0, 1, 0, 1, 1]), 5, 3),
        ([{"image": image} for image in images(9)], 9, 3),
    ],
    ids=[
        "images",
        "many spectrograms",
        "images of unlike sizes",
        "images and masks of unlike sizes",
        "one sequence",
        "sequences and tags",
        "images in a mapping",
        "as many boxes as images",
        "as many images as channels",
        "images with labels",
        "images and masks",
        "images and numbers",
        "many dictionaries",
    ],
)
def test_list_that_can_be_read_both_ways_is_refused_with_both_readings(batch, samples, fields):
    with pytest.raises(InvalidInputError) as caught:
        count(batch)

    message = str(caught.value)
    assert f"{samples} samples, or {samples} fields of {fields} samples" in message
    assert "split=autoaccum.ListOfSamples(collate)" in message
    assert "split=autoaccum.Along(0)" in message


def levels(samples):
    """What default_collate makes of samples with three feature levels each."""
    sample = {"image": torch.rand(5), "levels": [{"heat": torch.rand(4), "size": torch.rand(2)} for _ in range(3)]}
    return default_collate([sample] * samples)


def test_first_batch_decides_how_those_of_its_form_are_read():
    window = Window([levels(4), levels(3)])

    assert window.samples == 7
    assert [len(one["image"]) for one in window] == [4, 3]


def test_batches_of_samples_stay_lists_of_samples():
    window = Window([(torch.rand(4, *IMAGE), boxes(4)), (torch.rand(2, *IMAGE), boxes(2, 2))])

    assert window.samples == 6
    assert [len(targets) for _, targets in window] == [4, 2]


def test_batch_that_is_read_otherwise_than_those_before_is_refused():
    with pytest.raises(InvalidInputError, match=r"hold samples, and those of batches before held fields.*split="):
        Window([levels(4), {"image": torch.rand(3, 5), "levels": boxes(3, 7)}])


def test_last_batch_of_one_is_read_as_those_before():
    triplets = [[torch.rand(samples, 6, 2) for _ in range(3)] for samples in (8, 8, 1)]

    assert Window(triplets).samples == 17


def test_along_the_first_dimension_reads_a_list_as_fields():
    assert count(images(5), autoaccum.Along(0)) == 3


@pytest.mark.parametrize("positions", [[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 0, 0]])
def test_flattened_sequences_are_refused_with_the_remedy(positions):
    ids = torch.ones(1, len(positions), dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([positions])}

    with pytest.raises(InvalidInputError, match=r"one row of 3 sequences.*collate_fn=list.*ListOfSamples"):
        count(batch)

    assert count(batch, autoaccum.Along(0)) == 1


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}])
def test_what_transformers_flattens_is_refused(options):
    collate = DataCollatorWithFlattening(**options)

    with pytest.raises(InvalidInputError, match=r"one row of 2 sequences"):
        count(dict(collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])))


def test_position_ids_of_one_sequence_are_none_of_many():
    ids = torch.ones(1, 4, dtype=torch.long)

    assert count({"input_ids": ids, "position_ids": torch.arange(4).unsqueeze(0)}) == 1
    for positions, mask in (([0, 0, 0, 1], [0, 0, 1, 1]), ([0, 1, 0, 0], [1, 1, 0, 0]), ([0, 0, 0, 0], [0, 0, 0, 1])):
        batch = {"input_ids": ids, "position_ids": torch.tensor([positions])}
        assert count(batch | {"attention_mask": torch.tensor([mask])}) == 1
        assert not any(positions) or count(batch) == 1
    assert count({"input_ids": ids.expand(2, 4), "position_ids": torch.tensor([[0, 1, 0, 1]] * 2)}) == 2


@pytest.mark.parametrize("tensors", [40, 4])
def test_message_on_unequal_first_dimensions_is_short(tensors):
    batch = {f"a rather long name of a tensor {number}": torch.zeros(number + 1, 5) for number in range(tensors)}

    with pytest.raises(InvalidInputError, match=r"must agree.*split=") as caught:
        count(batch)

    assert len(str(caught.value)) <= 300
