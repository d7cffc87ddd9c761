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
