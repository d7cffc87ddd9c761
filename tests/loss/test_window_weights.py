"""Sums with weights: every loss of several summands is exact, or said not to be."""

import contextlib
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from across.test_loss_forms_generated import Loss, Term, numbers
from autoaccum._loss import graph_reader, window_weights
from support.losses.forms import FORMS, Form, ce, focal, window
from support.losses.gradients import assert_full_batch_gradient
from support.losses.outcomes import by_runner, outcome

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
    found = outcome(form, by_runner, [large(number, positive, 100 + seed) for number in range(5)])

    assert not found.startswith("wrong"), found


def of_mask(least, factor=1.0):
    return lambda o, b: boxes(o, b) / (factor * b["has"].sum().clamp(min=least))


# What is divided, the masks of windows, another entry of the batch, the micro-batches, and what comes of it.
CLAMPS = {
    "another entry counts as much": (of_mask(1), [[1, 1, 0, 0]], [[1, 0, 1, 0]], (1, 1, 1, 1), "warned"),
    "fewer than k in the window": (
        of_mask(2),
        [[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0]],
        None,
        (2, 2, 2, 2),
        "exact",
    ),
    "twice the count": (of_mask(2, 2.0), [[1] * 12, [1] * 8 + [0, 1, 1, 0]], None, (4, 4, 2, 2), "warned"),
}


@pytest.mark.parametrize("case", CLAMPS.values(), ids=CLAMPS)
def test_clamp_is_told_from_what_the_batch_counts_beside_it(case):
    loss, masks, others, cut, expected = case
    windows = []
    for number, mask in enumerate(masks):
        window = large(number, 1.0, 7)
        window = {name: tensor[: len(mask)] for name, tensor in window.items()}
        other = {} if others is None else {"other": torch.tensor(others[number], dtype=torch.float64)}
        windows.append(window | {"has": torch.tensor(mask, dtype=torch.float64)} | other)

    assert outcome(Form(loss, cut=cut, tolerance=1e-9), by_runner, windows) == expected


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, b: (o[:, 0].square() * (b["y"] != 0)).sum() / (b["y"] != 0).sum().clamp(min=1),
        lambda o, b: ((o[:, 0] - 9).relu() * (b["x"][:, 0] < 0)).sum() / (b["x"][:, 0] < 0).sum().clamp(min=1),
    ],
    ids=["something counts where a count of the batch says nothing", "a loss is 0 where something counts"],
)
def test_clamp_that_no_count_of_the_batch_tells_from_a_divisor_of_1_is_warned_of(loss):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        autoaccum.plan(8, 1),
        loss=loss,
        forward=lambda model, batch: model(batch["x"]),
        device="cpu",
    )

    windows = torch.tensor([[1.0, 2, 0, 3, 0, 1, 1, 2], [1.0, -2, 0, 0, 3, 1, 1, 2]]).double()
    with pytest.warns(autoaccum.LossWarning, match="divides by more in a micro-batch than is counted there"):
        assert all(runner.step({"x": torch.randn(8, 4).double(), "y": y}) for y in windows)


# --- several divisors -------------------------------------------------------------------------------------------------


class Trained:
    """Leaves the gradients of batches by an Accumulator, and of a plain backward pass.

    Attributes:
        passes: Of the model with more than a check's samples, or in a window that is checked.
    """

    def __init__(self, run, model, micro_batch):
        self.run, self.model, self.passes = run, model, 0
        model.register_forward_pre_hook(self.count)
        self.accumulator = autoaccum.Accumulator(
            model, closure=lambda batch: model(run, batch), micro_batch=micro_batch, device="cpu", precision="fp32"
        )

    def count(self, *_):
        self.passes += 1

    def assert_exact(self, batch, seed=None):
        self.model.zero_grad()
        if seed is not None:
            torch.manual_seed(seed)
        with warnings.catch_warnings(action="error"):
            self.report = self.accumulator.backward(batch)
        found = [parameter.grad.clone() for parameter in self.model.parameters()]
        self.model.zero_grad()
        if seed is not None:
            torch.manual_seed(seed)
        parts = [batch] if seed is None else batch.split(self.report.micro_batches)
        for part in parts:
            self.run(self.model, part).backward()
        torch.testing.assert_close(found, [parameter.grad for parameter in self.model.parameters()])


class Called(nn.ModuleDict):
    """Modules, whose pass is a function of theirs."""

    def forward(self, run, batch):
        return run(self, batch)


def of_tasks(model, batch):
    inputs, depths, labels, mask = batch
    square = ((model["depth"](inputs)[:, 0] - depths) ** 2 * mask).sum() / mask.sum()
    entropy = functional.cross_entropy(model["label"](inputs), labels)
    first, second = model.log_variances
    return (-first).exp() * square + first + (-second).exp() * entropy + second


