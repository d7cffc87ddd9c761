"""Several ranks with an accumulator get the gradient of all their batches together, also where one lacks memory."""

import re

import pytest
import torch

import autoaccum
from support.ranks import accumulating
from support.ranks.training import FAR, assert_alike, far


@pytest.mark.parametrize("loss", accumulating.LOSSES)
@pytest.mark.parametrize("most", [(), ((1, 2),)], ids=["enough", "one lacks memory"])
def test_parameters_are_those_of_one_process_with_the_whole_batch(rank_pool, loss, most):
    alone = accumulating.train(0, 1, loss=loss)

    found = rank_pool.run("accumulating:train", size=2, loss=loss, most=most)

    assert_alike(found)
    assert far(found[0]["parameters"], alone["parameters"]) < FAR
    assert found[0]["losses"] == pytest.approx(alone["losses"], rel=1e-12)
    assert found[0]["samples"] == [accumulating.BATCH] * 3
    assert [one["oom_events"] > 0 for one in found] == [False, bool(most)]


def test_sum_over_the_tokens_of_all_ranks_is_one_where_one_sample_fits_at_once(rank_pool):
    whole = accumulating.divided(0, 1)

    found = rank_pool.run("accumulating:divided", size=2, most=1)

    assert_alike(found)
    assert far(found[0]["parameters"], whole["parameters"]) < FAR
    assert found[0]["losses"] == pytest.approx(whole["losses"], rel=1e-12)


def test_batches_add_up_and_parameters_are_frozen_on_all_ranks(rank_pool):
    alone = accumulating.train(0, 1, twice=True, frozen_at=1)

    found = rank_pool.run("accumulating:train", size=3, twice=True, frozen_at=1, most=((0, 1), (2, 3)))

    assert_alike(found)
    assert far(found[0]["parameters"], alone["parameters"]) < FAR


def test_statistics_of_batchnorm_are_alike(rank_pool):
    assert_alike(rank_pool.run("accumulating:train", size=2, norm=True, most=((0, 3),)))


def test_error_on_one_rank_ends_the_others_at_once(rank_pool):
    first, second = rank_pool.answers("accumulating:train", size=2, fails=(1,))

    assert isinstance(first, autoaccum.RankFailedError)
    assert "the user's own" in str(first)
    assert isinstance(second, LookupError)


def test_sample_that_does_not_fit_on_one_rank_ends_all(rank_pool):
    first, second = rank_pool.answers("accumulating:train", size=2, most=((0, 0),))

    assert isinstance(first, autoaccum.DoesNotFitError)
    assert isinstance(second, autoaccum.RankFailedError)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_models_that_reduce_gradients_in_every_pass_are_refused(rank_pool, is_compiled):
    for said in rank_pool.run("accumulating:wrapped", size=2, is_compiled=is_compiled):
        assert len(said) == 1 + is_compiled  # `fit` trains the module inside of one that is only wrapped
        assert all(re.search(r"DistributedDataParallel.* model\.compile\(\)", one) for one in said)


@pytest.mark.parametrize("loss", ["pair", "module"])
def test_gradients_of_parameters_that_come_in_the_middle_of_a_step_are_added_up(rank_pool, loss):
    alone = accumulating.growing(0, 1, loss)

    for found in rank_pool.run("accumulating:growing", loss, size=2):
        assert far(found, alone) < FAR


def test_gradients_of_a_layer_that_is_unfrozen_between_steps_are_added_up(rank_pool):
    first, second = rank_pool.run("accumulating:unfreezing", size=2)

    assert [[gradient is None for gradient in batch] for batch in first] == [[True] * 2] * 2 + [[False] * 2] * 2
    for one, other in zip(first[2:], second[2:], strict=True):
        assert all(map(torch.equal, one, other))
