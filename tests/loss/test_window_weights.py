"""Sums with weights: each form of a loss is exact, or said not to be, by its summands alone."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from across.test_loss_forms_generated import LOSSES_OF_TERMS, WINDOWS, Loss, Term, numbers
from by_summands import BySummands, by_summands
from gradients import cuts
from loss_forms import FORMS, Form, N, ce, focal, window
from loss_outcomes import outcome

# A number that nothing tells from max(41, n), where 39 labels are in the samples that are tried, and 45 in all.
MAY_BE_CLAMPED = "num_items tensor"


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.precision == "fp32"])
def test_form_of_a_loss_is_exact_or_said_not_to_be(name):
    allowed = FORMS[name].allowed.split(" or ") + ["warned"] * (name == MAY_BE_CLAMPED)

    assert outcome(FORMS[name], by_summands) in allowed


@pytest.mark.parametrize("examples", [20, pytest.param(600, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_loss_trains_silently_wrong(dtype, examples):
    @settings(
        max_examples=examples,
        phases=[Phase.reuse, Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(loss=LOSSES_OF_TERMS, several=WINDOWS, seed=st.integers(0, 99), cut=cuts(N))
    def assert_of(loss, several, seed, cut):
        windows = [window(number, *map(numbers, each), seed) for number, each in enumerate(several)]
        mixes = len(loss.terms) > 1 and not loss.is_named
        low = {"lr": 0.1, "tolerance": 1e-3} if dtype is torch.float32 else {"lr": 1e-3, "tolerance": 1e-8}

        found = outcome(Form(loss, cut=cut, dtype=dtype, mixes=mixes, **low), by_summands, windows)

        assert not found.startswith("wrong"), found

    assert_of()


# --- clamped divisors -------------------------------------------------------------------------------------------------

CUT = (8, 3, 5, 9, 2, 1, 4)


def large(number, positive, seed):
    """A window of 32 samples, of which this part is positive."""
    chance = torch.Generator().manual_seed(1000 * seed + number)
    return {
        "x": torch.randn(32, 6, 8, generator=chance, dtype=torch.float64),
        "z": torch.randn(32, 6, 5, generator=chance, dtype=torch.float64),
        "y": torch.randint(0, 5, (32, 6), generator=chance),
        "has": (torch.rand(32, generator=chance) < positive).double(),
    }


def boxes(o, b):
    return (functional.mse_loss(o, b["z"], reduction="none").mean((1, 2)) * b["has"]).sum()


CLAMPED = {
    "focal / n": lambda o, b, n: focal(o, b).sum() / n,
    "boxes / n": lambda o, b, n: boxes(o, b) / n,
    "ce + boxes / n": lambda o, b, n: ce(o, b["y"]) + boxes(o, b) / n,
    "(focal + boxes) / n": lambda o, b, n: (focal(o, b).sum() + boxes(o, b)) / n,
    "focal / n + boxes / n": lambda o, b, n: focal(o, b).sum() / n + boxes(o, b) / n,
    "by name": lambda o, b, n: {"classes": focal(o, b).sum() / n, "boxes": boxes(o, b) / n},
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 4))])
@pytest.mark.parametrize(
    "positive", [0.06, 0.25, *(pytest.param(p, marks=pytest.mark.sweep) for p in (0.03, 0.12, 0.5))]
)
@pytest.mark.parametrize("least", [1.0, 4.0])
@pytest.mark.parametrize("name", CLAMPED)
def test_clamped_divisor_is_exact_or_said_not_to_be(name, least, positive, seed):
    def loss(o, b):
        return CLAMPED[name](o, b, b["has"].sum().clamp(min=least))

    form = Form(loss, cut=CUT, tolerance=1e-6, mixes="+" in name)
    found = outcome(form, by_summands, [large(number, positive, 100 + seed) for number in range(5)])

    assert not found.startswith("wrong"), found


# --- several divisors -------------------------------------------------------------------------------------------------


def gradient(run, model, batch, sizes):
    """The gradient by summands of a third window like the others, what was warned of, and that of the whole batch."""
    made = BySummands(run, model)
    for _ in range(3):
        made.window(batch, sizes)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    run(batch).backward()
    return found, made, [parameter.grad for parameter in model.parameters()]


def tasks():
    torch.manual_seed(0)
    model = nn.ModuleDict({"depth": nn.Linear(10, 1), "label": nn.Linear(10, 4)}).double()
    model.log_variances = nn.Parameter(torch.zeros(2).double())
    inputs, depths, labels = torch.randn(14, 10).double(), torch.randn(14).double(), torch.randint(4, (14,))
    mask = torch.rand(14) < 0.7

    def loss(batch):
        inputs, depths, labels, mask = batch
        square = ((model["depth"](inputs)[:, 0] - depths) ** 2 * mask).sum() / mask.sum()
        entropy = functional.cross_entropy(model["label"](inputs), labels)
        first, second = model.log_variances
        return (-first).exp() * square + first + (-second).exp() * entropy + second

    return model, loss, (inputs, depths, labels, mask)


def test_learned_weights_of_tasks_are_exact():
    model, loss, batch = tasks()

    found, made, expected = gradient(loss, model, batch, (5, 5, 4))

    torch.testing.assert_close(found, expected)
    assert not made.knowledge.warnings
    assert not made.remade


@pytest.mark.parametrize("counts", [1, 2, 4, 5])
def test_any_number_of_divisors_is_exact_though_the_batch_counts_none(counts):
    torch.manual_seed(0)
    model, inputs = nn.Linear(10, counts).double(), torch.randn(60, 10).double()

    def loss(inputs):
        outputs = model(inputs)
        kept = (inputs[:, :counts] > 0).double()  # which the loader does not give
        return sum((outputs[:, n].square() * kept[:, n]).sum() / kept[:, n].sum() for n in range(counts))

    found, made, expected = gradient(loss, model, inputs, (20, 25, 15))

    torch.testing.assert_close(found, expected)
    assert not made.knowledge.warnings


@pytest.mark.parametrize("penalty", [torch.abs, torch.square])
def test_penalty_on_parameters_counts_once(penalty):
    torch.manual_seed(0)
    model, inputs, labels = nn.Linear(10, 4).double(), torch.randn(12, 10).double(), torch.randint(4, (12,))

    def loss(batch):
        of_weights = sum(penalty(parameter).sum() for parameter in model.parameters())
        return functional.cross_entropy(model(batch[0]), batch[1]) + 0.01 * of_weights

    found, made, expected = gradient(loss, model, (inputs, labels), (4, 4, 4))

    torch.testing.assert_close(found, expected)
    assert not made.knowledge.warnings


def test_weight_that_changes_from_step_to_step_is_followed():
    torch.manual_seed(0)
    model = nn.ModuleDict({"label": nn.Linear(10, 4), "latent": nn.Linear(10, 3)}).double()
    factor = 0.0

    def loss(batch):
        inputs, labels = batch
        return (
            functional.cross_entropy(model["label"](inputs), labels)
            + factor * model["latent"](inputs).square().sum(1).mean()
        )

    made = BySummands(loss, model)
    for step in range(1, 12):
        factor = min(1.0, step / 10)
        batch = torch.randn(12, 10).double(), torch.randint(4, (12,))
        made.window(batch, (4, 4, 4))
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        loss(batch).backward()
        torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
    assert not made.remade
    assert not made.knowledge.warnings


def test_sums_of_which_one_alone_is_random_are_added():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"in": nn.Linear(20, 16), "mean": nn.Linear(16, 4), "log": nn.Linear(16, 4), "out": nn.Linear(4, 20)}
    ).double()

    def loss(inputs):
        hidden = model["in"](inputs).relu()
        mean, log = model["mean"](hidden), model["log"](hidden)
        latent = mean + torch.randn_like(mean) * (0.5 * log).exp()
        entropy = functional.binary_cross_entropy_with_logits(model["out"](latent), inputs, reduction="sum")
        return entropy - 0.5 * (1 + log - mean.square() - log.exp()).sum()

    inputs, made = torch.rand(12, 20).double(), BySummands(loss, model)
    torch.manual_seed(1)
    made.window(inputs, (4, 4, 4))
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    for part in inputs.split(4):
        loss(part).backward()

    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
    assert not made.knowledge.warnings


def test_window_is_checked_again_where_a_count_had_fitted_by_accident():
    torch.manual_seed(0)
    model, made = nn.Linear(10, 2).double(), None

    def loss(batch):
        outputs = model(batch["inputs"])
        hidden = batch["inputs"][:, 0].abs() if batch["later"][0] else batch["mask"]
        return (outputs[:, 0].square() * hidden).sum() / hidden.sum() + outputs[:, 1].square().mean()

    made = BySummands(loss, model)
    for number in range(8):
        batch = {
            "inputs": torch.randn(12, 10).double(),
            "mask": (torch.rand(12) < 0.6).double(),
            "later": torch.full((12,), number > 4),
        }
        batch["mask"][:3] = 1.0
        made.window(batch, (4, 4, 4))
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        loss(batch).backward()
        torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
    assert not made.knowledge.warnings


@pytest.mark.parametrize("beside", ["mean", "sum"])
def test_term_that_compares_samples_is_refused_beside_a_mean_and_warned_of_beside_a_sum(beside):
    form = FORMS["ce mean"]

    def loss(o, b):
        return ce(o, b["y"], reduction=beside) + 0.1 * o.mean((0, 1)).square().sum()

    found = outcome(Form(loss, form.model, tolerance=1.0), by_summands)

    assert found == ("refused" if beside == "mean" else "warned")


def test_mean_that_is_divided_again_is_told_though_it_was_divided_by_1_when_it_was_checked():
    """By one sample alone of each window, so that no check can compare two parts."""
    term = Term("square", "has", "weighted mean", "mean", "weights, clamped", 0.3)
    several = [("3556351141", "0000000001")] * 2 + [("3641254622", "0000000001")]
    windows = [window(number, *map(numbers, each), 59) for number, each in enumerate(several)]
    form = Form(Loss((term, term), is_named=True), cut=(6, 4), lr=1e-3, tolerance=1e-8)

    assert outcome(form, by_summands, windows) == "warned"
