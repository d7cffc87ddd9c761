"""Gradients sent during the last backward pass: the same gradients, and nobody is left waiting for any."""

import itertools

import pytest
import torch

import autoaccum
import rank_faults
import rank_training
from rank_training import FAR, assert_alike, far

# What trains how: the function of `rank_training`, its arguments, and those of `fit`.
CASES = {
    "norm": ("with_norm", (), {"target_batch": 16, "micro_batch": 4, "drop_last": True}),
    "buffers": ("with_buffers", (), {"target_batch": 16, "micro_batch": 3}),
    "clip": ("train", (), {"target_batch": 16, "micro_batch": 3, "clip_grad_norm": 0.1}),
    "wrapped": ("train", (), {"target_batch": 16, "micro_batch": 3, "wrap": True}),
    "one micro-batch": ("train", (), {"target_batch": 16, "micro_batch": 8}),
    "unused": ("unused", (), {"target_batch": 16, "micro_batch": 4, "data": rank_training.wide()}),
    "own samples": ("with_own_samples", ([23, 9],), {"target_batch": 12, "micro_batch": 3, "shard": False}),
    "no samples": ("with_own_samples", ([8, 0],), {"target_batch": 4, "micro_batch": 1, "shard": False}),
    "dropped": ("train", (), {"target_batch": 16, "micro_batch": 4, "drop_last": True}),
}


def assert_same(found, expected):
    assert_alike(found)
    assert all(map(torch.equal, found[0]["parameters"], expected[0]["parameters"]))
    assert all(map(torch.equal, found[0]["buffers"], expected[0]["buffers"]))
    assert [one["losses"] for one in found] == [one["losses"] for one in expected]
    assert [one["cuts"] for one in found] == [one["cuts"] for one in expected]


def sum_of(outcome):
    return outcome["in_backward"] + outcome["after"]


def test_buckets_are_sent_before_the_backward_pass_has_come_to_the_first_layer(crew):
    for events in crew.run("overlap_training:order", size=2):
        first_layer = events.index("layer 0")

        assert "sent" in events[:first_layer]
        assert events.count("sent") > events[:first_layer].count("sent")  # and those of the first layer after it


@pytest.mark.parametrize("loss", rank_training.LOSSES)
def test_with_two_ranks_it_changes_no_bit_whatever_the_loss(crew, loss):
    arguments = {"size": 2, "loss": loss, "target_batch": 16, "micro_batch": 3, "epochs": 2, "shard": True}
    expected = crew.run("overlap_training:trained", **arguments)

    found = crew.run("overlap_training:trained", overlap=True, **arguments)

    assert_same(found, expected)
    assert not any(one["in_backward"] + one["after"] for one in expected)
    if loss != "pair":  # of which it is not known beforehand what parts weigh
        assert sum(one["in_backward"] for one in found)
        # The first window shows which gradients there are.
        assert [one["windows"] for one in found] == [one["steps"] - 1 for one in found]


@pytest.mark.parametrize("case", CASES)
def test_with_two_ranks_it_changes_no_bit_whatever_the_model_and_the_samples(crew, case):
    how, given, arguments = CASES[case]
    arguments = {"size": 2, "shard": True, "epochs": 2, **arguments}
    expected = crew.run("overlap_training:trained", how, *given, **arguments)

    found = crew.run("overlap_training:trained", how, *given, overlap=True, **arguments)

    assert_same(found, expected)
    assert sum(one["in_backward"] for one in found)
    assert all(one["windows"] for one in found)


@pytest.mark.parametrize("size", [3, 4])
def test_with_more_ranks_it_changes_the_order_of_sums_at_most(crew, size):
    arguments = {"size": size, "target_batch": 16, "micro_batch": 2, "epochs": 2, "shard": True}
    expected = crew.run("rank_training:train", **arguments)

    found = crew.run("overlap_training:trained", overlap=True, **arguments)

    assert_alike(found)
    assert far(found[0]["parameters"], expected[0]["parameters"]) <= FAR


def test_parameters_of_several_types_and_forms_are_sent(crew):
    expected = crew.run("overlap_training:several_types", overlap=False, size=2)

    found = crew.run("overlap_training:several_types", overlap=True, size=2)

    assert_same(found, expected)
    assert found[0]["windows"] == found[0]["steps"] - 1


