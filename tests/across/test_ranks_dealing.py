"""A window's samples go to the ranks that have least to do; the window and its gradient stay the same."""

import math

import pytest
import torch

import autoaccum
from support.data.ragged import lengths_of
from support.models.small import a_few_of, assert_bitwise
from support.ranks import dealing

FAR = {"rtol": 1e-12, "atol": 1e-12}
# One of the first rank's samples is as long as all others together.
LONG = [200] + [4, 5, 6, 7] * 8
WINDOW = {"target_batch": 24, "micro_batch": 5}


def load_of(found):
    """The tokens of a rank in the last window."""
    return sum(sum(lengths) for lengths in found["seen"][-len(found["cuts"][-1]) :])


@pytest.mark.parametrize(("size", "micro_batch"), a_few_of([2, 4], ["auto", 5]))
def test_parameters_are_those_of_one_process_and_the_ranks_finish_together(rank_pool, size, micro_batch):
    options = {"target_batch": 24, "micro_batch": micro_batch, "shuffle": True}
    alone = dealing.train(0, 1, **options)

    found = rank_pool.run("dealing:train", size=size, **options)

    for one in found:
        torch.testing.assert_close(one["parameters"], alone["parameters"], **FAR)
        assert one["samples"] == alone["samples"]
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        assert torch.equal(one["parameters"], found[0]["parameters"])
    if micro_batch == 5:  # else costs are those that the clock has measured
        loads = list(map(load_of, found))
        assert max(loads) <= 1.03 * max(sum(loads) / size, 24)


def test_rank_with_one_sample_as_long_as_all_others_has_no_other(rank_pool):
    first, second = rank_pool.run("dealing:train", LONG[:24], size=2, loss_reduction="mean", **WINDOW)

    assert first["cuts"] == [(1,)]
    assert sum(second["cuts"][0]) == 23
    assert first["seen"][-1] == [200]


def test_run_that_goes_on_within_an_epoch_ends_where_the_undisturbed_one_ends(rank_pool, tmp_path):
    options = {"size": 2, "shuffle": True, "dropout": 0.2, **WINDOW}
    undisturbed = rank_pool.run("dealing:train", max_steps=4, **options)
    rank_pool.run("dealing:train", max_steps=2, checkpoint=tmp_path, **options)

    found = rank_pool.run("dealing:train", max_steps=4, checkpoint=tmp_path, **options)

    for one, other in zip(found, undisturbed, strict=True):
        assert one["resumed"] == 2
        assert one["cuts"] == other["cuts"][2:]
        assert_bitwise(one["parameters"], other["parameters"])


def test_windows_of_tokens_are_dealt_out_too(rank_pool):
    options = {"target_tokens": 150, "micro_batch": 5}

    found = rank_pool.run("dealing:train", size=2, **options)

    assert sum(found[0]["samples"]) == 96
    loads = list(map(load_of, found))
    assert max(loads) <= 1.1 * max(sum(loads) / 2, 24)
    assert torch.equal(found[0]["parameters"], found[1]["parameters"])


@pytest.mark.parametrize("samples", [49, 60])
def test_short_last_window_is_used_once_or_left_out(rank_pool, samples):
    options = {"lengths": lengths_of(samples), **WINDOW}
    alone = dealing.train(0, 1, **options)

    found = rank_pool.run("dealing:train", size=4, **options)
    dropped = rank_pool.run("dealing:train", size=2, drop_last=True, **options)

    for one in found:
        assert one["samples"] == alone["samples"]
        torch.testing.assert_close(one["parameters"], alone["parameters"], **FAR)
    assert all(one["samples"] == [24, 24] for one in dropped)


def test_evaluation_between_windows_is_that_of_one_process(rank_pool):
    options = {"evaluates": True, "val_every": 2, **WINDOW}
    alone = dealing.train(0, 1, **options)

    for one in rank_pool.run("dealing:train", size=2, **options):
        torch.testing.assert_close(one["evaluations"], alone["evaluations"], **FAR)
        torch.testing.assert_close(one["parameters"], alone["parameters"], **FAR)


def test_rank_that_lacks_memory_repeats_its_part_and_the_parameters_stay_those_of_one_process(rank_pool):
    options = {"target_batch": 24, "micro_batch": "auto"}
    alone = dealing.train(0, 1, **options)

    found = rank_pool.run("dealing:in_memory_of", 60_000, None, size=2, **options)

    assert sum(one["oom"] for one in found) or max(map(len, found[0]["cuts"])) > 1
    for one in found:
        torch.testing.assert_close(one["parameters"], alone["parameters"], **FAR)


