"""No form of a loss trains silently wrong: exact, or a warning, or an error before anything changed.

The windows are cut unevenly, their labels are ragged, and what counts in them changes from each to the next.
"""

import contextlib
import warnings

import pytest
import torch

import autoaccum
from support.losses.forms import FORMS, LENGTHS, POSITIVES, WINDOWS, Form, N, ce, each, mse, router, weighted, window
from support.losses.outcomes import by_accumulator, by_fit, by_runner, by_samples, outcome
from support.models.small import fit_quietly

LOW_PRECISION = [name for name, form in FORMS.items() if form.dtype is not torch.float64]
# Some by their number, and those to which a closure makes a difference.
IN_CLOSURES = dict.fromkeys([
    *list(FORMS)[::16],
    "F.cross_entropy, weight mean",
    "nn.CrossEntropyLoss weight",
    "class weights in the model",
    "pair",
    "weights w_tokens as 'q7'",
    "dict with L2 of weights",
    "diffusion, min-snr",
    "needs two samples",
    "inputs are the targets",
    "fp16 with a scaler, pair",
])  # fmt: skip


def assert_allowed(form, way, **options):
    found = outcome(form, way, **options)
    assert found in form.allowed.split(" or "), f"allowed: {form.allowed}"


@pytest.mark.parametrize("name", FORMS)
def test_form_of_a_loss_is_exact_or_said_not_to_be(name):
    assert_allowed(FORMS[name], by_runner)


@pytest.mark.parametrize("name", IN_CLOSURES)
def test_closure_with_this_form_of_a_loss_is_exact_or_said_not_to_be(name):
    assert_allowed(FORMS[name], by_accumulator)


@pytest.mark.parametrize("name", list(FORMS)[2::16])
def test_fit_with_this_form_of_a_loss_is_exact_or_says_that_it_is_not(name):
    assert_allowed(FORMS[name], by_fit, at_once=4)


@pytest.mark.parametrize("name", ["ce ignore", "masked sum / mask sum", *LOW_PRECISION])
def test_weighting_by_samples_would_be_seen(name):
    assert outcome(FORMS[name], by_samples).startswith("wrong")


# --- losses that change between windows -------------------------------------------------------------------------------


def summed(o, b):
    return each(o, b).sum()


def masked(o, b):
    return weighted(o, b, "mask")


CHANGES = {
    "sum to mean": ("exact", summed, lambda o, b: each(o, b).mean()),
    "mean to sum": ("exact", lambda o, b: each(o, b).mean(), summed),
    "mean to half a sum": ("exact", lambda o, b: each(o, b).mean(), lambda o, b: summed(o, b) / 2),
    "masked mean to sum": ("exact", masked, summed),
    "part of a sum to masked mean": ("exact", lambda o, b: summed(o, b) / 64, masked),
    "cross entropy to its sum": (
        "exact",
        lambda o, b: ce(o, b["labels"]),
        lambda o, b: ce(o, b["labels"], reduction="sum"),
    ),
    "a name more": (
        "exact",
        lambda o, b: {"ce": ce(o, b["labels"]), "mse": mse(o, b)},
        lambda o, b: {"ce": ce(o, b["labels"]), "mse": mse(o, b), "sum": summed(o, b)},
    ),
    "vector to sum": ("exact", lambda o, b: each(o, b).mean(1), summed),
    "mean to root": ("stopped", masked, lambda o, b: mse(o, b).sqrt()),
    "mean to mean and router": ("stopped", masked, lambda o, b: masked(o, b) + 0.1 * router(o)),
}
LATER = [window(number, LENGTHS[number % 4], POSITIVES[number % 4], seed=1) for number in range(4, 8)]


# The third and the fifth window need no check.
@pytest.mark.parametrize(("name", "at"), [(name, 2 + 2 * (number % 2)) for number, name in enumerate(CHANGES)])
def test_loss_that_changes_its_form_is_followed_or_said_to_change(name, at):
    allowed, before, after = CHANGES[name]
    form = Form(lambda o, b: (before if b["number"][0] < at * N else after)(o, b), allowed=allowed)

    assert outcome(form, by_runner, windows=[*WINDOWS, *LATER]) in {allowed, "warned"}


# --- what a check costs, and where a warning is found -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["ce ignore", "ce + mse", "custom autograd", "rmse", "pair", "vae, means", "ce + router", "flooding"]
)
def test_check_takes_at_most_four_passes_of_eight_samples(name):
    form, sizes = FORMS[name], []
    model = form.model().double()
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    plan = autoaccum.Plan(20, (10, 10))  # no micro-batch is as small as a check
    options = {"forward": form.forward, "loss": form.loss, "precision": "fp32"}
    runner = autoaccum.Runner(model, torch.optim.SGD(model.parameters(), lr=0.01), plan, device="cpu", **options)

    with contextlib.suppress(autoaccum.InvalidInputError), warnings.catch_warnings(action="ignore"):
        runner.step(form.batch({name: torch.cat([one[name] for one in WINDOWS[:2]]) for name in WINDOWS[0]}))

    checks = [size for size in sizes if size < 10]
    assert 3 <= len(checks) <= 4
    assert max(checks) <= 8


def test_silent_fit_warns_and_keeps_what_it_said():
    form = FORMS["ce + router"]
    model = form.model().double()

    with pytest.warns(autoaccum.LossWarning, match="term 2 of 2 of loss 'loss' is neither") as caught:
        result = fit_quietly(
            model,
            [form.batch(WINDOWS[0])],
            N,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            micro_batch=4,
            forward=form.forward,
            loss=lambda o, b: ce(o, b["labels"], reduction="sum") + 0.1 * router(o),
        )

    texts = [str(one.message).removeprefix("autoaccum: ") for one in caught if one.category is autoaccum.LossWarning]
    assert list(result.warnings) == texts
