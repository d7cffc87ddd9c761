"""No form of a loss trains silently wrong: exact, or a warning, or an error before anything changed.

The windows are cut unevenly, their labels are ragged, and what counts in them changes from each to the next.
"""

import contextlib
import warnings

import pytest
import torch

import autoaccum
from support.losses.compared import COMPARED
from support.losses.divisors import DIVISORS
from support.losses.forms import FORMS, WINDOWS, N, ce, router
from support.losses.outcomes import by_accumulator, by_fit, by_runner, by_samples, converted, outcome, sgd
from support.models.small import fit_quietly, one_in

ALL = FORMS | DIVISORS | COMPARED
LOW_PRECISION = [name for name, form in FORMS.items() if form.dtype is not torch.float64]
# Some by their number, and those to which a closure makes a difference.
IN_CLOSURES = dict.fromkeys([
    *(name for name in list(FORMS)[::16] if not FORMS[name].options),
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
    "one fits, masked + L2",
    "one fits, cannot be read",
    "5 divisors that no entry counts",
    "learned weight beside a mean",
])  # fmt: skip


def assert_allowed(form, way, seeds=None, **options):
    allowed = form.allowed.replace("warned", "warned or doubted").split(" or ")
    for seed in range(form.seeds) if seeds is None else seeds:
        assert outcome(form, way, seed, **options) in allowed, f"allowed: {form.allowed}, seed {seed}"


@pytest.mark.parametrize("name", [*FORMS, *one_in(2, DIVISORS), *one_in(2, COMPARED)])
def test_form_of_a_loss_is_exact_or_said_not_to_be(name):
    assert_allowed(ALL[name], by_runner)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name, form in ALL.items() if form.swept])
def test_form_of_a_loss_is_exact_or_said_not_to_be_in_other_windows(name):
    assert_allowed(ALL[name], by_runner, range(ALL[name].seeds, ALL[name].swept))


@pytest.mark.parametrize("name", ["sqrt of a mean, parts nearly alike", "contrastive", "weights that cancel after 0"])
def test_window_that_is_refused_is_refused_each_time(name):
    form, model = ALL[name], ALL[name].model().to(ALL[name].dtype)
    train = by_runner(form, model, sgd(form, model))
    windows = form.windows(0) if callable(form.windows) else form.windows

    for _ in range(3):
        with pytest.raises(autoaccum.InvalidInputError, match=form.said or None):
            train([converted(form.batch(windows[0]), form.dtype)])


@pytest.mark.parametrize("name", IN_CLOSURES)
def test_closure_with_this_form_of_a_loss_is_exact_or_said_not_to_be(name):
    assert_allowed(ALL[name], by_accumulator, range(1))


@pytest.mark.parametrize(
    "name", [*list(FORMS)[2::16], "sum / number of the batch, labels by int in (3, 1, 4, 2) of 10"]
)
def test_fit_with_this_form_of_a_loss_is_exact_or_says_that_it_is_not(name):
    assert_allowed(ALL[name], by_fit, at_once=4)


@pytest.mark.parametrize("name", ["ce ignore", "masked sum / mask sum", *LOW_PRECISION])
def test_weighting_by_samples_would_be_seen(name):
    assert outcome(FORMS[name], by_samples).startswith("wrong")


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
