"""Batches of preferences, in pairs of a chosen and a rejected row."""

import pytest
import torch

from autoaccum import InvalidInputError
from autoaccum.integrations._paired_rows import PairedRows


def test_pairs_are_counted_in_rows_of_which_the_chosen_come_first():
    assert PairedRows().count({"input_ids": torch.zeros(6, 4)}) == 3


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"input_ids": torch.zeros(5, 4)}, "5 rows"),
        ({"chosen_input_ids": torch.zeros(3, 4), "rejected_input_ids": torch.zeros(3, 5)}, "train with TRL 1.16"),
    ],
)
def test_batches_of_another_form_are_refused(batch, said):
    with pytest.raises(InvalidInputError, match=said):
        PairedRows().count(batch)


def test_patches_of_images_which_are_no_rows_of_pairs_are_refused():
    batch = {"input_ids": torch.zeros(4, 7), "pixel_values": torch.zeros(64, 1), "image_grid_thw": torch.ones(4, 3)}

    for call in (lambda: PairedRows().cut(batch, [1, 1]), lambda: PairedRows().join([batch, batch])):
        with pytest.raises(InvalidInputError, match=r"pixel_values has 64 rows for 2 pairs.* pass split="):
            call()


def test_values_of_pairs_and_of_rows_are_cut_and_single_numbers_are_passed_on():
    batch = {"input_ids": torch.arange(8).reshape(4, 2), "margin": torch.arange(2.0), "scale": torch.tensor(3.0)}

    _, second = PairedRows().cut(batch, [1, 1])

    assert second["input_ids"].tolist() == [[2, 3], [6, 7]]
    assert (second["margin"].tolist(), second["scale"]) == ([1.0], 3.0)
