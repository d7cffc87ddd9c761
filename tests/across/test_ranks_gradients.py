"""Gradients and buffers of unusual forms: on several ranks as on one process, or refused in words on every rank."""

import pytest
import torch

import autoaccum
from support.ranks import gradients
from support.ranks.training import FAR, assert_alike, assert_trained_as, far

GRADIENTS = [
    *("conjugate", "conjugate parameter", "negative", "of fewer dimensions in memory", "shared"),
    *("of no dimension", "empty"),
    pytest.param("of another type", marks=pytest.mark.skipif(torch.__version__ < "2.9", reason="no grad_dtype")),
]
# How far they may be in single precision.
SINGLE = 1e-6
BUFFERS = ["expanded buffer", "conjugate buffer", "empty buffer"]


@pytest.mark.parametrize("form", [*GRADIENTS, *BUFFERS])
def test_gradients_and_buffers_of_any_form_are_added_up_as_on_one_process(rank_pool, form):
    expected = gradients.of_form(0, 1, form, micro_batch=16)

    found = rank_pool.run("gradients:of_form", form, size=2, micro_batch=8, shard_data=True)

    assert_alike(found)
    assert far(found[0]["parameters"], expected["parameters"]) <= (SINGLE if form == "of another type" else FAR)


def test_accumulator_adds_to_conjugate_gradients_on_ranks_and_alone(rank_pool):
    expected = gradients.accumulated(0, 1)

    found = rank_pool.run("gradients:accumulated", size=2)

    assert_trained_as(found, expected)


@pytest.mark.parametrize("only", [None, 1])
@pytest.mark.parametrize("form", ["sparse", "reshaped"])
def test_gradient_that_cannot_be_added_up_is_refused_in_words_and_no_rank_hangs(rank_pool, form, only):
    if form == "reshaped":
        answers = rank_pool.answers("gradients:reshaped", only, size=2)
    else:
        answers = rank_pool.answers("gradients:of_form", form, only=only, size=2, micro_batch=8, shard_data=True)

    for rank, answer in enumerate(answers):
        is_own = only in (None, rank)
        assert isinstance(answer, autoaccum.InvalidInputError if is_own else autoaccum.RankFailedError), answer
        assert "the gradient of" in str(answer)
        assert "several ranks add up dense gradients" in str(answer)


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("sparse buffer", "'kept' is a tensor of layout torch.sparse_coo"),
        ("buffer that is a view", "view of another of its tensors"),
    ],
)
def test_buffer_of_such_a_form_is_refused_on_every_rank(rank_pool, form, told):
    for answer in rank_pool.answers("gradients:of_form", form, size=2, micro_batch=8, shard_data=True):
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        assert told in str(answer)


def test_quantised_weights_are_those_of_rank_0(rank_pool):
    pytest.importorskip("torchao", reason="torchao is not installed")
    expected = gradients.quantised(0, 1)

    found = rank_pool.run("gradients:quantised", size=2)

    assert_alike(found)
    assert torch.equal(found[0]["parameters"][0], expected["parameters"][0])
    assert far(found[0]["parameters"], expected["parameters"]) <= SINGLE
