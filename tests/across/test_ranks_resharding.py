"""A run that goes on with other processes: the same samples in the same order, or an error that says why."""

import pytest

import autoaccum
import rank_resharding
from rank_training import assert_alike, far

FAR = 1e-12
# Windows of the first epoch, and of both: 50 samples in windows of 16.
EPOCH, ALL = 4, 8


def run(crew, folder, size, **arguments):
    """Train with so many ranks, or in this process."""
    if size == 1:
        return [rank_resharding.train(0, 1, folder, **arguments)]
    return crew.run("rank_resharding:train", folder, size=size, **arguments)


@pytest.mark.parametrize("kind", rank_resharding.LOADERS)
def test_order_of_several_ranks_is_that_of_one_process(crew, kind):
    expected = run(crew, None, 1, kind=kind, steps=ALL)

    found = run(crew, None, 2, kind=kind, steps=ALL)

    assert_alike(found)
    assert far(found[0]["parameters"], expected[0]["parameters"]) <= FAR


def changes():
    """Every kind of loader, left in the first epoch, after it and in the second; all but one of a kind are slow."""
    for number, kind in enumerate(rank_resharding.LOADERS):
        for place, steps in enumerate((2, EPOCH, EPOCH + 1)):
            for before, after in ((1, 2), (2, 1)):
                is_quick = place == number % 3 and before == 1 + number % 2
                yield pytest.param(before, after, kind, steps, marks=[] if is_quick else pytest.mark.sweep)


@pytest.mark.parametrize(("before", "after", "kind", "steps"), list(changes()))
def test_run_goes_on_with_other_processes_as_if_it_had_not_ended(crew, tmp_path, before, after, kind, steps):
    expected = run(crew, None, 1, kind=kind, steps=ALL)
    run(crew, str(tmp_path), before, kind=kind, steps=steps)

    found = run(crew, str(tmp_path), after, kind=kind, steps=ALL)

    assert_alike(found)
    assert found[0]["steps"] == expected[0]["steps"]
    assert found[0]["all samples"] == expected[0]["all samples"]
    assert far(found[0]["parameters"], expected[0]["parameters"]) <= FAR


def test_run_goes_on_through_one_two_three_and_one_again(crew, tmp_path):
    expected = run(crew, None, 1, kind="shuffled", steps=ALL)

    for steps, size in ((1, 1), (2, 2), (3, 3), (ALL, 1)):
        found = run(crew, str(tmp_path), size, kind="shuffled", steps=steps)

    assert far(found[0]["parameters"], expected[0]["parameters"]) <= FAR


def test_samples_that_were_used_are_not_loaded_again_by_several(crew, tmp_path):
    run(crew, str(tmp_path), 1, kind="in_order", steps=2)

    found = run(crew, str(tmp_path), 2, kind="in_order", steps=EPOCH)

    assert sorted(found[0]["loaded"] + found[1]["loaded"]) == list(range(2 * rank_resharding.TARGET, 50))


def test_run_between_epochs_goes_on_with_the_generators_of_its_loader(crew, tmp_path):
    expected = run(crew, None, 2, kind="own_generator", steps=None)
    run(crew, str(tmp_path), 2, kind="own_generator", steps=None, epochs=1)

    found = run(crew, str(tmp_path), 2, kind="own_generator", steps=None)

    assert far(found[0]["parameters"], expected[0]["parameters"]) <= FAR


def test_random_state_of_ranks_goes_on_where_the_loader_draws_from_it_too(crew, tmp_path):
    arguments = {"size": 2, "kind": "shuffled", "dropout": 0.3}
    expected = crew.run("rank_resharding:train", None, steps=ALL, **arguments)
    crew.run("rank_resharding:train", str(tmp_path), steps=2, **arguments)

    found = crew.run("rank_resharding:train", str(tmp_path), steps=ALL, **arguments)

    assert far(found[0]["parameters"], expected[0]["parameters"]) == 0.0


def refusals(crew, folder, size, **arguments):
    if size == 1:
        with pytest.raises(autoaccum.CheckpointError) as caught:
            run(crew, folder, size, **arguments)
        return [str(caught.value)]
    answers = crew.answers("rank_resharding:train", folder, size=size, **arguments)
    assert all(isinstance(answer, autoaccum.CheckpointError) for answer in answers), answers
    return list(map(str, answers))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ((1, True), (2, False), ["by 1 process in the middle", "each with a loader of its own; pass shard=True"]),
        ((2, True), (2, False), ["by 2 processes in the middle", "each with a loader of its own; pass shard=True"]),
        ((2, False), (1, True), ["each with a loader of its own (shard=False)", "this one process; go on with 2"]),
        ((2, False), (3, True), ["each with a loader of its own (shard=False)", "these 3, which share one loader"]),
        ((2, False), (2, True), ["each with a loader of its own (shard=False)", "these 2, which share one loader"]),
    ],
)
def test_checkpoint_within_an_epoch_that_cannot_be_shared_out_anew_says_what_to_do(crew, tmp_path, before, after, says):
    run(crew, str(tmp_path), before[0], shard=before[1], kind="in_order", steps=1)

    texts = refusals(crew, str(tmp_path), after[0], shard=after[1], kind="in_order", steps=ALL)

    for text in texts:
        assert all(one in text for one in says), text


@pytest.mark.parametrize(
    ("size", "kind", "samples", "says"),
    [
        (2, "in_order", 40, "a loader of 10 batches of 5 samples, and this one has 8 of 5"),
        (2, "own_generator", 50, "a loader that has 0 random generators of its own, and this one has 1"),
    ],
)
def test_other_loader_is_refused_by_several(crew, tmp_path, size, kind, samples, says):
    run(crew, str(tmp_path), 1, kind="in_order", steps=1)

    texts = refusals(crew, str(tmp_path), size, kind=kind, samples=samples, steps=ALL)

    assert all(says in text for text in texts), texts


def test_other_kind_of_loader_is_refused_by_one_process(crew, tmp_path):
    run(crew, str(tmp_path), 2, kind="in_order", steps=1)

    (text,) = refusals(crew, str(tmp_path), 1, kind="a_list", steps=ALL)

    assert "made with a DataLoader over a dataset with indices, and this loader is a list" in text