def test_learned_weights_of_tasks_are_exact():
    torch.manual_seed(0)
    model = Called({"depth": nn.Linear(10, 1), "label": nn.Linear(10, 4)}).double()
    model.log_variances = nn.Parameter(torch.zeros(2).double())
    made = Trained(of_tasks, model, 5)

    for _ in range(3):
        inputs, depths, labels = torch.randn(14, 10).double(), torch.randn(14).double(), torch.randint(4, (14,))
        made.assert_exact((inputs, depths, labels, torch.rand(14) < 0.7))
    assert made.report.micro_batches == (5, 5, 4)


@pytest.mark.parametrize("counts", [1, 2, 4, 5])
def test_any_number_of_divisors_is_exact_though_the_batch_counts_none(counts):
    torch.manual_seed(0)

    def loss(model, inputs):
        outputs = model["all"](inputs)
        kept = (inputs[:, :counts] > 0).double()  # which the loader does not give
        return sum((outputs[:, n].square() * kept[:, n]).sum() / kept[:, n].sum() for n in range(counts))

    made = Trained(loss, Called({"all": nn.Linear(10, counts)}).double(), 20)

    for _ in range(5):
        made.assert_exact(torch.randn(60, 10).double())


def test_divisors_that_no_count_predicts_are_learned_by_forward_passes_first_and_no_window_is_made_again():
    torch.manual_seed(0)
    backwards = []

    def loss(model, inputs):
        outputs = model["all"](inputs)
        kept = (inputs[:, :2] > 0).double()
        return sum((outputs[:, n].square() * kept[:, n]).sum() / kept[:, n].sum() for n in range(2))

    made = Trained(loss, Called({"all": nn.Linear(10, 2)}).double(), 20)
    made.model["all"].weight.register_hook(lambda _: backwards.append(1))
    for _ in range(5):
        made.assert_exact(torch.randn(60, 10).double())

    made.passes = 0
    backwards.clear()
    made.assert_exact(torch.randn(60, 10).double())

    assert made.passes == 2 * 3
    assert len(backwards) == 3 + 1  # of the micro-batches, and of the whole to compare


@pytest.mark.parametrize("penalty", [torch.abs, torch.square])
def test_penalty_on_parameters_counts_once(penalty):
    torch.manual_seed(0)

    def loss(model, batch):
        of_weights = sum(penalty(parameter).sum() for parameter in model.parameters())
        return functional.cross_entropy(model["all"](batch[0]), batch[1]) + 0.01 * of_weights

    made = Trained(loss, Called({"all": nn.Linear(10, 4)}).double(), 4)

    for _ in range(3):
        made.assert_exact((torch.randn(12, 10).double(), torch.randint(4, (12,))))


def test_weight_that_changes_from_step_to_step_is_followed_in_one_pass_each():
    torch.manual_seed(0)
    factor = 0.0

    def loss(model, batch):
        inputs, labels = batch
        square = model["latent"](inputs).square().sum(1).mean()
        return functional.cross_entropy(model["label"](inputs), labels) + factor * square

    made = Trained(loss, Called({"label": nn.Linear(10, 4), "latent": nn.Linear(10, 3)}).double(), 4)
    for step in range(1, 12):
        factor, made.passes = min(1.0, step / 10), 0
        made.assert_exact((torch.randn(12, 10).double(), torch.randint(4, (12,))))
        assert made.passes == 3 or step & (step - 1) == 0  # and those of a check


def test_sums_of_which_one_alone_is_random_are_added():
    torch.manual_seed(0)
    model = Called(
        {"in": nn.Linear(20, 16), "mean": nn.Linear(16, 4), "log": nn.Linear(16, 4), "out": nn.Linear(4, 20)}
    ).double()

    def loss(model, inputs):
        hidden = model["in"](inputs).relu()
        mean, log = model["mean"](hidden), model["log"](hidden)
        latent = mean + torch.randn_like(mean) * (0.5 * log).exp()
        entropy = functional.binary_cross_entropy_with_logits(model["out"](latent), inputs, reduction="sum")
        return entropy - 0.5 * (1 + log - mean.square() - log.exp()).sum()

    Trained(loss, model, 4).assert_exact(torch.rand(12, 20).double(), seed=1)


def test_window_is_checked_again_where_a_count_had_fitted_by_accident():
    torch.manual_seed(0)

    def loss(model, batch):
        outputs = model["all"](batch["inputs"])
        hidden = batch["inputs"][:, 0].abs() if batch["later"][0] else batch["mask"]
        return (outputs[:, 0].square() * hidden).sum() / hidden.sum() + outputs[:, 1].square().mean()

    made = Trained(loss, Called({"all": nn.Linear(10, 2)}).double(), 4)
    for number in range(8):
        batch = {
            "inputs": torch.randn(12, 10).double(),
            "mask": (torch.rand(12) < 0.6).double(),
            "later": torch.full((12,), number > 4),
        }
        batch["mask"][:3] = 1.0
        made.assert_exact(batch)


