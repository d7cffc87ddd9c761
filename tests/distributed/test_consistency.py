"""What ranks must have alike: a difference is refused on all of them, and none is seen where there is none."""

import pytest
import torch

import autoaccum
from support.ranks import differences
from support.ranks.training import assert_alike


def assert_refused(answers, *, names):
    assert len(set(map(str, answers))) == 1, answers
    for answer in answers:
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        assert names in str(answer)


@pytest.mark.parametrize(
    ("what", "number"),
    [(what, number) for what, cases in differences.AT_THE_START.items() for number in range(len(cases))],
)
def test_what_differs_at_the_start_is_refused_on_all_ranks(rank_pool, what, number):
    answers = rank_pool.answers("differences:differing_at_the_start", what, number, 1, size=2)

    assert_refused(answers, names=f"rank 1 has another {what} than rank 0")


@pytest.mark.parametrize(("who", "named"), [(0, 1), (2, 2)])
def test_difference_names_the_rank_the_setting_and_both_values(rank_pool, who, named):
    answers = rank_pool.answers("differences:differing_at_the_start", "loss", 1, who, size=3)

    there, here = (f"label_smoothing={value} of CrossEntropyLoss" for value in ((0, 0.5) if who == 0 else (0.5, 0)))
    assert_refused(answers, names=f"rank {named} has another loss than rank 0 ({there}, and {here} on rank 0)")


@pytest.mark.parametrize("what", differences.CHANGES)
def test_setting_that_a_callback_changes_on_one_rank_is_refused_before_the_next_optimizer_step(rank_pool, what):
    found = rank_pool.run("differences:differing_later", what, 1, size=2)

    assert len({one["error"] for one in found}) == 1
    assert "rank 1 has another optimizer than rank 0" in found[0]["error"]
    assert [(one["windows"], one["are as before"], one["gradients"]) for one in found] == [(2, True, 0)] * 2
    assert all(map(torch.equal, found[0]["parameters"], found[1]["parameters"]))


@pytest.mark.parametrize("who", [0, 2])
def test_rate_that_a_callback_sets_is_refused_on_all_of_three_ranks_with_both_values(rank_pool, who):
    found = rank_pool.run("differences:differing_later", "lr of the last group", who, size=3)

    named, there, here = (1, "0.01", "0.05") if who == 0 else (2, "0.05", "0.01")
    for one in found:
        assert f"rank {named} has another optimizer than rank 0 (lr={there} in group 1, and lr={here}" in one["error"]
        assert (one["windows"], one["are as before"]) == (2, True)


@pytest.mark.parametrize("what", ["lr", "tensor"])
def test_rate_that_a_callback_sets_on_one_rank_is_refused_in_a_sharded_model(rank_pool, what):
    found = rank_pool.run("differences:differing_later", what, 1, is_sharded=True, size=2)

    for one in found:
        assert "rank 1 has another optimizer than rank 0 (lr=" in one["error"]
        assert (one["windows"], one["are as before"]) == (2, True)


def test_schedules_of_other_lengths_are_refused_before_parameters_differ(rank_pool):
    found = rank_pool.run("differences:scheduled_otherwise", 1, size=2)

    for one in found:
        assert "rank 1 has another optimizer than rank 0 (lr=" in one["error"]
        assert (one["windows"], one["are as before"]) == (1, True)


@pytest.mark.parametrize("what", differences.MAY_DIFFER)
def test_what_is_alike_or_may_differ_is_not_refused(rank_pool, what):
    assert_alike(rank_pool.run("differences:alike", what, size=2))


@pytest.mark.parametrize("what", differences.ACCUMULATORS)
def test_accumulators_that_differ_are_refused_on_all_ranks(rank_pool, what):
    answers = rank_pool.answers("differences:accumulators", what, 1, size=2)

    assert_refused(answers, names=f"rank 1 has another {what} than rank 0")


@pytest.mark.parametrize(
    ("what", "named", "windows"),
    [
        *(("parameter", "parameter '0.weight'", 3), ("signs", "parameter '0.bias'", 3)),
        *(("frozen", "parameter '3.bias'", 3), ("state", "parameter '0.weight'", 3)),
        *(("no state", "parameter '0.weight'", 3), ("attribute", "parameter '0.weight'", 1)),
        *(("pre-hook", "parameter '0.weight'", 1), ("post-hook", "parameter '0.weight'", 1)),
    ],
)
def test_what_one_rank_writes_by_itself_is_refused_on_all_before_the_next_window_that_is_due(
    rank_pool, what, named, windows
):
    found = rank_pool.run("differences:drifting", what, 1, size=2)

    assert found[0] == found[1]
    error, made = found[0]
    assert f"the {named} differs from that of rank 0 on rank 1" in error
    assert "compare what callbacks, the optimizer and its hooks do" in error
    assert made == windows


@pytest.mark.parametrize(("who", "named"), [(0, "rank 1, rank 2"), (2, "rank 2")])
def test_parameter_that_differs_names_all_ranks_that_differ_from_rank_0(rank_pool, who, named):
    found = rank_pool.run("differences:drifting", "parameter", who, size=3)

    assert [f"'0.weight' differs from that of rank 0 on {named}: " in error for error, _ in found] == [True] * 3


@pytest.mark.parametrize(
    ("what", "named"),
    [("parameter", "parameter"), *((one, "optimizer's momentum_buffer of") for one in ("state", "no state"))],
)
def test_what_one_rank_writes_after_the_last_window_is_refused_at_the_end(rank_pool, what, named):
    found = rank_pool.run("differences:drifting", what, 1, window=3, last=3, size=2)

    assert found[0] == found[1]
    assert f"the {named} '0.weight' differs from that of rank 0 on rank 1" in found[0][0]
    assert found[0][1] == 3


def test_no_checkpoint_is_written_of_ranks_that_differ(rank_pool, tmp_path):
    found = rank_pool.run("differences:drifting", "parameter", 1, window=3, last=3, folder=str(tmp_path), size=2)

    assert "the parameter '0.weight' differs" in found[0][0]
    assert not list(tmp_path.glob("step-*"))


def test_parameter_that_one_rank_writes_to_in_a_loop_of_its_own_is_refused_on_all(rank_pool):
    found = rank_pool.run("differences:drifting_in_a_loop", 1, size=2)

    assert found[0] == found[1]
    assert "the parameter '0.bias' differs from that of rank 0 on rank 1" in found[0][0]
    assert found[0][1] == 1
