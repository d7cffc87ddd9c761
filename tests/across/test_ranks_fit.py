"""`fit` on several ranks: the gradient of the global window, and every rank the same after each update."""

import fcntl
import threading

import pytest
import torch

import autoaccum
from support.models.small import a_few_of
from support.ranks import training
from support.ranks.training import FAR, assert_alike, assert_trained_as, far
from support.training.long_runs import checkpoints


def alone(**arguments):
    return training.train(0, 1, **arguments)


@pytest.mark.parametrize(("loss", "size"), a_few_of(training.LOSSES, [2, 3]))
def test_parameters_are_those_of_one_process_with_the_whole_batch(rank_pool, loss, size):
    expected = alone(loss=loss, target_batch=16, micro_batch=16, epochs=2)

    found = rank_pool.run(
        "training:train", size=size, loss=loss, target_batch=16, micro_batch=3, epochs=2, shard_data=True
    )

    assert_trained_as(found, expected)
    assert found[0]["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    assert found[0]["samples"] == expected["samples"]


@pytest.mark.parametrize(
    ("kind", "size", "options"), [("train", 2, {}), ("train", 2, {"wrap": True}), ("permuted", 3, {})]
)
def test_ranks_clip_as_one_process_does_also_where_the_model_is_wrapped_or_begins_otherwise(
    rank_pool, kind, size, options
):
    asked = {"target_batch": 16, "clip_grad_norm": 0.1}
    expected = alone(micro_batch=16, **asked)

    found = rank_pool.run(f"training:{kind}", size=size, micro_batch=3, shard_data=True, **asked, **options)

    assert found[0]["norms"] == pytest.approx(expected["norms"], rel=1e-9)
    assert_trained_as(found, expected)


def test_ranks_may_have_other_numbers_of_samples_and_none_at_the_end(rank_pool):
    found = rank_pool.run(
        "training:with_own_samples",
        [23, 9, 2],
        size=3,
        target_batch=12,
        micro_batch=3,
        loss="tokens, found out",
    )

    assert_alike(found)
    assert found[0]["samples"] == [4 + 4 + 2, 4 + 4, 4 + 1, 4, 4, 3]
    assert found[0]["all samples"] == 34
    assert [sum(cut) for cut in found[2]["cuts"]] == [2, 0, 0, 0, 0, 0]


def test_rank_without_any_sample_takes_part(rank_pool):
    expected = alone(target_batch=4, micro_batch=4, data=training.vectors(8), make_loader=None)

    found = rank_pool.run(
        "training:with_own_samples",
        [8, 0],
        data=training.vectors(8),
        size=2,
        target_batch=8,
        micro_batch=2,
    )

    assert_alike(found)
    assert found[0]["samples"] == [4, 4]
    assert far(found[1]["parameters"], expected["parameters"]) <= FAR


def test_last_window_that_is_dropped_is_dropped_by_all(rank_pool):
    found = rank_pool.run("training:with_own_samples", [10, 7], size=2, target_batch=8, micro_batch=4, drop_last=True)

    assert_alike(found)
    assert found[0]["samples"] == [8]


def test_epoch_that_is_dropped_whole_is_refused_on_all(rank_pool):
    answers = rank_pool.answers(
        "training:with_own_samples", [10, 7], size=2, target_batch=64, micro_batch=4, drop_last=True
    )

    for answer in answers:
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        assert "less than target_batch=64 samples, which drop_last=True leaves out" in str(answer)


def test_running_statistics_are_means_over_the_ranks(rank_pool):
    found = rank_pool.run("training:with_norm", size=2, target_batch=16, micro_batch=16, shard_data=True, max_steps=1)

    assert_alike(found)
    halves = [
        training.with_norm(0, 1, data=training.vectors()[at : at + 8], target_batch=8, micro_batch=8) for at in (0, 8)
    ]
    for both, one, other in zip(*(each["buffers"] for each in (found[0], *halves)), strict=True):
        assert torch.allclose(both.double(), (one.double() + other.double()) / 2, rtol=1e-12)


def test_other_buffers_that_a_model_writes_are_those_of_the_first_rank_and_constants_stay(rank_pool):
    found = rank_pool.run("training:with_buffers", size=3, target_batch=15, micro_batch=5, shard_data=True, max_steps=2)

    assert_alike(found)
    calls, last, constant, width16 = found[0]["buffers"]
    assert calls == 2
    assert width16.tolist() == [5, 5]
    assert torch.equal(last, torch.stack([inputs for inputs, _ in training.vectors()[15:20]]).mean(0))
    assert torch.equal(constant, torch.full((3,), 0.1, dtype=torch.float64))


def test_buffers_that_only_some_ranks_write_are_those_of_the_first_of_them(rank_pool):
    found = rank_pool.run(
        "training:with_marks", size=3, marked=(22, 28), target_batch=15, micro_batch=5, shard_data=True, max_steps=2
    )

    assert_alike(found)
    assert torch.equal(found[0]["buffers"][0][1:], training.vectors()[22][0][1:])  # the second rank's


def test_parameter_that_only_some_ranks_use_is_updated_on_all_and_an_unused_one_on_none(rank_pool):
    samples = training.wide()
    expected = training.unused(0, 1, target_batch=16, micro_batch=16, data=samples)

    found = rank_pool.run("training:unused", size=2, target_batch=16, micro_batch=8, shard_data=True, data=samples)

    assert_alike(found)
    assert all(one["never is as it was"] for one in found)
    assert far(found[0]["parameters"], expected["parameters"]) <= FAR


def test_same_samples_on_every_rank_are_noticed_and_said_once_unless_they_are_shared_out(rank_pool):
    same = rank_pool.run("training:said", size=2, shard_data=False)
    shared = rank_pool.run("training:said", size=2, shard_data=True)

    assert same[0].count("every rank's loader gives the same samples") == 1
    assert "same samples" not in same[1] + shared[0] + shared[1]


def test_first_rank_says_what_part_of_a_window_its_plans_are_of(rank_pool):
    spoken = rank_pool.run("training:said", size=2, shard_data=True)

    assert spoken[0].count("2 ranks: this rank takes 8 samples of each window of 16; plans and cuts count only those")
    assert "2 ranks" not in spoken[1]


def test_evaluation_counts_every_sample_of_loaders_of_their_own_once(rank_pool):
    expected = training.evaluated(0, 1, [20], target_batch=50, micro_batch=50)

    found = rank_pool.run("training:evaluated", [13, 7], size=2, target_batch=50, micro_batch=5)

    assert found[0]["evaluations"] == found[1]["evaluations"]
    (loss, metrics, samples), (right, right_metrics, _) = found[0]["evaluations"][0], expected["evaluations"][0]
    assert samples == 20
    assert loss == pytest.approx(right, rel=1e-9)
    assert metrics == pytest.approx(right_metrics, rel=1e-9)


@pytest.mark.parametrize("what", ["model", "optimizer", "target_batch"])
def test_what_differs_on_a_rank_is_told_on_all(rank_pool, what):
    answers = rank_pool.answers("training:different", what, size=3)

    for answer in answers:
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        assert f"rank 1 has another {what} than rank 0" in str(answer)


def test_ranks_bear_parameters_that_are_frozen_and_refuse_those_that_come(rank_pool):
    assert_alike(rank_pool.run("training:changing", size=2, max_steps=2))

    # The fourth window is the next in which all is checked.
    for answer in rank_pool.answers("training:changing", size=2, max_steps=4):
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        assert "2 parameters are trained now" in str(answer)


@pytest.mark.parametrize("what", ["loss", "loader", "callback"])
@pytest.mark.parametrize("who", [0, 1])
def test_error_of_the_users_own_on_one_rank_arrives_there_and_is_told_to_the_others(rank_pool, who, what, tmp_path):
    answers = rank_pool.answers("training:failing", who, what, str(tmp_path), size=2)

    assert isinstance(answers[who], ZeroDivisionError)
    assert isinstance(answers[1 - who], autoaccum.RankFailedError)
    assert f"rank {who}: ZeroDivisionError: the user's own" in str(answers[1 - who])
    assert checkpoints(tmp_path) == ["step-00000002"]  # which all had done, and saved together


@pytest.mark.parametrize("target", ["target_batch", "target_tokens"])
def test_target_below_the_number_of_ranks_is_refused_on_all(rank_pool, target):
    answers = rank_pool.answers("training:train", size=3, **{"target_batch": None, target: 2})

    for answer in answers:
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        assert f"{target}=2 is less than the number of ranks, 3" in str(answer)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shuffle", "workers"), [(False, 0), (True, 0), (True, 2)])
def test_training_goes_on_from_a_checkpoint_of_all_ranks_as_if_it_had_not_ended(rank_pool, tmp_path, shuffle, workers):
    arguments = {"size": 2, "shuffle": shuffle, "workers": workers, "epochs": 2}
    whole = rank_pool.run("training:resumed", str(tmp_path / "whole"), steps=8, **arguments)
    rank_pool.run("training:resumed", str(tmp_path / "cut"), steps=3, **arguments)

    found = rank_pool.run("training:resumed", str(tmp_path / "cut"), steps=8, **arguments)

    assert_alike(found)
    assert found[0]["steps"] == 8
    assert all(map(torch.equal, found[0]["parameters"], whole[0]["parameters"]))


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_each_rank_finds_its_own_cut_and_the_gradient_is_that_of_the_window(rank_pool):
    expected = alone(data=training.vectors(200), target_batch=40, micro_batch=40)

    found = rank_pool.run("training:on_simulated", ["5KiB", "8KiB"], size=2, target_batch=40, shard_data=True)

    assert_alike(found)
    assert 0 < found[0]["largest"] < found[1]["largest"]
    assert far(found[0]["parameters"], expected["parameters"]) <= FAR


@pytest.mark.slow  # they wait
@pytest.mark.parametrize("ends", [True, False])
def test_checkpoint_folder_that_another_process_holds_is_waited_for_by_all_ranks_and_none_hangs(
    rank_pool, tmp_path, ends
):
    holder = (tmp_path / ".lock").open("w")
    fcntl.flock(holder, fcntl.LOCK_EX)
    print("process 7 on node1", file=holder, flush=True)
    release = threading.Timer(3.0 if ends else 3600.0, holder.close)
    release.start()

    answers = rank_pool.answers("training:in_folder", str(tmp_path), patience_s=600 if ends else 3, size=2)

    release.cancel()
    holder.close()
    if ends:
        assert [answer["steps"] for answer in answers] == [2, 2]
        assert checkpoints(tmp_path) == ["step-00000002"]
    else:
        assert all(isinstance(answer, autoaccum.CheckpointInUseError) for answer in answers), answers
        assert all("process 7 on node1" in str(answer) for answer in answers)


@pytest.mark.parametrize(("on_nan", "error"), [("stop", "NotFiniteError: step 6: not finite"), ("warn", "none")])
def test_nan_on_one_rank_is_acted_on_by_all_in_the_same_window(rank_pool, tmp_path, on_nan, error):
    found = rank_pool.run("training:not_finite", tmp_path, on_nan, size=2)

    assert [one["error"][: len(error)] for one in found] == [error] * 2
    assert found[0]["kept"] == [4, 5]
