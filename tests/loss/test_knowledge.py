"""What several ranks, or single samples, show of the summands of a loss."""

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._data.batches import Window
from autoaccum._loss.knowledge import LossKnowledge
from autoaccum._loss.summands import ADDED, BY_SAMPLES, Known, Reduction
from by_summands import BySummands

LABELS, ROWS = ("labels", "[1]"), ("samples", "")


def knowing(**summands):
    made = LossKnowledge()
    made.learn({name: [known] for name, known in summands.items()})
    return made


def test_ranks_keep_the_hints_that_all_of_them_found():
    first = knowing(loss=Known(Reduction.MEAN, hints={LABELS: 1.0, ROWS: 1.0}))
    second = knowing(loss=Known(Reduction.MEAN, hints={LABELS: 1.0}), other=ADDED)
    said = [first.shared(), second.shared()]

    first.adopt(said)
    second.adopt(said)

    assert first.in_short() == second.in_short()
    assert first.summands["loss"][0].hints == {LABELS: 1.0}
    assert first.summands.keys() == {"loss", "other"}


def test_checked_rank_is_believed_before_one_that_guesses():
    guess = Known(Reduction.SUM, is_guess=True)
    first, second = knowing(loss=guess), knowing(loss=Known(Reduction.MEAN))

    first.adopt([first.shared(), second.shared()])

    assert first.summands["loss"][0].reduction is Reduction.MEAN


def test_ranks_that_contradict_each_other_are_refused():
    first, second = knowing(loss=ADDED), knowing(loss=Known(Reduction.MEAN))

    with pytest.raises(autoaccum.InvalidInputError, match="a sum, and a mean; return the same form on all"):
        first.adopt([first.shared(), second.shared()])


def test_losses_that_arguments_state_need_no_check():
    assert LossKnowledge(BY_SAMPLES).needs_no_check
    assert not LossKnowledge().needs_no_check


def test_loss_of_torch_that_is_exchanged_for_another_is_not_stated_any_more():
    made = LossKnowledge()

    made.state("loss", BY_SAMPLES)
    assert made.is_stated
    made.state("loss", None)

    assert not made.is_stated
    assert made.summands == {}


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (lambda outputs: outputs.sum(1).mean(), Reduction.MEAN),
        (lambda outputs: outputs.sum() / 64, Reduction.SUM),
        (lambda outputs: outputs.sum(), Reduction.SUM),
    ],
)
def test_single_samples_show_what_their_graphs_say(loss, reduction):
    model = nn.Linear(3, 2)
    made = BySummands(lambda inputs: loss(model(inputs)), model)

    (known,) = made.check().alone(Window([torch.randn(5, 3)]))["loss"]

    assert known.reduction is reduction
