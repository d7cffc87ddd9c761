"""Ranks report of a mapping of losses what one process reports."""

import pytest
import torch

import autoaccum
from support.ranks import named_losses


def assert_alike(found, expected):
    torch.testing.assert_close(found["parameters"], expected["parameters"], rtol=1e-10, atol=1e-12)
    for part in ("losses", "evaluations"):
        for (loss, losses), (expected_loss, expected_losses) in zip(found[part], expected[part], strict=True):
            assert loss == pytest.approx(expected_loss)
            assert losses == pytest.approx(expected_losses)


@pytest.mark.parametrize("kind", named_losses.LOSSES)
def test_what_is_reported_is_that_of_the_whole_window(rank_pool, kind):
    expected = named_losses.train(0, 1, kind)

    for found in rank_pool.run("named_losses:train", kind, size=3):
        assert_alike(found, expected)


@pytest.mark.parametrize("kind", named_losses.LOSSES)
def test_entry_that_only_one_rank_reports_keeps_nobody_waiting(rank_pool, kind):
    expected = named_losses.train(0, 1, kind)

    answers = rank_pool.run("named_losses:train", kind, only_on=1, size=2)

    for found in answers:
        assert found["losses"] == answers[0]["losses"]
        torch.testing.assert_close(found["parameters"], expected["parameters"], rtol=1e-10, atol=1e-12)
        for (loss, losses), (expected_loss, expected_losses) in zip(found["losses"], expected["losses"], strict=True):
            assert loss == pytest.approx(expected_loss)
            assert losses.keys() == expected_losses.keys()


def test_count_of_a_part_of_the_window_is_refused_on_all_ranks(rank_pool):
    """The sum of such losses is not the mean over the window."""
    for answer in rank_pool.answers("named_losses:divided_by_own_count", size=2):
        assert isinstance(answer, autoaccum.InvalidInputError)
        assert "'num_items_in_batch', a number of a batch of the loader" in str(answer)
