"""Evaluation on several ranks: each its part, and together what one process finds over the whole loader."""

import itertools

import pytest

import autoaccum
from support.models.small import a_few_of
from support.ranks import evaluation


def assert_evaluations_are(found, expected):
    """Losses, metrics and numbers of samples: the same on all ranks, and those of one process."""
    assert all(one["evaluations"] == found[0]["evaluations"] for one in found)
    assert len(found[0]["evaluations"]) == len(expected["evaluations"])
    for one, other in zip(found[0]["evaluations"], expected["evaluations"], strict=True):
        (loss, metrics, samples), (right, right_metrics, right_samples) = one, other
        assert samples == right_samples
        assert loss == pytest.approx(right, rel=1e-9)
        assert metrics == pytest.approx(right_metrics, rel=1e-6)  # torchmetrics counts in single precision


@pytest.mark.parametrize(("kind", "size"), a_few_of(evaluation.LOADERS, [2, 3]))
def test_loader_of_everything_on_every_rank_is_counted_once(rank_pool, kind, size):
    expected = evaluation.evaluated(0, 1, kind, 20)

    found = rank_pool.run("evaluation:evaluated", kind, 20, size=size)

    assert expected["evaluations"][0][2] == (18 if kind == "dropping" else 20)
    assert_evaluations_are(found, expected)


@pytest.mark.parametrize("kind", ["in_order", "shuffled", "shuffled_by_all"])
def test_each_sample_is_loaded_by_one_rank(rank_pool, kind):
    found = rank_pool.run("evaluation:evaluated", kind, 20, size=3, epochs=1)

    assert sorted(itertools.chain.from_iterable(one["loaded"] for one in found)) == list(range(20))
    assert [len(one["loaded"]) for one in found] == [8, 6, 6]


def test_what_a_sampler_draws_is_drawn_once_for_all(rank_pool):
    found = rank_pool.run("evaluation:with_replacement", size=2)

    assert [len(loaded) for loaded in found] == [6, 4]


def test_every_rank_evaluates_its_own_loader_where_nothing_is_shared_out(rank_pool):
    found = rank_pool.run("evaluation:evaluated", "in_order", 20, size=2, shard_data=False)

    assert found[0]["evaluations"][0][2] == 40


MASKS = {
    "nothing on the first": [[0] * 8, [1, 0, 0, 1, 1, 0, 0, 1]],
    "nothing on the second": [[1, 1, 0, 1, 0, 0, 1, 1], [0] * 8],
    "one on the first": [[0, 0, 0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 1, 0, 1, 0]],
}


@pytest.mark.filterwarnings("ignore:autoaccum")
@pytest.mark.parametrize(("most", "masks", "least"), a_few_of([(2, 2), (1, 2), (8, 3)], MASKS, [0, 1]))
def test_what_ranks_with_less_could_not_see_of_a_loss_is_taken_from_others(rank_pool, most, masks, least):
    for found, exact in rank_pool.run("evaluation:masked", MASKS[masks], most, least=least, size=2):
        assert found == pytest.approx(exact, rel=1e-9)


def test_validation_loaders_of_other_lengths_are_refused_where_each_is_to_have_everything(rank_pool):
    answers = rank_pool.answers("evaluation:with_other_lengths", "in_order", size=3)

    for answer in answers:
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        assert "the val_loader of rank 1 has " in str(answer)


def test_validation_loader_that_is_shared_out_already_is_refused(rank_pool):
    answers = rank_pool.answers("evaluation:with_distributed_sampler", size=2)

    for answer in answers:
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        assert "every rank's val_loader, but this one's DistributedSampler already does" in str(answer)


# --- metrics that count for themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "batch_size"),  # with 20 all but one rank have no samples
    a_few_of(sorted(evaluation.METRICS.keys() - evaluation.REFUSED), [3, 20]),
)
def test_metric_with_a_count_of_its_own_is_that_of_all_samples(rank_pool, kind, batch_size):
    expected = evaluation.counted(0, 1, kind, batch_size)

    found = rank_pool.run("evaluation:counted", kind, batch_size, size=3)

    assert_evaluations_are(found, expected)


@pytest.mark.parametrize(
    ("kind", "why"), [("own", "a Hits, keeps a count of its own"), ("averaging", "averages its state 'mean'")]
)
def test_metric_that_cannot_be_put_together_over_ranks_is_refused_before_training(rank_pool, kind, why):
    answers = rank_pool.answers("evaluation:counted", kind, 3, size=2)

    for answer in answers:
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        assert "metric 'it'" in str(answer)
        assert why in str(answer)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_rank_without_memory_for_a_batch_takes_its_part_in_smaller_cuts(rank_pool):
    expected = evaluation.on_simulated(0, 1, ["1MiB"])

    found = rank_pool.run("evaluation:on_simulated", ["1MiB", "200KiB"], size=2)

    assert (found[0]["sizes"], bool(found[1]["sizes"])) == ([], True)
    assert_evaluations_are(found, expected)


def test_rank_on_which_not_one_sample_can_be_evaluated_ends_all(rank_pool):
    answers = rank_pool.answers("evaluation:on_simulated", ["1MiB", "20KiB"], size=2)

    assert isinstance(answers[1], autoaccum.DoesNotFitError), answers[1]
    assert isinstance(answers[0], autoaccum.RankFailedError), answers[0]
    assert "rank 1: DoesNotFitError" in str(answers[0])
