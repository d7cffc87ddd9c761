"""Losses of many forms on ranks: the gradient of the whole batch, and nobody waits."""

import itertools
import warnings

import pytest

import rank_losses
from rank_training import assert_trained_as

# What one rank showed, and the others did not hear of; a quotient of 0 and 0 that the others wait for.
QUICK = {
    ("three means", "of one length, but for one", False, 1, 24),
    ("two divisors, scaled", "of one length, but for one", False, 5, 7),
    ("three means", "some in which nothing counts", True, 1, 24),
    ("two means", "of one length, but for one", True, 2, 16),
    ("two divisors", "of one length, but for one", True, 2, 16),
    ("pair and mean", "of all lengths", True, 2, 16),
}


def cases():
    cuts = [(1, 24), (2, 16), (5, 7)]
    for loss, data, is_sharded, (size, target) in itertools.product(
        rank_losses.LOSSES, rank_losses.DATA, (False, True), cuts
    ):
        case = (loss, data, is_sharded, size, target)
        yield pytest.param(*case, marks=() if case in QUICK else pytest.mark.sweep)


@pytest.mark.parametrize(("loss", "data", "is_sharded", "micro_batch", "target_batch"), list(cases()))
def test_gradient_is_that_of_the_whole_batch(crew, loss, data, is_sharded, micro_batch, target_batch):
    asked = {"loss": loss, "data": data, "target_batch": target_batch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = rank_losses.train(0, 1, micro_batch=target_batch, **asked)

    found = crew.run("rank_losses:train", size=2, micro_batch=micro_batch, is_sharded=is_sharded, **asked)

    assert_trained_as(found, whole)


def test_part_in_which_a_pair_counts_nothing_adds_nothing(crew):
    whole = rank_losses.with_a_class_on_one_rank(0, 1)

    assert_trained_as(crew.run("rank_losses:with_a_class_on_one_rank", size=2), whole)


@pytest.mark.filterwarnings("ignore::autoaccum.LossWarning")  # in no choice of samples does something count in two
def test_ranks_on_which_nothing_counts_know_no_other_form_of_a_loss(crew):
    whole = rank_losses.of_one_token(0, 1)

    assert_trained_as(crew.run("rank_losses:of_one_token", size=2), whole)


@pytest.mark.parametrize(
    ("loss", "data"),
    [
        ("list", {"micro_batch": 1, "val_every": 1}),
        ("two divisors, scaled", {"micro_batch": 5, "val_every": 2, "but": 11, "nothing_counts": slice(16, 20)}),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.filterwarnings("ignore:autoaccum. loss 'loss' has terms that are divided by numbers of their own")
def test_what_an_evaluation_shows_of_a_loss_changes_no_gradient(crew, size, loss, data):
    whole = rank_losses.evaluated(0, 1, loss, **data)

    assert_trained_as(crew.run("rank_losses:evaluated", loss, size=size, **data), whole)
