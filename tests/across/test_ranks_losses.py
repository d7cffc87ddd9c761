"""Losses of many forms on ranks: the gradient of the whole batch, and nobody waits."""

import itertools
import warnings

import pytest

from support.models.small import a_few_of
from support.ranks import losses
from support.ranks.training import assert_trained_as

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
    for loss, data, is_sharded, (size, target) in itertools.product(losses.LOSSES, losses.DATA, (False, True), cuts):
        case = (loss, data, is_sharded, size, target)
        yield pytest.param(*case, marks=() if case in QUICK else pytest.mark.sweep)


@pytest.mark.parametrize(("loss", "data", "is_sharded", "micro_batch", "target_batch"), list(cases()))
def test_gradient_is_that_of_the_whole_batch(rank_pool, loss, data, is_sharded, micro_batch, target_batch):
    asked = {"loss": loss, "data": data, "target_batch": target_batch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = losses.train(0, 1, micro_batch=target_batch, **asked)

    found = rank_pool.run("losses:train", size=2, micro_batch=micro_batch, is_sharded=is_sharded, **asked)

    assert_trained_as(found, whole)


def test_part_in_which_a_pair_counts_nothing_adds_nothing(rank_pool):
    whole = losses.with_a_class_on_one_rank(0, 1)

    assert_trained_as(rank_pool.run("losses:with_a_class_on_one_rank", size=2), whole)


@pytest.mark.filterwarnings("ignore::autoaccum.LossWarning")  # in no choice of samples does something count in two
def test_ranks_on_which_nothing_counts_know_no_other_form_of_a_loss(rank_pool):
    whole = losses.of_one_token(0, 1)

    assert_trained_as(rank_pool.run("losses:of_one_token", size=2), whole)


EVALUATED = {
    "list": {"micro_batch": 1, "val_every": 1},
    "two divisors, scaled": {"micro_batch": 5, "val_every": 2, "but": 11, "nothing_counts": slice(16, 20)},
}


@pytest.mark.parametrize(("size", "loss"), a_few_of([2, 3], EVALUATED))
@pytest.mark.filterwarnings("ignore:autoaccum. loss 'loss' has terms that are divided by numbers of their own")
def test_what_an_evaluation_shows_of_a_loss_changes_no_gradient(rank_pool, size, loss):
    whole = losses.evaluated(0, 1, loss, **EVALUATED[loss])

    assert_trained_as(rank_pool.run("losses:evaluated", loss, size=size, **EVALUATED[loss]), whole)
