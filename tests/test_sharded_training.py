"""`fit` with models that `fully_shard` has spread over ranks: the gradient of the global window all the same."""

import pytest
import torch

import autoaccum
import rank_training

FAR = 1e-12


def far(one, other):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))


def alone(*, norm=False, **arguments):
    return rank_training.train(0, 1, model=rank_training.net(norm=norm), **arguments)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("loss", [name for name in rank_training.LOSSES if name != "several"])
def test_parameters_are_those_of_one_process_with_the_whole_batch(crew, loss, size):
    expected = alone(loss=loss, target_batch=16, micro_batch=16, epochs=2)

    found = crew.run(
        "sharded_training:train", size=size, loss=loss, target_batch=16, micro_batch=3, epochs=2, shard=True
    )

    for one in found:
        assert far(one["parameters"], expected["parameters"]) <= FAR
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert one["samples"] == expected["samples"]


def assert_alike(found):
    for other in found[1:]:
        assert all(map(torch.equal, found[0]["parameters"], other["parameters"]))
        assert all(map(torch.equal, found[0]["buffers"], other["buffers"]))
        assert other["losses"] == found[0]["losses"]
        assert other["norms"] == found[0]["norms"]


def test_ranks_may_have_other_numbers_of_samples_and_none_at_the_end(crew):
    lengths = [23, 9, 2]

    found = crew.run(
        "sharded_training:with_own_samples", lengths, size=3, target_batch=12, micro_batch=3, loss="tokens, found out"
    )
    whole = crew.run(
        "rank_training:with_own_samples", lengths, size=3, target_batch=12, micro_batch=3, loss="tokens, found out"
    )

    assert_alike(found)
    assert [one["samples"] for one in found] == [one["samples"] for one in whole]
    assert far(found[0]["parameters"], whole[0]["parameters"]) <= FAR


def test_micro_batch_in_which_nothing_counts_takes_part_in_its_pass(crew):
    data = rank_training.texts(16, nothing_counts_below=5)
    expected = alone(loss="tokens, found out", data=data, target_batch=16, micro_batch=16)

    found = crew.run(
        "sharded_training:train",
        size=2,
        data=data,
        loss="tokens, found out",
        target_batch=16,
        micro_batch=2,
        shard=True,
    )

    assert_alike(found)
    assert far(found[0]["parameters"], expected["parameters"]) <= FAR


def test_running_statistics_and_clipping_are_those_of_whole_models_on_the_same_ranks(crew):
    asked = {"target_batch": 16, "micro_batch": 4, "shard": True, "clip_grad_norm": 0.1, "epochs": 2, "norm": True}
    asked["data"] = rank_training.vectors(48)

    found = crew.run("sharded_training:train", size=2, **asked)
    whole = crew.run("sharded_training:unsharded", size=2, **asked)

    assert_alike(found)
    assert found[0]["norms"] == pytest.approx(whole[0]["norms"], rel=1e-9)
    for one, other in zip(found[0]["buffers"], whole[0]["buffers"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0.0)
    assert far(found[0]["parameters"], whole[0]["parameters"]) <= FAR


def test_evaluation_counts_every_sample_once_where_ranks_have_other_numbers_of_them(crew):
    asked = {"target_batch": 8, "micro_batch": 4, "epochs": 2}

    found = crew.run("sharded_training:evaluated", [13, 3], size=2, **asked)
    whole = crew.run("rank_training:evaluated", [13, 3], size=2, **asked)

    assert [one["evaluations"] for one in found] == [one["evaluations"] for one in found[:1] * 2]
    (loss, metrics, samples), (expected, its_metrics, its_samples) = (
        found[0]["evaluations"][-1],
        whole[0]["evaluations"][-1],
    )
    assert samples == its_samples
    assert loss == pytest.approx(expected, rel=1e-9)
    assert metrics["size"] == pytest.approx(its_metrics["size"], rel=1e-9)


@pytest.mark.parametrize("backward", [False, True])
def test_lack_of_memory_within_a_pass_ends_every_rank(crew, backward):
    found = crew.answers(
        "sharded_training:greedy", 4, backward=backward, size=2, target_batch=16, micro_batch=8, shard=True
    )

    assert isinstance(found[1], autoaccum.StartAgainError), found
    assert found[1].micro_batch == 8
    assert "rank 1 ran out of memory" in str(found[1])
    assert isinstance(found[0], autoaccum.RankFailedError), found


def test_lack_of_memory_of_a_single_sample_within_a_pass_is_told_as_such(crew):
    found = crew.answers("sharded_training:greedy", 0, size=2, target_batch=16, micro_batch=1, shard=True)

    assert isinstance(found[1], autoaccum.DoesNotFitError), found
    assert isinstance(found[0], autoaccum.RankFailedError), found


@pytest.mark.parametrize(
    ("where", "fails_at", "cut"),
    [("enter", 2, 2), ("transfer", 2, 2), ("reserve", 2, 1), ("after the passes", 2, 1)],
)
def test_lack_of_memory_outside_of_a_pass_begins_the_window_anew_on_all_ranks(crew, where, fails_at, cut):
    asked = {"target_batch": 16, "micro_batch": 8, "shard": True, "epochs": 2}
    expected = alone(target_batch=16, micro_batch=16, epochs=2)

    found = crew.run("sharded_training:lacking", where, fails_at=fails_at, size=2, **asked)

    assert_alike(found)
    assert far(found[0]["parameters"], expected["parameters"]) <= FAR
    assert found[0]["oom"] == 1
    assert {len(one["cuts"][1]) for one in found} == {cut}


def test_sizes_grow_from_the_smallest_by_what_smaller_ones_show(crew):
    found = crew.run("sharded_training:train", size=2, target_batch=16, shard=True, epochs=3)
    expected = alone(target_batch=16, micro_batch=16, epochs=3)

    assert_alike(found)
    assert far(found[0]["parameters"], expected["parameters"]) <= FAR
    sizes = [max(cut) for cut in found[0]["cuts"] if len(cut) and sum(cut) == 8]
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert sizes[-1] == 8
