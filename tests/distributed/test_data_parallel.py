"""What ranks send each other in a window, and what becomes of a rank that does not answer."""

import pytest

import autoaccum
from support.ranks.training import assert_alike

# "My part is done", and "ready to step"; gradients in one bucket, and losses.
STEADY = ["all_gather", "all_gather", "all_reduce", "all_reduce"]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shard_data", [False, True])
def test_steady_window_takes_two_messages_beside_the_gradients_and_losses(rank_pool, shard_data, drop_last):
    for calls in rank_pool.run("messages:counted", 6, size=2, shard_data=shard_data, drop_last=drop_last):
        assert calls == STEADY


def test_clipped_window_takes_the_norm_in_addition(rank_pool):
    for calls in rank_pool.run("messages:counted", 6, size=2, shard_data=True, clip_grad_norm=1.0):
        assert calls == [*STEADY, "all_reduce"]


def test_messages_grow_in_proportion_to_the_parameters_and_in_steady_windows_not_at_all(rank_pool):
    none, some, many = (rank_pool.run("messages:lengths", layers, size=2)[0] for layers in (0, 50, 200))

    assert many[0] - none[0] <= 4.2 * (some[0] - none[0])
    assert none[1:] == some[1:] == many[1:]


def test_group_between_hosts_is_made_once_for_all_calls(rank_pool):
    assert rank_pool.run("messages:groups", size=2) == [1, 1]


@pytest.mark.parametrize("size", [2, 4])
def test_rank_that_is_killed_ends_the_others(rank_pool, size):
    answers = rank_pool.answers("messages:not_answering", 1, "killed", wait_s=8, size=size)

    assert "exit code -9" in str(answers.pop(1))
    for answer in answers:
        assert isinstance(answer, autoaccum.RankFailedError), answer


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_rank_that_answers_too_late_ends_with_all_others(rank_pool, size):
    for answer in rank_pool.answers("messages:not_answering", 1, "asleep", wait_s=2, size=size):
        assert isinstance(answer, autoaccum.RankFailedError), answer


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_rank_that_is_stopped_for_a_while_is_waited_for(rank_pool, size):
    expected = rank_pool.run("messages:not_answering", 1, "", size=size)

    found = rank_pool.run("messages:not_answering", 1, "stopped", size=size)

    assert_alike([*found, *expected])


def test_rank_that_cannot_send_says_why_and_does_not_accuse_another(rank_pool):
    answers = rank_pool.answers("messages:one_cannot_send", wait_s=3, size=2)

    assert all(isinstance(answer, autoaccum.RankFailedError) for answer in answers), answers
    assert "rank 1 could not exchange data with the others (Invalid scalar type)" in str(answers[1])


def test_what_ran_out_of_memory_on_one_rank_is_not_tried_by_those_with_as_much(rank_pool):
    found = rank_pool.run("messages:lacking_once", ["1GiB", "1GiB", "2GiB"], size=3)

    assert [len(cut) for cut in found[0][:4]] == [1, 1, 2, 2]
    assert [len(cut) for cut in found[1][:4]] == [1, 1, 1, 2]
    assert [len(cut) for cut in found[2][:4]] == [1, 1, 1, 1]