def test_sample_wider_than_any_memory_is_named_by_its_place_in_the_window_and_ends_all(rank_pool):
    lengths = [4, 5, 6, 7] * 8
    lengths[15] = 4000
    options = {"target_batch": 24, "micro_batch": "auto", "loss_reduction": "mean"}  # so that no losses are tried

    answers = rank_pool.answers("dealing:in_memory_of", 60_000, lengths, size=2, **options)

    kinds = [type(answer) for answer in answers]
    assert sorted(kind.__name__ for kind in kinds) == ["DoesNotFitError", "RankFailedError"], answers
    assert "sample 15 of the window" in str(answers[kinds.index(autoaccum.DoesNotFitError)])


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf, "long"])
def test_cost_that_is_none_ends_all_ranks_with_its_value(rank_pool, cost):
    for answer in rank_pool.answers("dealing:train", size=2, cost=cost, **WINDOW):
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        assert f"split=Costed: cost returned {cost!r}; return a number from 0" in str(answer)


def test_samples_of_width_0_are_dealt_out_like_any(rank_pool):
    options = {"lengths": lengths_of(96), "cost": 0, **WINDOW}
    alone = dealing.train(0, 1, **options)

    for one in rank_pool.run("dealing:train", size=2, **options):
        torch.testing.assert_close(one["parameters"], alone["parameters"], **FAR)


@pytest.mark.parametrize(("kind", "pickled"), [(dealing.Unsendable, 1), (dealing.Unreadable, 12)])
def test_samples_that_cannot_be_sent_stay_which_is_said_once_and_not_tried_again(rank_pool, kind, pickled):
    options = {"lengths": LONG[:24] * 4, **WINDOW}
    alone = dealing.train(0, 1, kind=kind, **options)

    answers = rank_pool.run("dealing:heard", size=2, kind=kind, **options)

    for found, _ in answers:
        torch.testing.assert_close(found["parameters"], alone["parameters"], **FAR)
        assert [sum(cut) for cut in found["cuts"]] == [12] * 4
        assert found["pickled"] <= pickled  # those of one window at most
    (first, spoken), (second, _) = answers
    assert first["pickled"] + second["pickled"]
    assert spoken.count("samples stay on the ranks that load them, since they cannot be sent to others (TypeError") == 1


def test_rank_that_has_no_room_for_samples_leaves_them_where_they_are_on_all(rank_pool):
    first, second = rank_pool.run("dealing:without_room", 1, size=2)

    assert (first[0], second[0]) == ([20_000_000] * 3, [1] * 3)
    assert "since they cannot be sent to others (" in first[1]
    assert "allocate" in first[1]


def test_model_with_batchnorm_computes_samples_as_loaded_since_it_refuses_a_single_one(rank_pool):
    for cuts in rank_pool.run("dealing:train_normed", LONG[:24], size=2, target_batch=24, micro_batch=4):
        assert cuts == [(4, 4, 4)]


def test_samples_are_not_sent_where_that_takes_longer_than_ranks_would_wait(rank_pool):
    for seconds, moved in ((1.0, [True] * 4), (1e-9, [True, False, False, False])):
        for found in rank_pool.run("dealing:dealt_in_turn", 4, seconds, size=2):
            as_loaded = [[8, 6, 4], [1, 1, 1]]
            assert [one not in as_loaded for one in found] == moved


def test_exchange_takes_no_more_than_the_samples_of_a_window_beside_those_of_a_rank(rank_pool):
    for peak, of_window, held in rank_pool.run("dealing:peak_of_exchange", size=2):
        assert sum(held) == 11_000_000  # so some were sent
        assert peak <= of_window


def test_no_sample_that_another_rank_computes_is_held_in_a_step(rank_pool):
    options = {"lengths": LONG[:24] * 2, "kind": dealing.Counted, "loss_reduction": "mean", **WINDOW}

    first, second = rank_pool.run("dealing:train", size=2, **options)

    assert first["pickled"]
    for found in (first, second):
        own, of_loader = sum(found["cuts"][-1]), 6  # the loader's last batch
        assert max(found["alive"][-len(found["cuts"][-1]) :]) <= max(own, 1 + of_loader)


def test_samples_stay_in_windows_in_which_noise_is_measured(rank_pool):
    for swaps in rank_pool.run("dealing:sizes_swapped", LONG[:24] * 4, size=2, noise_scale=2, **WINDOW):
        assert len(swaps) == 2  # of four windows


def test_samples_of_equal_cost_are_not_sent(rank_pool):
    for swaps in rank_pool.run("dealing:sizes_swapped", [9] * 48, size=2, **WINDOW):
        assert swaps == []


@pytest.mark.parametrize("who", [0, 1])
def test_rank_that_dies_as_samples_are_sent_ends_all(rank_pool, who):
    answers = rank_pool.answers("dealing:killed", who, size=2, wait_s=10, **WINDOW)

    assert "is gone" in str(answers[who])
    assert isinstance(answers[1 - who], autoaccum.RankFailedError), answers
