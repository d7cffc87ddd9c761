"""A job holds a call of `fit`: its fields are made from `fit`'s signature and docstring."""

import dataclasses
import inspect
import pickle
import sys

import pytest
import torch

import autoaccum
from autoaccum._launch import Job
from autoaccum._launch.job import shared_arguments, texts_of_arguments
from autoaccum.errors import InvalidInputError


def test_a_job_hands_fit_every_argument_by_name():
    model, loader = torch.nn.Linear(2, 1), [torch.zeros(3, 2)]
    job = Job(model, loader, 100, None, torch.optim.SGD, epochs=3, memory_limit="600MiB")

    arguments = job.fit_arguments()

    assert (arguments["model"], arguments["loader"], arguments["optimizer"]) == (
        model,
        loader,
        torch.optim.SGD,
    )
    assert (arguments["target_batch"], arguments["epochs"], arguments["memory_limit"]) == (100, 3, "600MiB")


def test_a_job_has_the_arguments_of_fit_with_their_defaults():
    of_fit = dict(inspect.signature(autoaccum.fit).parameters)
    of_fit.pop("progress")  # how it is watched is no part of what is to be done

    of_job = inspect.signature(Job).parameters

    assert of_job.keys() == of_fit.keys()
    assert {name: parameter.default for name, parameter in of_job.items()} == {
        name: parameter.default for name, parameter in of_fit.items()
    }


def test_a_jobs_model_may_be_a_function_that_makes_it():
    job = Job(lambda: torch.nn.Linear(2, 1), [], 100)

    model = job.fit_arguments()["model"]

    assert isinstance(model, torch.nn.Linear)


@pytest.mark.parametrize("model", [None, 3, lambda: "no module"])
def test_a_job_whose_model_is_none_is_refused(model):
    with pytest.raises(InvalidInputError, match=r"model must be a torch\.nn\.Module"):
        Job(model, [], 100).fit_arguments()


@pytest.mark.skipif(sys.flags.optimize > 1, reason="docstrings are stripped")
def test_documentation_of_a_job_is_that_of_fit():
    texts = texts_of_arguments(autoaccum.fit)

    assert all(f"    {field.name}: {texts[field.name]}\n" in Job.__doc__ for field in dataclasses.fields(Job))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("epoch", r"Job\(\) has no argument 'epoch'; did you mean 'epochs'\?"),
        ("progress", "pass progress to fit itself"),
        ("zzz", r"autoaccum\.fit"),
    ],
)
def test_unknown_argument_is_refused_with_a_hint(name, hint):
    with pytest.raises(TypeError, match=hint):
        Job(None, [], 100, **{name: 1})


def test_job_without_its_loader_is_refused_by_name():
    with pytest.raises(TypeError, match="'loader'"):
        Job(None)


def test_job_can_be_pickled_copied_with_changes_and_shown():
    job = Job(torch.nn.Linear(2, 1), [], 100, epochs=3)

    copy = dataclasses.replace(pickle.loads(pickle.dumps(job)), epochs=4)  # noqa: S301 - our own

    assert (type(copy), copy.target_batch, copy.epochs, job.epochs) == (Job, 100, 4, 3)
    assert "target_batch=100, loss=None" in repr(job)


def test_job_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Job(None, [], 100).epochs = 3


def test_arguments_that_another_function_takes_are_shared_with_it():
    def function(target_batch, epochs, others): ...

    assert shared_arguments(Job(None, [], 100, epochs=3), function) == {"target_batch": 100, "epochs": 3}
