"""A job holds the arguments of a call of `fit`."""

import pytest

import autoaccum


def test_a_job_is_the_arguments_of_fit_by_name():
    job = autoaccum.Job("model", [1], 4, epochs=3)

    assert job.arguments == {"model": "model", "loader": [1], "target_batch": 4, "epochs": 3}
    assert (job.get("epochs"), job.get("precision"), job.get("loss")) == (3, "auto", None)


@pytest.mark.parametrize("named", [{"epoch": 3}, {"model": "twice"}])
def test_an_argument_that_fit_does_not_take_is_named(named):
    with pytest.raises(
        TypeError, match=rf"Job\(\) .*'{next(iter(named))}'.*; its arguments are those of autoaccum.fit"
    ):
        autoaccum.Job("model", [], 4, **named)


def test_a_target_in_tokens_replaces_one_in_samples():
    assert autoaccum.Job("model", [], 4).with_arguments({"target_tokens": 9}).arguments["target_tokens"] == 9
    assert "target_batch" not in autoaccum.Job("model", [], 4).with_arguments({"target_tokens": 9}).arguments
