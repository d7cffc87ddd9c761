"""Other people's loops: what a message about a loss tells to do can be done there."""

import importlib
import inspect
import re

import pytest
import torch
from torch.nn import functional

from autoaccum.errors import DoesNotFitError, InvalidInputError
from support.frameworks.jobs import FRAMEWORKS, Net, alone
from support.models.small import WITHOUT_WARNINGS

pytestmark = WITHOUT_WARNINGS


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", "")


class Own(torch.autograd.Function):
    """A loss whose graph says nothing."""

    @staticmethod
    def forward(ctx, losses):
        ctx.shape = losses.shape
        return losses.square().sum().sqrt()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape)


def losses_of(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


REFUSED = {
    "compares samples": lambda outputs, _: functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs))),
    "a mean and samples": lambda outputs, targets: (losses_of(outputs, targets).mean(), len(targets)),
    "a mean and an accuracy": lambda outputs, targets: (losses_of(outputs, targets).mean(), accuracy(outputs, targets)),
    "a mean and outputs": lambda outputs, targets: (losses_of(outputs, targets).mean(), outputs),
    "matches": lambda outputs, targets: outputs.argmax(1) == targets,
    "all outputs": lambda outputs, _: outputs.square(),
    "relative to the batch": lambda outputs, targets: (
        losses_of(outputs, targets) / losses_of(outputs, targets).mean().detach()
    ),
    "unreadable": lambda outputs, targets: Own.apply(losses_of(outputs, targets)),
    "a number": lambda outputs, targets: losses_of(outputs, targets).mean().item(),
    "detached": lambda outputs, targets: losses_of(outputs, targets).mean().detach(),
    "not finite": lambda outputs, targets: losses_of(outputs, targets).mean() * torch.nan,
    "root": lambda outputs, targets: losses_of(outputs, targets).mean().sqrt(),
}
REMEDIES = {
    "a (sum, weight) pair": lambda outputs, targets: (losses_of(outputs, targets).sum(), len(targets)),
    "terms by name": lambda outputs, targets: {
        "a": (losses_of(outputs, targets)[targets > 0].sum(), (targets > 0).sum()),
        "b": (outputs[:, 0].square().sum(), len(targets)),
    },
    "a vector": losses_of,
    "both by names": lambda outputs, targets: {
        "loss": losses_of(outputs, targets).mean(),
        "accuracy": accuracy(outputs, targets),
    },
}


def trained(by, loss, **options):
    return alone(by, samples=24, loss=loss, ours=options)["parameters"]


def options_in(text):
    """The options that a message names; `loss_scope=` not where the functions that take it are named with it."""
    text = text.replace("loss_scope='window' to fit, Runner or Accumulator", "")
    return {*re.findall(r"\b([a-z_]+)=(?!nan)", text)}


def options_of(by):
    module = importlib.import_module(f"support.frameworks.by_{by}")
    return {*inspect.signature(getattr(module, "auto_accumulate", None) or module.AutoAccumulate).parameters}


@pytest.mark.parametrize("by", FRAMEWORKS)
@pytest.mark.parametrize("name", REFUSED)
def test_message_about_a_loss_names_only_what_the_loop_takes(by, name):
    with pytest.raises(InvalidInputError) as caught:
        trained(by, REFUSED[name], micro_batch=5)

    assert options_in(str(caught.value)) <= options_of(by)


@pytest.mark.parametrize("by", FRAMEWORKS)
def test_message_about_a_sample_that_does_not_fit_names_only_what_the_loop_takes(by):
    def lacking(*_):
        raise torch.OutOfMemoryError("told to")

    with pytest.raises(DoesNotFitError, match="a sample of shapes") as caught:
        trained(by, lacking)

    remedies = str(caught.value).partition("; try ")[2]
    assert remedies
    assert options_in(remedies) - {"foreach"} <= options_of(by)


@pytest.mark.parametrize("by", FRAMEWORKS)
@pytest.mark.parametrize("name", REMEDIES)
def test_loss_that_such_a_message_recommends_trains_exactly(by, name):
    whole, cut = (trained(by, REMEDIES[name], micro_batch=most) for most in (12, 5))

    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)
    assert not torch.equal(cut[0], next(Net().parameters()))


@pytest.mark.parametrize("by", FRAMEWORKS)
def test_micro_batches_are_averaged_where_that_is_asked_for(by):
    found = trained(by, REFUSED["root"], micro_batch=5, loss_reduction="mean")

    assert not torch.equal(found[0], next(Net().parameters()))
