"""The gradient of a window is that of the whole batch, whatever a loss of torch runs over; what pairs may be."""

import contextlib
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autoaccum
from autoaccum._loss.terms import ELEMENTWISE, check_pair, of_torch, weight_of_pair
from autoaccum.errors import InvalidInputError

N, C, T = 9, 4, 5
CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 2.5, 7.0], dtype=torch.float64)


def generator():
    return torch.Generator().manual_seed(0)


def real(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=generator())


def classes(*shape, padded=None):
    targets = torch.randint(0, C, shape, generator=generator())
    if padded is not None:
        # Sample i has i targets that do not count; of the last ones none counts.
        for row, sample in enumerate(targets):
            sample[: row if targets.dim() > 1 else 0] = padded
    return targets


def probabilities(*shape):
    return real(*shape).softmax(1)


def signs(*shape):
    return real(*shape).sign()


def multi_label(n, c):
    """Class numbers, ended by -1, of a different length for each sample."""
    targets = torch.full((n, c), -1)
    for row in range(n):
        targets[row, : row % c] = torch.arange(row % c)
    return targets


# Every kind of loss that is read, in every setting that changes what its mean runs over.
CASES = {
    "CrossEntropyLoss": (nn.CrossEntropyLoss, {}, real(N, C), classes(N)),
    "CrossEntropyLoss tokens": (nn.CrossEntropyLoss, {}, real(N, C, T), classes(N, T, padded=-100)),
    "CrossEntropyLoss ignore_index": (nn.CrossEntropyLoss, {"ignore_index": 2}, real(N, C), classes(N)),
    "CrossEntropyLoss class weights": (nn.CrossEntropyLoss, {"weight": CLASS_WEIGHTS}, real(N, C), classes(N)),
    "CrossEntropyLoss smoothing": (
        nn.CrossEntropyLoss,
        {"label_smoothing": 0.1},
        real(N, C, T),
        classes(N, T, padded=-100),
    ),
    "CrossEntropyLoss everything": (
        nn.CrossEntropyLoss,
        {"label_smoothing": 0.1, "weight": CLASS_WEIGHTS, "ignore_index": 1},
        real(N, C, T),
        classes(N, T, padded=1),
    ),
    "CrossEntropyLoss probabilities": (nn.CrossEntropyLoss, {}, real(N, C), probabilities(N, C)),
    "CrossEntropyLoss probabilities, weights": (
        nn.CrossEntropyLoss,
        {"weight": CLASS_WEIGHTS, "label_smoothing": 0.1},
        real(N, C, T),
        probabilities(N, C, T),
    ),
    "NLLLoss": (nn.NLLLoss, {}, real(N, C).log_softmax(1), classes(N)),
    "NLLLoss everything": (
        nn.NLLLoss,
        {"weight": CLASS_WEIGHTS, "ignore_index": 0},
        real(N, C, T).log_softmax(1),
        classes(N, T, padded=0),
    ),
    "MSELoss": (nn.MSELoss, {}, real(N, 3), real(N, 3) + 1),
    "L1Loss": (nn.L1Loss, {}, real(N, 3), real(N, 3) + 1),
    "SmoothL1Loss": (nn.SmoothL1Loss, {}, real(N), real(N) + 1),
    "HuberLoss": (nn.HuberLoss, {"delta": 0.5}, real(N, 3), real(N, 3) + 1),
    "BCELoss": (nn.BCELoss, {"weight": CLASS_WEIGHTS}, real(N, C).sigmoid(), probabilities(N, C)),
    "BCEWithLogitsLoss": (
        nn.BCEWithLogitsLoss,
        {"weight": CLASS_WEIGHTS, "pos_weight": CLASS_WEIGHTS},
        real(N, C),
        probabilities(N, C),
    ),
    "PoissonNLLLoss": (nn.PoissonNLLLoss, {"full": True}, real(N, 3), 2 * probabilities(N, 3)),
    "SoftMarginLoss": (nn.SoftMarginLoss, {}, real(N, 3), signs(N, 3)),
    "KLDivLoss": (nn.KLDivLoss, {}, real(N, C).log_softmax(1), probabilities(N, C)),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss, {"margin": 0.7}, real(N, 3), signs(N, 3)),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss, {}, real(N, C), multi_label(N, C)),
    "MultiMarginLoss": (nn.MultiMarginLoss, {"weight": CLASS_WEIGHTS}, real(N, C), classes(N)),
    "MultiLabelSoftMarginLoss": (
        nn.MultiLabelSoftMarginLoss,
        {"weight": CLASS_WEIGHTS},
        real(N, C),
        probabilities(N, C).round(),
    ),
}
REDUCTIONS = [(name, reduction) for name in CASES for reduction in ("mean", "sum")] + [("KLDivLoss", "batchmean")]

cuts = st.sets(st.integers(1, N - 1)).map(
    lambda stops: [b - a for a, b in zip([0, *sorted(stops)], [*sorted(stops), N], strict=True)]
)