def test_window_that_is_made_again_draws_what_it_drew_before():
    torch.manual_seed(0)
    drawn = []

    def loss(model, batch):
        drawn.append(torch.rand(()).item())
        kept = (functional.dropout(batch[:, :2].abs() + 1.0, 0.5) > 0).double()
        outputs = model["all"](batch)
        return sum((outputs[:, n].square() * kept[:, n]).sum() / kept[:, n].sum() for n in range(2))

    made = Trained(loss, Called({"all": nn.Linear(10, 2)}).double(), 20)
    made.accumulator.backward(torch.randn(60, 10).double())

    assert drawn[-3:] == drawn[-6:-3]


def test_weights_that_differ_between_two_passes_over_one_window_are_warned_of():
    draws, is_thinned = itertools.count(), False

    def loss(outputs, batch):
        kept = torch.ones(len(outputs), dtype=torch.float64)
        if is_thinned:
            kept[(torch.arange(len(outputs)) + next(draws)) % 3 == 0] = 0.0
        return {"a": ((outputs[:, 0].square() * kept).sum(), kept.sum()), "b": (outputs.abs().sum(), len(outputs))}

    torch.manual_seed(0)
    model, samples = nn.Linear(10, 2).double(), torch.randn(20, 10).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(20, 5), loss=loss, device="cpu")
    for _ in range(5):  # the sixth window is checked by no other pass
        runner.step(samples)
    is_thinned = True

    with pytest.warns(UserWarning, match="not the same in two passes over a window"):
        runner.step(samples)


def test_window_of_a_loss_that_is_there_in_some_passes_alone_ends():
    calls = []

    def loss(outputs, batch):
        calls.append(None)
        found = {"a": (outputs.square().sum(), outputs.numel()), "b": (outputs.abs().sum(), len(outputs))}
        return found if torch.is_grad_enabled() else {"a": found["a"]}

    model = nn.Linear(10, 2)
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        autoaccum.plan(12, 4),
        loss=loss,
        forward=lambda model, batch: model(batch["x"]),
        device="cpu",
    )
    with contextlib.suppress(autoaccum.InvalidInputError):
        runner.step({"x": torch.randn(12, 10)})

    assert len(calls) < 30


@pytest.mark.parametrize("factor", [-1.0, 2.0])
def test_clamped_mean_times_a_factor_is_exact_beside_another_mean_and_alone(factor):
    torch.manual_seed(0)

    def loss(model, batch):
        outputs, mask = model["all"](batch["inputs"]), batch["mask"]
        clamped = factor * (outputs[:, 0] * mask).sum() / mask.sum().clamp(min=1)
        return clamped + 0.1 * outputs[:, 1].square().mean() if batch["both"][0] else clamped

    for both in (False, True):
        made = Trained(loss, Called({"all": nn.Linear(10, 2)}).double(), 4)
        for number in range(6):
            mask = torch.ones(12).double()
            mask[:4] = torch.tensor([number == 2, 0.0, 0.0, 0.0]) if number in (2, 4) else 1.0
            made.assert_exact({"inputs": torch.randn(12, 10).double(), "mask": mask, "both": torch.full((12,), both)})


def entropy(outputs, targets):
    """A function of the user's own."""
    return functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), entropy])
def test_nothing_that_counts_in_a_micro_batch_makes_no_nan_where_weights_are_not_waited_for(monkeypatch, loss):
    """As on a GPU, where they are tensors."""
    monkeypatch.setattr(graph_reader, "_on_host", lambda value: value.detach().reshape(()).double())
    monkeypatch.setattr(window_weights, "weight_at_once", lambda _: None)
    torch.manual_seed(0)
    inputs, targets = torch.randn(12, 10).double(), torch.randint(4, (12,))
    targets[4:8] = -100

    assert_full_batch_gradient(nn.Linear(10, 4).double(), loss, (inputs, targets), (4, 4, 4))


@pytest.mark.parametrize("beside", ["mean", "sum"])
def test_term_that_compares_samples_is_refused_beside_a_mean_and_warned_of_beside_a_sum(beside):
    form = FORMS["ce mean"]

    def loss(o, b):
        return ce(o, b["y"], reduction=beside) + 0.1 * o.mean((0, 1)).square().sum()

    found = outcome(Form(loss, form.model, tolerance=1.0), by_runner)

    assert found == ("refused" if beside == "mean" else "warned")


def test_mean_that_is_divided_again_is_told_though_it_was_divided_by_1_when_it_was_checked():
    """By one sample alone of each window, so that no check can compare two parts."""
    term = Term("square", "has", "weighted mean", "mean", "weights, clamped", 0.3)
    several = [("3556351141", "0000000001")] * 2 + [("3641254622", "0000000001")]
    windows = [window(number, *map(numbers, each), 59) for number, each in enumerate(several)]
    form = Form(Loss((term, term), is_named=True), cut=(6, 4), lr=1e-3, tolerance=1e-8)

    assert outcome(form, by_runner, windows) == "warned"
