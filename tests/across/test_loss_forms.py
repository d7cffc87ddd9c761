"""No form of a loss trains silently wrong: exact, or a warning, or an error before anything changed.

The windows are cut unevenly, their labels are ragged, and what counts in them changes from each to the next.
"""

import pytest
import torch

from loss_forms import FORMS
from loss_outcomes import by_accumulator, by_fit, by_runner, by_samples, outcome

LOW_PRECISION = [name for name, form in FORMS.items() if form.dtype is not torch.float64]
# Some by their number, and those to which a closure makes a difference.
IN_CLOSURES = dict.fromkeys([
    *list(FORMS)[::8],
    "F.cross_entropy, weight mean",
    "nn.CrossEntropyLoss weight",
    "class weights in the model",
    "weights w_tokens as 'q7'",
    "dict with L2 of weights",
    "diffusion",
    "needs two samples",
    "inputs are the targets",
    "fp16 with a scaler, ce",
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
