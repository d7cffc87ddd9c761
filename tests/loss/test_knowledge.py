"""What several ranks show of the summands of a loss."""

import pytest

import autoaccum
from autoaccum._loss.knowledge import LossKnowledge
from autoaccum._loss.summands import ADDED, BY_SAMPLES, Known, Reduction

LABELS, ROWS, KEPT = ("labels", "[1]"), ("samples", ""), ("the sum", "kept")


def knowing(**summands):
    made = LossKnowledge()
    made.learn({name: [known] for name, known in summands.items()}, {})
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
