"""What stands for a window where every rank goes through all of a loader."""

import pytest
import torch

from autoaccum._data.batches import Window
from autoaccum._distributed.same_windows import GoneThrough
from autoaccum._system.notices import Notices


def note(*targets):
    gone = GoneThrough(None, Notices(silent=True))
    gone.begin(Window([(torch.zeros(4, 2), one) for one in targets]))
    return gone.note


@pytest.mark.parametrize(
    "targets",
    [None, ["a", "b", "c", "d"], torch.tensor(3), 1.5, torch.zeros(4, 0, dtype=torch.long), torch.randn(4)],
    ids=["none", "texts", "one number for all", "a plain number", "rows without a number", "floating"],
)
def test_targets_that_are_no_whole_numbers_stand_for_their_number_of_samples_alone(targets):
    assert note(targets) == note(None)


def test_another_order_and_other_targets_stand_for_another_window():
    first, second = torch.arange(4), torch.arange(4, 8)

    assert len({note(first, second), note(second, first), note(first.flip(0), second), note({"y": first}, second)}) >= 3
    assert note(first, second) == note(first.clone(), second.clone())


@pytest.mark.parametrize("name", ["labels", "attention_mask", "input_ids"])
def test_order_shows_in_mappings_too(name):
    def noted(rows):
        gone = GoneThrough(None, Notices(silent=True))
        gone.begin(Window([{"images": torch.zeros(4, 2), name: rows}]))
        return gone.note

    rows = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1]])
    assert noted(rows) == noted(rows.clone())
    assert noted(rows) != noted(rows.flip(0))
