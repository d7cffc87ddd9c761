"""Ranks that are to have the same data, and have not, are told before a sample is used twice."""

import pytest

import autoaccum


def assert_refused(answers, *texts):
    for answer in answers:
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        for text in texts:
            assert text in str(answer)


@pytest.mark.parametrize("kind", ["by_indices", "a_list"])
def test_training_data_of_another_length_is_refused_at_the_start(crew, kind):
    answers = crew.answers("rank_lengths:train", kind, size=2)

    assert_refused(answers, "the loader of rank 1 has ", "and that of rank 0 ", "with shard=True")


def test_loader_that_is_read_in_another_way_is_refused_at_the_start(crew):
    answers = crew.answers("rank_lengths:train", "of_two_kinds", (40, 40), size=2)

    assert_refused(answers, "the loader of rank 1 has 40 samples", "of a list that every rank goes through")


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("lengths", [(40, 70), (70, 40), (50, 75)])
def test_loader_without_a_length_that_ends_early_ends_all_ranks(crew, lengths, drop_last):
    answers = crew.answers("rank_lengths:train", "unsized", lengths, size=2, drop_last=drop_last)

    assert_refused(answers, "the loader of rank 1 has ", "left for a window, and that of rank 0 ")


def test_stream_that_ends_early_ends_all_ranks(crew):
    answers = crew.answers("rank_lengths:train", "stream", size=3)

    assert_refused(answers, "the loader of rank 1 has ")


@pytest.mark.parametrize("kind", ["by_indices", "stream", "unsized"])
def test_data_of_one_length_are_trained_on_in_silence(crew, kind):
    answers = crew.run("rank_lengths:train", kind, (60, 60), size=2)

    assert [found["all samples"] for found, _ in answers] == [60, 60]
    assert not any("targets of a window" in said for _, said in answers)


def test_order_of_its_own_on_every_rank_is_refused_where_it_is_known(crew):
    answers = crew.answers("rank_lengths:train", "own_order", (50, 50), size=2)

    assert_refused(answers, "the loader of rank 1 yields its samples in a different order than that of rank 0")


def test_order_of_its_own_on_every_rank_is_printed_where_it_shows(crew):
    answers = crew.run("rank_lengths:train", "shuffled", (50, 50), size=2)

    assert answers[0][1].count("the targets of a window differ between rank 0 and ranks 1") == 1


@pytest.mark.parametrize("kind", ["unsized", "stream"])
def test_validation_data_without_a_length_that_end_early_end_all_ranks(crew, kind):
    answers = crew.answers("rank_lengths:evaluate", kind, (12, 20), size=2)

    assert_refused(answers, "the val_loader of rank 1 has 12 samples in 2 batches, and that of rank 0 20 samples")


def test_validation_order_of_its_own_on_every_rank_is_refused(crew):
    answers = crew.answers("rank_lengths:evaluate", "own_order", (20, 20), size=2)

    assert_refused(answers, "the val_loader of rank 1 yields its samples in a different order")


def test_data_of_another_length_are_no_data_to_go_on_with(crew, tmp_path):
    answers = crew.answers("rank_lengths:resume", str(tmp_path), (60, 75), size=2)

    for answer in answers:
        assert isinstance(answer, autoaccum.CheckpointError), answer
        assert "in the middle of an epoch of 60 samples, and this loader's have 75" in str(answer)
