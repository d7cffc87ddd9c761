"""Ranks report of a mapping of losses what one process reports."""

import pytest
import torch

import autoaccum
import rank_entries


def assert_alike(found, expected):
    torch.testing.assert_close(found["parameters"], expected["parameters"], rtol=1e-10, atol=1e-12)
    for part in ("losses", "evaluations"):
        for (loss, losses), (expected_loss, expected_losses) in zip(found[part], expected[part], strict=True):
            assert loss == pytest.approx(expected_loss)
            assert losses == pytest.approx(expected_losses)


@pytest.mark.parametrize("kind", rank_entries.LOSSES)
def test_what_is_reported_is_that_of_the_whole_window(crew, kind):
    expected = rank_entries.train(0, 1, kind)

    for found in crew.run("rank_entries:train", kind, size=3):
        assert_alike(found, expected)


@pytest.mark.parametrize("kind", rank_entries.LOSSES)
def test_entry_that_only_one_rank_reports_keeps_nobody_waiting(crew, kind):
    expected = rank_entries.train(0, 1, kind)

    answers = crew.run("rank_entries:train", kind, only_on=1, size=2)

    for found in answers:
        assert found["losses"] == answers[0]["losses"]
        torch.testing.assert_close(found["parameters"], expected["parameters"], rtol=1e-10, atol=1e-12)
        for (loss, losses), (expected_loss, expected_losses) in zip(found["losses"], expected["losses"], strict=True):
            assert loss == pytest.approx(expected_loss)
            assert losses.keys() == expected_losses.keys()


def test_count_of_a_part_of_the_window_is_refused_on_all_ranks(crew):
    """The sum of such losses is not the mean over the window."""
    for answer in crew.answers("rank_entries:divided_by_own_count", size=2):
        assert isinstance(answer, autoaccum.InvalidInputError)
        assert "'num_items_in_batch', a number of a batch of the loader" in str(answer)
