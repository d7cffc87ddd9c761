"""Models of which each rank holds a part only are refused, before anything is trained."""

import pytest

import autoaccum


@pytest.mark.parametrize("size", [1, 2])
def test_model_sharded_over_ranks_is_refused_on_every_rank(crew, size):
    answers = crew.answers("sharded_training:train", size=size)

    for answer in answers:
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        assert "parameter '0.weight' is a DTensor, spread over ranks by fully_shard" in str(answer)