def test_gradients_that_a_scaler_has_scaled_are_sent(crew):
    expected = crew.run("overlap_training:scaled", overlap=False, size=2)

    found = crew.run("overlap_training:scaled", overlap=True, size=2)

    assert_same(found, expected)
    assert found[0]["norms"] == expected[0]["norms"]
    assert found[0]["windows"] == found[0]["steps"] - 1


def test_other_gradients_than_in_the_window_before_go_as_without(crew):
    expected = crew.run("overlap_training:freezing", overlap=False, size=2)

    found = crew.run("overlap_training:freezing", overlap=True, size=2)

    assert_same(found, expected)
    assert [one["windows_without"] for one in found] == [3, 3]  # the first, and where the layer comes and goes


@pytest.mark.parametrize("kind", ["looks", "replaces", "late"])
def test_hooks_of_the_users_own_are_called_as_often_and_what_they_leave_is_sent(crew, kind):
    outcomes = crew.run("overlap_training:with_hooks", kind, size=2)

    for without, with_overlap in outcomes:
        assert_same([with_overlap], [without])
        assert with_overlap["calls"] == without["calls"]
        # A hook that comes later changes what was sent, which then is not used, and after some windows not sent.
        assert (with_overlap["windows"] == 0) == (kind == "late")
    assert outcomes[0][1]["said"].count("no effect from now on: in 4 windows in a row") == int(kind == "late")


def test_compiled_model_is_compiled_once(crew):
    expected = crew.run(
        "rank_training:train", size=2, target_batch=16, micro_batch=4, shard=True, epochs=2, drop_last=True
    )

    found = crew.run("overlap_training:compiled", size=2)

    assert_alike(found)
    assert far(found[0]["parameters"], expected[0]["parameters"]) <= FAR
    assert found[0]["windows"] == found[0]["steps"] - 1
    assert found[0]["graphs"] == 1


# --- where it cannot be done ------------------------------------------------------------------------------------------


def test_one_process_trains_as_without():
    expected = rank_training.train(0, 1, target_batch=16, micro_batch=4)

    found = rank_training.train(0, 1, target_batch=16, micro_batch=4, overlap=True)

    assert all(map(torch.equal, found["parameters"], expected["parameters"]))


def test_no_room_on_one_rank_is_said_and_all_go_on_without(crew):
    found = crew.run("overlap_training:said", who=1, size=2)

    text = "overlap=True has no effect, since on rank 1 host memory has no room for a second set of gradients"
    assert found[0][0].count(text) == 1
    assert all(sends["windows"] == 0 and sends["windows_without"] for _, sends in found)


def test_limit_on_the_host_is_in_the_way_which_is_said(crew):
    found = crew.run("overlap_training:said", size=2, memory_limit="200MiB")

    text = "overlap=True has no effect, since on rank 0 a memory_limit on host memory holds for the network's threads"
    assert found[0][0].count(text) == 1
    assert all(sends["windows"] == 0 for _, sends in found)


def test_loss_that_is_a_pair_is_in_the_way_which_is_said_once(crew):
    found = crew.run("overlap_training:said", size=2, loss="pair")

    assert found[0][0].count("overlap=True has no effect with a loss that is a (sum, weight) pair") == 1
    assert all(sends["windows"] == 0 for _, sends in found)


@pytest.mark.parametrize("overlap", [1, "yes", None])
def test_what_is_neither_true_nor_false_is_refused(overlap):
    with pytest.raises(autoaccum.InvalidInputError, match="overlap="):
        rank_training.train(0, 1, target_batch=16, overlap=overlap)


# --- where a rank fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 1])
def test_rank_that_fails_half_way_through_its_last_backward_pass_does_its_part_again(crew, who):
    expected = crew.run("overlap_training:breaking", None, "memory", size=2)

    found = crew.run("overlap_training:breaking", who, "memory", size=2)

    assert_alike(found)
    assert far(found[0]["parameters"], expected[0]["parameters"]) <= FAR
    assert [one["oom"] for one in found] == [int(rank == who) for rank in range(2)]
    assert found[1 - who]["cuts"] == expected[1 - who]["cuts"]  # which does nothing again
    assert [one["windows_without"] for one in found] == [2, 2]