class Outputs(nn.Module):
    """Returns its parameters' rows: the gradient of the loss is that of the outputs."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = nn.Parameter(outputs.clone())

    def forward(self, rows):
        return self.outputs[rows]


def update(loss, outputs, targets, sizes):
    """Return the loss and the gradient of a window that is cut into these sizes."""
    model = Outputs(outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    runner = autoaccum.Runner(model, optimizer, autoaccum.Plan(len(outputs), tuple(sizes)), loss=loss, device="cpu")
    report = runner.step((torch.arange(len(outputs)), targets))
    return report.loss, outputs - model.outputs.detach()


def by_hand(loss, outputs, targets):
    outputs = outputs.clone().requires_grad_()
    value = loss(outputs, targets)
    value = value.reshape(len(outputs), -1).sum(1).mean() if value.dim() else value
    return value.item(), torch.autograd.grad(value, outputs)[0]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")
@pytest.mark.parametrize(("name", "reduction"), REDUCTIONS)
@settings(max_examples=4)
@given(sizes=cuts)
def test_any_cut_has_the_loss_and_the_gradient_of_the_whole_batch(name, reduction, sizes):
    make, arguments, outputs, targets = CASES[name]
    loss = make(reduction=reduction, **arguments)

    found, gradient = update(loss, outputs, targets, sizes)

    expected, wanted = by_hand(loss, outputs, targets)
    assert found == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "CrossEntropyLoss class weights", "NLLLoss", "MSELoss"])
@pytest.mark.parametrize("sizes", [(9,), (5, 4), (1, 2, 6)])
def test_vector_of_losses_is_averaged_over_the_samples(name, sizes):
    make, arguments, outputs, targets = CASES[name]
    loss = make(reduction="none", **arguments)

    def of_samples(outputs, targets):
        return loss(outputs, targets).reshape(len(outputs), -1).sum(1)

    found, gradient = update(of_samples, outputs, targets, sizes)

    expected, wanted = by_hand(of_samples, outputs, targets)
    assert found == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.CrossEntropyLoss(), torch.full((4,), -100)),
        (nn.NLLLoss(ignore_index=2), torch.full((4,), 2)),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0])), torch.ones(4, dtype=torch.long)),
    ],
    ids=["ignored", "ignored class", "class of weight 0"],
)
@pytest.mark.parametrize("sizes", [(4,), (3, 1)])
def test_window_in_which_nothing_counts_is_refused(loss, targets, sizes):
    with pytest.raises(InvalidInputError, match=r"no target of this window counts.*leave such samples out"):
        update(loss, torch.rand(4, 2), targets, sizes)


def test_sum_over_targets_that_do_not_count_is_no_error():
    loss, gradient = update(nn.CrossEntropyLoss(reduction="sum"), torch.rand(4, 2), torch.full((4,), -100), (3, 1))

    assert loss == 0.0
    assert not gradient.any()


def hooked():
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda _, __, value: value.sqrt())
    return loss


@pytest.mark.parametrize(
    "loss",
    [
        None,
        lambda outputs, targets: outputs.mean(),
        type("Weighted", (nn.CrossEntropyLoss,), {})(),
        nn.TripletMarginLoss(),
        nn.Linear(1, 1),
        hooked(),
    ],
    ids=["none", "lambda", "subclass", "another loss", "another module", "hooked"],
)
def test_loss_that_may_compute_what_it_likes_is_not_read(loss):
    assert of_torch(loss) is None


def test_every_loss_that_would_broadcast_is_guarded_against_it():
    broadcasts = set()
    for make, *_ in CASES.values():
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            make()(torch.rand(4, 1), torch.rand(4))
            broadcasts.add(make)

    assert {nn.MSELoss, nn.PoissonNLLLoss} <= broadcasts
    assert broadcasts <= set(ELEMENTWISE)


# --- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "found"),
    [
        (torch.rand(4, 3), "a tensor of shape \\(4, 3\\)"),
        (torch.ones((), requires_grad=True), "a tensor with a gradient"),
        (torch.ones(()).bool(), "a tensor of type torch.bool"),
        (True, "a bool"),
        ({"accuracy": 0.5}, "a dict"),
        (None, "a NoneType"),
        ("12", "a str"),
    ],
)
def test_what_cannot_be_a_weight_is_refused_and_it_is_said_what_a_pair_means(weight, found):
    with pytest.raises(InvalidInputError, match=f"'mine' is a pair whose second half is {found}; a pair means"):
        weight_of_pair("mine", weight)


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3), torch.tensor([3.0]), np.float32(3), np.int64(3)])
def test_any_single_number_can_be_a_weight(weight):
    assert float(weight_of_pair("mine", weight)) == 3.0


def test_pairs_that_add_up_are_taken():
    check_pair("mine", (9.0, 3.0), [(4.0, 1.0), (5.0, 2.0)], 1e-9)
    check_pair("mine", (0.0, 0.0), [(0.0, 0.0), (0.0, 0.0)], 1e-9)


@pytest.mark.parametrize(
    ("whole", "parts", "found"),
    [
        ((9.0, 0.5), [(4.0, 1.0), (5.0, 0.25)], "second halves do not add up: 0.5 .* 1.25"),
        ((4.5, 3.0), [(4.0, 1.0), (4.75, 2.0)], "first half is a mean \\(4.5 for a batch, 4 and 4.75"),
    ],
    ids=["accuracy", "mean"],
)
def test_pairs_that_do_not_add_up_are_refused(whole, parts, found):
    with pytest.raises(InvalidInputError, match=f"{found}.*a pair means \\(sum, weight\\)"):
        check_pair("mine", whole, parts, 1e-9)
