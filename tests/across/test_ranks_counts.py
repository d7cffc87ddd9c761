"""Ranks divide the loss of a window by the sum of the counts that the batches of all of them carry."""

import pytest
import torch

import rank_counts


@pytest.mark.parametrize("size", [1, 3])
def test_count_is_that_of_the_window_on_all_ranks(crew, size):
    expected = rank_counts.train(0, 1, "mean")

    answers = [rank_counts.train(0, 1, "divided")] if size == 1 else crew.run("rank_counts:train", "divided", size=size)

    for found in answers:
        torch.testing.assert_close(found["parameters"], expected["parameters"], rtol=1e-10, atol=1e-12)
        assert found["losses"] == pytest.approx(expected["losses"])
        assert found["evaluations"] == pytest.approx(expected["evaluations"])
