"""A run that goes on with other processes: the same samples in the same order, or an error that says why."""

import pytest
import torch

import autoaccum
from support.models.small import a_few_of
from support.ranks import resharding, training
from support.ranks.training import FAR, assert_alike, assert_trained_as, far

# Windows of the first epoch, and of both: 50 samples in windows of 16.
EPOCH, ALL = 4, 8


def run(rank_pool, folder, size, **arguments):
    if size == 1:
        return [resharding.train(0, 1, folder, **arguments)]
    return rank_pool.run("resharding:train", folder, size=size, **arguments)


@pytest.mark.parametrize("kind", resharding.LOADERS)
def test_order_of_several_ranks_is_that_of_one_process(rank_pool, kind):
    expected = run(rank_pool, None, 1, kind=kind, steps=ALL)

    found = run(rank_pool, None, 2, kind=kind, steps=ALL)

    assert_trained_as(found, expected[0])


@pytest.mark.parametrize(("of", "kind"), a_few_of([(1, 2), (2, 1), (2, 3)], ["in_order", "own_generator", "of_numpy"]))
def test_run_goes_on_after_an_epoch_with_any_number_of_processes(rank_pool, tmp_path, of, kind):
    before, after = of
    expected = run(rank_pool, None, 1, kind=kind, steps=ALL)
    run(rank_pool, str(tmp_path), before, kind=kind, steps=None, epochs=1)

    found = run(rank_pool, str(tmp_path), after, kind=kind, steps=ALL)

    assert_alike(found)
    assert found[0]["steps"] == expected[0]["steps"]
    assert far(found[0]["parameters"], expected[0]["parameters"]) <= FAR


def test_run_goes_on_within_an_epoch_in_which_one_rank_has_no_samples(rank_pool, tmp_path):
    options = {"size": 2, "data": training.vectors(12), "target_batch": 8, "micro_batch": 2}
    expected = rank_pool.run("training:with_own_samples", [12, 0], **options)
    rank_pool.run("training:with_own_samples", [12, 0], checkpoint=str(tmp_path), max_steps=1, **options)

    found = rank_pool.run("training:with_own_samples", [12, 0], checkpoint=str(tmp_path), **options)

    assert_alike(found)
    assert all(map(torch.equal, found[0]["parameters"], expected[0]["parameters"]))


def test_run_between_epochs_goes_on_with_the_generators_of_its_loader(rank_pool, tmp_path):
    expected = run(rank_pool, None, 2, kind="own_generator", steps=None)
    run(rank_pool, str(tmp_path), 2, kind="own_generator", steps=None, epochs=1)

    found = run(rank_pool, str(tmp_path), 2, kind="own_generator", steps=None)

    assert far(found[0]["parameters"], expected[0]["parameters"]) <= FAR


@pytest.mark.parametrize(("shard_data", "stop"), [(True, EPOCH + 2), (False, 2 * EPOCH + 1)])
def test_run_within_a_later_epoch_goes_on_with_the_generator_of_its_sampler(rank_pool, tmp_path, shard_data, stop):
    arguments = {"size": 2, "kind": "of_numpy", "shard_data": shard_data}
    expected = rank_pool.run("resharding:train", None, steps=stop + 2, **arguments)
    rank_pool.run("resharding:train", str(tmp_path), steps=stop, **arguments)

    found = rank_pool.run("resharding:train", str(tmp_path), steps=stop + 2, **arguments)

    assert far(found[0]["parameters"], expected[0]["parameters"]) == 0.0


def test_random_state_of_ranks_goes_on_where_the_loader_draws_from_it_too(rank_pool, tmp_path):
    arguments = {"size": 2, "kind": "shuffled", "dropout": 0.3}
    expected = rank_pool.run("resharding:train", None, steps=ALL, **arguments)
    rank_pool.run("resharding:train", str(tmp_path), steps=2, **arguments)

    found = rank_pool.run("resharding:train", str(tmp_path), steps=ALL, **arguments)

    assert far(found[0]["parameters"], expected[0]["parameters"]) == 0.0


def refusals(rank_pool, folder, size, **arguments):
    if size == 1:
        with pytest.raises(autoaccum.CheckpointError) as caught:
            run(rank_pool, folder, size, **arguments)
        return [str(caught.value)]
    answers = rank_pool.answers("resharding:train", folder, size=size, **arguments)
    assert all(isinstance(answer, autoaccum.CheckpointError) for answer in answers), answers
    return list(map(str, answers))


SHARED, OWN = "processes (shard_data=True)", "processes with loaders of their own (shard_data=False)"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ((1, True), (2, True), ["by one process in the middle", f"to 2 {SHARED}"]),
        ((2, True), (1, True), [f"by 2 {SHARED} in the middle", "to one process"]),
        ((1, True), (2, False), ["by one process in the middle", f"to 2 {OWN}"]),
        ((2, True), (3, True), [f"by 2 {SHARED} in the middle", f"to 3 {SHARED}"]),
        ((2, True), (2, False), [f"by 2 {SHARED} in the middle", f"to 2 {OWN}"]),
        ((2, False), (1, True), [f"by 2 {OWN} in the middle", "to one process"]),
        ((2, False), (3, False), [f"by 2 {OWN} in the middle", f"to 3 {OWN}"]),
    ],
)
def test_checkpoint_within_an_epoch_that_cannot_be_shared_out_anew_says_what_to_do(
    rank_pool, tmp_path, before, after, says
):
    run(rank_pool, str(tmp_path), before[0], shard_data=before[1], kind="in_order", steps=1)

    texts = refusals(rank_pool, str(tmp_path), after[0], shard_data=after[1], kind="in_order", steps=ALL)

    for text in texts:
        assert all(one in text for one in [*says, "until an epoch ends, or pass resume=False"]), text


def test_other_loader_is_refused(rank_pool, tmp_path):
    run(rank_pool, str(tmp_path), 2, kind="in_order", steps=1)

    texts = refusals(rank_pool, str(tmp_path), 2, kind="own_generator", steps=ALL)

    assert all("a loader that has 0 random generators of its own, and this one has 1" in text for text in texts), texts
