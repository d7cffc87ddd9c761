"""Ranks with a single sample each infer what a loss runs over, from each other's samples."""

import pytest
import torch

import rank_single
from rank_single import batches, flat

# No two windows of two or three texts have texts of one length.
LENGTHS = [3, 9, 4, 12, 7, 5, 11, 6, 2, 8, 10, 13]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def alone(lengths, size, each=1, loss="tokens", **options):
    """The parameters that one process ends with, which gets the samples of all ranks' windows."""
    of_ranks = batches(lengths, size, each)
    loader = [
        {name: torch.cat([part[name] for part in parts]) for name in parts[0]} for parts in zip(*of_ranks, strict=True)
    ]
    _, model = rank_single.run(loader, loss, target_batch=each * size, micro_batch=each * size, **options)
    return flat(model)


@pytest.mark.parametrize("loss", ["tokens", "own", "sum", "samples"])
@pytest.mark.parametrize("size", [2, 3])
def test_gradient_is_that_of_the_window_from_the_first_on(crew, loss, size):
    expected = alone(LENGTHS, size, loss=loss)

    for found in crew.run("rank_single:train", LENGTHS, loss, size=size):
        torch.testing.assert_close(found["parameters"], expected, **EXACT)


def test_samples_that_are_alike_on_each_rank_are_compared_with_those_of_others(crew):
    lengths = [3, 3, 9, 9, 4, 4, 12, 12, 7, 7, 5, 5]
    expected = alone(lengths, 2, each=2)

    for found in crew.run("rank_single:train", lengths, each=2, size=2):
        torch.testing.assert_close(found["parameters"], expected, **EXACT)


def test_texts_may_differ_in_length_late(crew):
    lengths = [6] * 8 + LENGTHS
    expected = alone(lengths, 2)

    for found in crew.run("rank_single:train", lengths, size=2):
        torch.testing.assert_close(found["parameters"], expected, **EXACT)


def test_parts_of_one_loader_are_asked_together(crew):
    _, expected = rank_single.run(rank_single.of_three_batches(LENGTHS), "own", target_batch=2, micro_batch=2)

    for found in crew.run("rank_single:share", LENGTHS, size=2):
        torch.testing.assert_close(found, flat(expected), **EXACT)


def test_each_of_several_losses_is_asked(crew):
    expected = alone(LENGTHS, 2, loss="several")

    for found in crew.run("rank_single:train", LENGTHS, "several", size=2):
        torch.testing.assert_close(found["parameters"], expected, **EXACT)


@pytest.mark.parametrize("lacking", [0, 1])
def test_rank_without_the_memory_to_ask_learns_the_answer_from_the_other(crew, lacking):
    expected = alone(LENGTHS, 2)

    for found in crew.run("rank_single:train", LENGTHS, lacking=lacking, size=2):
        torch.testing.assert_close(found["parameters"], expected, **EXACT)


@pytest.mark.parametrize(("lengths", "each"), [(LENGTHS, 1), ([3, 3, 9, 9, 4, 4, 12, 12, 7, 7, 5, 5], 2)])
@pytest.mark.parametrize("loss", ["tokens", "sum"])
def test_ranks_that_hold_shards_ask_together_too(crew, loss, lengths, each):
    expected = alone(lengths, 2, each=each, loss=loss)

    for found in crew.run("rank_single:train_sharded", lengths, loss, each, size=2):
        torch.testing.assert_close(found, expected, **EXACT)
