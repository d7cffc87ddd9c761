"""Which tensors of a batch may say what counts, and what the micro-batches of a cut weigh by them."""

import pytest
import torch
from autoaccum._loss.counting import constants_of, is_pair, tallies_of, tallies_of_each, target_tensors
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autoaccum._data.batches import Window
from autoaccum._loss.objective import Objective
from autoaccum._loss.weighting import Over, Weighting
from autoaccum._system.notices import Notices

LABELS = torch.tensor([[1, -100], [2, 3], [-100, -100], [4, 5]])


def test_targets_of_a_pair_are_its_second_half():
    assert is_pair((1, 2))
    assert set(target_tensors((torch.zeros(4), LABELS))) == {""}
    assert set(target_tensors((torch.zeros(4), (LABELS, LABELS)))) == {"0", "1"}
    assert set(target_tensors([torch.zeros(4), {"y": LABELS}])) == {"y"}
    assert target_tensors((torch.zeros(4), torch.tensor(3))) == {}


def test_targets_of_a_mapping_are_what_is_named_so_then_masks_and_whole_numbers():
    batch = {
        "pixels": torch.zeros(4, 3, 8, 8).byte(),
        "inputs": torch.zeros(4, 5),
        "attention_mask": torch.zeros(4, 2),
        "ids": torch.zeros(4, 2).long(),
        "causal_mask": torch.zeros(4, 1, 2, 2).bool(),
        "labels": torch.zeros(4, 2, 2, 2),
        "temperature": torch.tensor(1),
        "names": ["a", "b", "c", "d"],
    }

    assert list(target_tensors(batch)) == ["labels", "attention_mask", "ids"]


def test_tallies_follow_the_pieces_of_a_window():
    window = Window([(LABELS[:3], LABELS[:3]), (LABELS[3:], LABELS[3:])])
    counted = Weighting(Over.COUNTED)

    assert tallies_of(counted, window, [2, 2]) == [3, 2]
    assert tallies_of(counted, window, [4]) == [5]
    assert tallies_of(Weighting(Over.SAMPLES), window, [3, 1]) == [3, 1]
    assert tallies_of_each([counted, Weighting(Over.SHIFTED)], window, 1, 4).tolist() == [[2, 0, 2], [1, 0, 1]]


def test_where_every_target_counts_samples_weigh_alike_and_nothing_is_counted():
    targets = torch.ones(4, 3).long()

    assert tallies_of(Weighting(Over.COUNTED), Window([(targets, targets)]), [3, 1]) == [3, 1]


def test_constants_of_several_pieces_are_what_all_of_them_hold():
    window = Window([(LABELS, torch.tensor([0, 0, 0, 7])), (LABELS, torch.tensor([7, 7, 7, 0]))])

    assert constants_of(window, 0, 3) == {("", 0)}
    assert constants_of(window, 3, 7) == {("", 7)}
    assert constants_of(window, 2, 5) == set()
    assert constants_of(window, 3, 8) == set()


@given(first=st.integers(1, 8), stops=st.sets(st.integers(10, 19)), seed=st.integers(0, 99))
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1e-8, 0.3, 1 / 3, 7.0])),
        nn.CrossEntropyLoss(reduction="sum"),
        None,
    ],
    ids=["counted", "class weights", "sum", "samples"],
)
def test_factors_of_a_micro_batch_do_not_depend_on_the_cut_of_the_rest(loss, first, stops, seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 4, (20, 3), generator=generator)
    targets[torch.rand(20, 3, generator=generator) < 0.3] = -100
    targets[0] = 1
    window = Window([(targets[:7], targets[:7]), (targets[7:], targets[7:])])
    objective = Objective(nn.Identity(), loss, forward=None, loss_reduction=None, notices=Notices(silent=True))
    others = [b - a for a, b in zip([first, *sorted(stops)], [*sorted(stops), 20], strict=True)]

    one, other = (objective.factors(window, [first, *rest])[0] for rest in (others, [1, 19 - first]))

    assert one == other
