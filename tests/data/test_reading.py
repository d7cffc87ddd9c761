"""Lists in a loader's batch are read as samples or as fields; what stays open is refused."""

import pytest
import torch
from torch.utils.data import default_collate
from transformers import BatchEncoding

import autoaccum
from autoaccum._data.batches import Window, count
from autoaccum.errors import InvalidInputError

IMAGE = (3, 8, 8)


def images(number, *shape):
    return [torch.rand(*(shape or IMAGE)) for _ in range(number)]


def boxes(number, each=2):
    return [{"boxes": torch.rand(each, 4), "labels": torch.ones(each, dtype=torch.long)} for _ in range(number)]


SAMPLES = {
    "images with dictionaries": ((images(5), boxes(5, 3)), 5),
    "as a list of lists": ([images(5), boxes(5, 3)], 5),
    "stacked images with dictionaries": ((torch.rand(4, *IMAGE), boxes(4)), 4),
    "BatchEncoding": (BatchEncoding({"pixel_values": torch.rand(4, *IMAGE), "labels": boxes(4)}), 4),
}


@pytest.mark.parametrize(("batch", "samples"), SAMPLES.values(), ids=SAMPLES)
def test_list_beside_targets_of_its_length_holds_samples(batch, samples):
    assert count(batch) == samples


def test_lists_of_samples_are_cut_and_joined():
    first, second = (images(3), boxes(3)), (images(2), boxes(2, 5))
    window = Window([first, second])

    pictures, targets = window.cut(2, 5)

    assert [id(one) for one in pictures] == [id(one) for one in (first[0][2], *second[0])]
    assert [len(one["boxes"]) for one in targets] == [2, 5, 5]
    assert len(window.tensors()) == 3 * 5


COLLATED = {
    "pair": lambda: (torch.rand(10), torch.rand(1)),
    "ids, mask, labels": lambda: tuple(torch.randint(9, (7,)) for _ in range(3)),
    "two inputs, two targets": lambda: ((torch.rand(5), torch.rand(5)), (torch.rand(1), torch.rand(1))),
    "triplet": lambda: ({"ids": torch.rand(4)}, {"ids": torch.rand(4)}, {"ids": torch.rand(4)}),
    "views": lambda: {"ids": torch.rand(4), "views": [torch.rand(3), torch.rand(3)]},
}


@pytest.mark.parametrize("sample", COLLATED.values(), ids=COLLATED)
def test_what_default_collate_makes_is_read_by_its_first_dimension(sample):
    assert count(default_collate([sample() for _ in range(32)])) == 32


OPEN = {
    "images": (images(5), 5, 3),
    "one sequence": (([torch.rand(7, 6)], [torch.rand(7)]), 1, 7),
    "sequences and tags": ((images(4, 7, 6), images(4, 7)), 4, 7),
    "images in a mapping": ({"images": images(5)}, 5, 3),
    "images with labels": ((images(5), torch.zeros(5)), 5, 3),
    "images and numbers": ((images(5), [0, 1, 0, 1, 1]), 5, 3),
    "many dictionaries": ([{"image": image} for image in images(9)], 9, 3),
}


@pytest.mark.parametrize(("batch", "samples", "fields"), OPEN.values(), ids=OPEN)
def test_list_that_can_be_read_both_ways_is_refused_with_both_readings(batch, samples, fields):
    with pytest.raises(InvalidInputError) as caught:
        count(batch)

    message = str(caught.value)
    assert f"{samples} samples, or {samples} fields of {fields} samples" in message
    assert "split=autoaccum.ListOfSamples(collate)" in message
    assert "split=autoaccum.Along(0)" in message
    assert autoaccum.Along(0).count(images(5)) == 3


def levels(samples):
    """What default_collate makes of samples with three feature levels each."""
    sample = {"image": torch.rand(5), "levels": [{"heat": torch.rand(4), "size": torch.rand(2)} for _ in range(3)]}
    return default_collate([sample] * samples)


def test_first_batch_decides_how_those_of_its_form_are_read():
    fields = Window([levels(4), levels(3)])
    samples = Window([(torch.rand(4, *IMAGE), boxes(4)), (torch.rand(2, *IMAGE), boxes(2, 2))])
    triplets = Window([[torch.rand(number, 6, 2) for _ in range(3)] for number in (8, 8, 1)])

    assert [len(one["image"]) for one in fields] == [4, 3]
    assert [len(targets) for _, targets in samples] == [4, 2]
    assert (fields.samples, samples.samples, triplets.samples) == (7, 6, 17)
    with pytest.raises(InvalidInputError, match=r"hold samples, and those of batches before held fields.*split="):
        Window([levels(4), {"image": torch.rand(3, 5), "levels": boxes(3, 7)}])


def summed(model, batch):
    return model(sum(batch)).square().mean()


# Three fields of four samples each could be three samples as well.
READ = {
    "split=": (autoaccum.Along(0), [4] * 6),
    "the first batch": (None, [8, 4, 4, 4, 4]),
}


@pytest.mark.parametrize("loop", ["runner", "accumulator", "fit"])
@pytest.mark.parametrize(("split", "sizes"), READ.values(), ids=READ)
def test_lists_are_read_alike_in_all_windows(split, sizes, loop):
    model = torch.nn.Linear(2, 1)
    batches = [[torch.randn(size, 6, 2) for _ in range(3)] for size in sizes]
    options = {"split": split, "device": "cpu"}

    if loop == "accumulator":
        accumulator = autoaccum.Accumulator(model, forward=summed, micro_batch=2, **options)
        made = [accumulator.backward(batch).micro_batches for batch in batches]
    elif loop == "runner":
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        runner = autoaccum.Runner(model, optimizer, autoaccum.plan(8, 2), forward=summed, **options)
        made = [runner.step(batch).micro_batches for batch in batches]
    else:
        result = autoaccum.fit(model, batches, 4, forward=summed, micro_batch=2, progress=False, **options)
        made = [report.micro_batches for report in result.history]

    assert sum(map(sum, made)) == sum(sizes)


@pytest.mark.parametrize("positions", [[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 0, 0]])
def test_flattened_sequences_are_refused_with_the_remedy(positions):
    ids = torch.ones(1, len(positions), dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([positions])}

    with pytest.raises(
        InvalidInputError,
        match=r"one row of 3 sequences.*collate_fn=list.*ListOfSamples.*split=autoaccum.PackedRows\(\)",
    ):
        count(batch)

    assert count(batch, autoaccum.Along(0)) == 1
