"""Ranks that are to have the same data, and have not, are told before a sample is used twice."""

import pytest

import autoaccum


def assert_refused(answers, *texts):
    for answer in answers:
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        for text in texts:
            assert text in str(answer)


def test_training_data_of_another_length_is_refused_at_the_start(rank_pool):
    answers = rank_pool.answers("lengths:train", "by_indices", size=2)

    assert_refused(answers, "the loader of rank 1 has ", "and that of rank 0 ", "with shard_data=True")


@pytest.mark.parametrize("what", ["train", "evaluate"])
@pytest.mark.parametrize("kind", ["a_list", "stream"])
def test_loader_without_indices_is_refused_where_each_rank_is_to_take_its_part(rank_pool, kind, what):
    answers = rank_pool.answers(f"lengths:{what}", kind, (40, 40), size=2)

    assert_refused(
        answers, "shard_data=True takes a torch DataLoader over a dataset with indices", "leave shard_data out"
    )


def test_order_of_its_own_on_every_rank_is_that_of_rank_0(rank_pool):
    first, second = rank_pool.run("lengths:loaded", "own_order", size=2)

    assert sorted(first + second) == list(range(50))


@pytest.mark.parametrize("name", ["num_replicas", "_world_size"])
def test_sampler_that_has_divided_the_data_is_refused_where_each_rank_is_to_take_its_part(rank_pool, name):
    answers = rank_pool.answers("lengths:divided", name, size=2)

    assert_refused(
        answers, "shard_data=True splits the samples of every rank's loader, but this one's OwnOrder already does"
    )


def test_sampler_that_has_divided_the_data_unsaid_is_refused_by_what_it_gives(rank_pool):
    answers = rank_pool.answers("lengths:divided", None, size=2)

    assert isinstance(answers[0], autoaccum.RankFailedError), answers
    assert_refused(answers[1:], "the sampler gives rank 1 no sample that rank 0 has, so it already does")


def test_data_of_another_length_are_no_data_to_go_on_with(rank_pool, tmp_path):
    answers = rank_pool.answers("lengths:resume", str(tmp_path), (60, 75), size=2)

    for answer in answers:
        assert isinstance(answer, autoaccum.CheckpointError), answer
        assert "in the middle of an epoch with a loader of 9 batches per epoch, and this one has 11" in str(answer)


@pytest.mark.parametrize("kind", ["as_mapping", "as_triples", "wider"])
def test_batches_of_another_structure_on_one_rank_end_all_with_its_error(rank_pool, kind):
    answers = rank_pool.answers("lengths:unlike", kind, size=2)

    assert isinstance(answers[1], RuntimeError if kind == "wider" else autoaccum.InvalidInputError), answers
    assert isinstance(answers[0], autoaccum.RankFailedError), answers
    assert f"rank 1: {type(answers[1]).__name__}" in str(answers[0])