@pytest.mark.parametrize("who", [0, 1])
def test_error_of_the_users_own_in_the_last_backward_pass_is_told_to_the_others(crew, who, tmp_path):
    answers = crew.answers("overlap_training:breaking", who, "own", str(tmp_path), size=2)

    assert isinstance(answers[who], ZeroDivisionError)
    assert isinstance(answers[1 - who], autoaccum.RankFailedError)
    assert f"rank {who}: ZeroDivisionError: the user's own" in str(answers[1 - who])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.pt"]


def test_interrupt_in_the_last_backward_pass_is_told_to_the_others(crew):
    answers = crew.answers("overlap_training:breaking", 1, "interrupted", size=2)

    assert str(answers[1]) == "interrupted, 0 hooks left"
    assert "rank 1: KeyboardInterrupt" in str(answers[0])


def test_rank_that_is_killed_in_its_last_backward_pass_is_missed_by_the_others(crew):
    answers = crew.answers("overlap_training:breaking", 1, "killed", size=2)

    assert "gone with exit code 3" in str(answers[1])
    assert isinstance(answers[0], autoaccum.RankFailedError)


@pytest.mark.parametrize("what", ["loss", "loader", "callback"])
def test_error_of_the_users_own_elsewhere_is_told_to_the_others(crew, what, tmp_path):
    answers = crew.answers("rank_training:failing", 0, what, str(tmp_path), overlap=True, size=2)

    assert isinstance(answers[0], ZeroDivisionError)
    assert "rank 0: ZeroDivisionError: the user's own" in str(answers[1])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.pt"]


@pytest.mark.parametrize("every", [36, pytest.param(9, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("who", "clip"), [(0, None), (1, 0.5)])
def test_memory_that_runs_out_anywhere_in_a_window_changes_nothing_but_cuts(crew, who, clip, every):
    arguments = {"size": 2, "clip": clip}
    expected = crew.run("overlap_training:faulted", **arguments)
    first, last = expected[who]["ends"][1:3]
    points = range(first + 1 + who, last + 1, every)  # scripts/rank_faults.py takes others

    found = crew.run("overlap_training:at_each", who, points, **arguments)

    buckets = sum_of(expected[0])
    sent = 0
    for point, outcomes in zip(points, zip(*found, strict=True), strict=True):
        if rank_faults.is_damage(outcomes):
            continue
        assert not any(isinstance(one, str) for one in outcomes), (point, outcomes)
        assert_alike(outcomes)
        assert far(outcomes[0]["parameters"], expected[0]["parameters"]) <= FAR, point
        loaded = sorted(itertools.chain.from_iterable(one["loaded"] for one in outcomes))
        assert loaded == list(range(rank_faults.SAMPLES))
        assert outcomes[who]["hits"] == 1, point
        assert [sum_of(one) for one in outcomes] == [buckets, buckets], point  # each of them once a window
        sent += sum(one["in_backward"] for one in outcomes)
    assert sent


@pytest.mark.parametrize("most", [2, pytest.param(8, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("size", "loss", "optimizer", "clip"), [(2, "mean", "adam", 0.5), (4, "list", "sgd", None), (2, "pair", "sgd", 0.5)]
)
def test_memory_that_runs_out_again_and_again_changes_nothing_but_cuts(crew, size, loss, optimizer, clip, most):
    arguments = {"size": size, "loss": loss, "optimizer": optimizer, "clip": clip}
    expected = crew.run("overlap_training:faulted", **arguments)
    seeds = list(range(most))

    found = crew.run("overlap_training:many", seeds, expected[0]["operators"], **arguments)

    hits = 0
    for seed, outcomes in zip(seeds, zip(*found, strict=True), strict=True):
        if rank_faults.is_damage(outcomes) or rank_faults.is_given_up(outcomes):
            continue
        assert not any(isinstance(one, str) for one in outcomes), (seed, outcomes)
        hits += sum(one["hits"] for one in outcomes)
        assert_alike(outcomes)
        assert far(outcomes[0]["parameters"], expected[0]["parameters"]) <= FAR, seed
    assert hits  # else this test shows little


@pytest.mark.parametrize("at", [100, 150, 200])
def test_rank_on_which_nothing_fits_any_more_ends_all_of_them(crew, at):
    answers = crew.answers("overlap_training:faulted", size=2, points={1: [at]}, lasts=True)

    assert isinstance(answers[1], autoaccum.DoesNotFitError | torch.OutOfMemoryError), answers[1]
    assert isinstance(answers[0], autoaccum.RankFailedError)
    assert "rank 1: " in str(answers[0])
