"""memory="auto" on several ranks: they save memory by the same at the same window, also where one is smaller."""

import pytest
import torch

from rank_training import far

FAR = 1e-12


@pytest.fixture(scope="module")
def found(crew):
    """Rank 1 is too small for one sample with nothing saved, and rank 0 is not."""
    return crew.run("rank_rungs:train", size=2, capacities=["16MiB", "4MiB"], shard=True)


def test_ranks_end_with_the_same_rung_and_the_same_trials(found):
    one, other = found

    assert one["memory"] == other["memory"] != ()
    assert one["trials"] == other["trials"]
    assert one["trials"][0].micro_batch is None
    assert one["is plain"]
    assert other["is plain"]


def test_ranks_have_the_parameters_of_one_process_where_memory_is_plenty(crew, found):
    (alone,) = crew.run("rank_rungs:train", size=1, capacities=["1GiB"], memory=None)

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*(one["parameters"] for one in found), strict=True))
    assert far(found[0]["parameters"], alone["parameters"]) <= FAR
    assert found[0]["losses"] == pytest.approx(alone["losses"], rel=1e-9)


def test_ranks_leave_out_what_the_loss_refuses(crew):
    (alone,) = crew.run("rank_rungs:refuse", size=1, capacity="1GiB")

    found = crew.run("rank_rungs:refuse", size=2, capacity="56MiB", memory=["auto", "chunked_loss:head"], shard=True)

    for one in found:
        assert one["refused"] == [("chunked_loss:head",)]
        assert one["memory"] == found[0]["memory"]
        assert far(one["parameters"], alone["parameters"]) <= FAR


@pytest.mark.slow
def test_resumed_ranks_keep_what_was_chosen(crew, tmp_path):
    arguments = {"size": 2, "capacities": ["16MiB", "4MiB"], "shard": True, "checkpoint": tmp_path}
    first = crew.run("rank_rungs:train", max_steps=50, **arguments)

    second = crew.run("rank_rungs:train", max_steps=58, **arguments)

    assert [one["memory"] for one in second] == [one["memory"] for one in first]
    assert all(one["trials"] == () for one in second)
    assert len(second[0]["losses"]) == 8


@pytest.mark.slow
def test_accumulators_agree_and_have_the_gradients_of_one_process(crew):
    (expected,) = crew.run("rank_rungs:accumulate", size=1, capacities=["1GiB"])

    one, other = crew.run("rank_rungs:accumulate", size=2, capacities=["16MiB", "4MiB"], memory="auto")

    assert one["memory"] == other["memory"] != ()
    assert one["trials"] == other["trials"]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one["parameters"], other["parameters"], strict=True))
    assert far(one["parameters"], expected["parameters"]) <= FAR
    assert one["losses"] == pytest.approx(expected["losses"], rel=1e-9)
