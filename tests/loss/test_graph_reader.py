"""Each node that is read says what it is believed to say, in this version of torch: a canary for each."""

import math

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoaccum._loss import graph_reader
from autoaccum._loss.graph_reader import read, weight_at_once

N, C = 6, 4


def made():
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(N, C, generator=chance, dtype=torch.float64).requires_grad_()
    y = torch.randint(0, C, (N,), generator=chance)
    y[0] = -100
    return x, y, torch.rand(N, C, generator=chance, dtype=torch.float64) + 0.1


def square(x):
    return x.square().sum()


NUMBER = torch.tensor(8.0, dtype=torch.float64)
# Losses of (outputs, classes, weights), with what each term's sum is divided by; by the node that is to be read.
NODES = {
    "Neg": (lambda x, y, w: -square(x), lambda y, w: [-1]),
    "Mul": (lambda x, y, w: 0.5 * square(x), lambda y, w: [2]),
    "Mul by a tensor": (lambda x, y, w: square(x) * NUMBER, lambda y, w: [1 / 8]),
    "Mul of elements": (lambda x, y, w: (x.square() * NUMBER).sum(), lambda y, w: [1 / 8]),
    "Div": (lambda x, y, w: square(x) / 5, lambda y, w: [5]),
    "Div by a tensor": (lambda x, y, w: (x.square() * w).sum() / w.sum(), lambda y, w: [float(w.sum())]),
    "Div of elements": (lambda x, y, w: (x.square() / w.sum()).sum(), lambda y, w: [float(w.sum())]),
    "Add": (lambda x, y, w: square(x) / 3 + x.abs().mean(), lambda y, w: [3, N * C]),
    "Add of a constant": (lambda x, y, w: square(x) / 3 + 1, lambda y, w: [3]),
    "Add, alpha": (lambda x, y, w: torch.add(x.mean(), square(x), alpha=4), lambda y, w: [N * C, 1 / 4]),
    "Sub": (lambda x, y, w: x.mean() - square(x), lambda y, w: [N * C, -1]),
    "Rsub": (lambda x, y, w: 1 - x.mean(), lambda y, w: [-N * C]),
    "Mean": (lambda x, y, w: x.square().mean(), lambda y, w: [N * C]),
    "Mean of dimensions": (lambda x, y, w: x.square().mean((0, 1)), lambda y, w: [N * C]),
    "Mean of sums": (lambda x, y, w: x.square().sum(1).mean(), lambda y, w: [N]),
    "Sum": (lambda x, y, w: square(x), lambda y, w: [1]),
    "Stack": (lambda x, y, w: torch.stack([x[0].sum(), x[1].sum()]).mean(), lambda y, w: [2]),
    "Cat": (lambda x, y, w: torch.cat([x[0].sum()[None], x[1].sum()[None]]).mean(), lambda y, w: [2]),
    "Expand": (lambda x, y, w: x.mean().expand(3).mean(), lambda y, w: [N * C]),
    "Where": (lambda x, y, w: torch.where(w.sum() > 0, x.mean(), 0.0), lambda y, w: [N * C]),
    "NllLoss": (lambda x, y, w: functional.cross_entropy(x, y), lambda y, w: [N - 1]),
    "NllLoss, weights": (
        lambda x, y, w: functional.cross_entropy(x, y, w[0]),
        lambda y, w: [float(w[0][y[y >= 0]].sum())],
    ),
    "NllLoss, sum": (lambda x, y, w: functional.cross_entropy(x, y, reduction="sum"), lambda y, w: [1]),
    "NllLoss2D": (lambda x, y, w: functional.cross_entropy(x.T[None], y[None]), lambda y, w: [N - 1]),
    "label smoothing": (
        lambda x, y, w: functional.cross_entropy(x, y, label_smoothing=0.2),
        lambda y, w: [(N - 1) / 0.8, (N - 1) / 0.05],
    ),
    "MseLoss": (lambda x, y, w: functional.mse_loss(x, w), lambda y, w: [N * C]),
    "SmoothL1Loss": (lambda x, y, w: functional.smooth_l1_loss(x, w), lambda y, w: [N * C]),
    "HuberLoss": (lambda x, y, w: functional.huber_loss(x, w), lambda y, w: [N * C]),
    "SoftMarginLoss": (lambda x, y, w: functional.soft_margin_loss(x, w.sign()), lambda y, w: [N * C]),
    "BinaryCrossEntropy": (
        lambda x, y, w: functional.binary_cross_entropy(x.sigmoid(), w.clamp(max=1)),
        lambda y, w: [N * C],
    ),
    "BinaryCrossEntropyWithLogits": (
        lambda x, y, w: functional.binary_cross_entropy_with_logits(x, w.clamp(max=1)),
        lambda y, w: [N * C],
    ),
    "MultiMarginLoss": (lambda x, y, w: functional.multi_margin_loss(x, y.clamp(min=0)), lambda y, w: [N]),
    "MultilabelMarginLoss": (
        lambda x, y, w: functional.multilabel_margin_loss(x, y.clamp(min=0)[:, None].expand(N, C)),
        lambda y, w: [N],
    ),
    "Dot": (lambda x, y, w: x.flatten() @ w.flatten() / 7, lambda y, w: [7]),
    **{
        f"{name} of a number": (lambda x, y, w, change=change: change(x.mean()), lambda y, w: [N * C])
        for name, change in {
            "ToCopy": lambda one: one.float(),
            "Squeeze": lambda one: one[None].squeeze(0),
            "View": lambda one: one.view(1),
            "Clone": lambda one: one.clone(),
            "NanToNum": lambda one: one.nan_to_num(),
            "Permute": lambda one: one[None, None].permute(1, 0),
        }.items()
    },
}


@pytest.mark.parametrize("name", NODES)
def test_weight_is_read(name):
    loss, expected = NODES[name]

    found = read(loss(*made()))

    assert [one.weight for one in found] == pytest.approx(expected(*made()[1:]), rel=1e-12)
    assert weight_at_once(loss(*made())) in (None, found[0].weight)


# Numbers that are a multiple of what they are computed from for some samples and not for others.
NONLINEAR = {
    "Abs": lambda x, _: (x.mean() - 1).abs(),
    "Sqrt": lambda x, _: x.square().mean().sqrt(),
    "Rsqrt": lambda x, _: x.square().mean().rsqrt(),
    "Pow": lambda x, _: x.mean().pow(2),
    "Exp": lambda x, _: x.mean().exp(),
    "Log": lambda x, _: x.square().mean().log(),
    "Log1P": lambda x, _: x.square().mean().log1p(),
    "Reciprocal": lambda x, _: x.mean().reciprocal(),
    "Sigmoid": lambda x, _: x.mean().sigmoid(),
    "Tanh": lambda x, _: x.mean().tanh(),
    "Softplus": lambda x, _: functional.softplus(x.mean()),
    "Clamp": lambda x, _: x.mean().clamp(0, 1),
    "ClampMin": lambda x, _: x.mean().clamp(min=0),
    "ClampMax": lambda x, _: x.mean().clamp(max=1),
    "Relu": lambda x, _: x.mean().relu(),
    "LeakyRelu": lambda x, _: functional.leaky_relu(x.mean()),
    "Maximum": lambda x, _: torch.maximum(x.mean(), x.sum()),
    "Minimum": lambda x, _: torch.minimum(x.mean(), x.sum()),
    "Max": lambda x, _: x.max(),
    "Min": lambda x, _: x.min(),
}


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, _: x.square().mean().sqrt(),
        lambda x, _: x.exp().sum().log(),
        lambda x, w: checkpoint(lambda: (x * w).sum() / w.sum(), use_reentrant=False),
        lambda x, _: 1 / x.square().mean(),
        lambda x, _: x.norm(),
        *NONLINEAR.values(),
    ],
    ids=["root", "log", "checkpointed", "reciprocal", "norm", *NONLINEAR],
)
def test_what_is_no_sum_of_elements_is_not_read(loss):
    x, _, w = made()

    assert read(loss(x, w))[0].weight is None


def test_half_precision_does_not_round_a_count():
    x = torch.zeros(999, 2, dtype=torch.bfloat16, requires_grad=True)

    assert read(functional.cross_entropy(x, torch.zeros(999, dtype=torch.long)))[0].weight == 999


def test_what_is_multiplied_by_0_is_not_there():
    x = made()[0]

    assert [one.weight for one in read(0.0 * square(x) + x.mean())] == [N * C]
    assert read(0.0 * square(x))[0].weight == math.inf


def test_every_node_has_its_canary():
    aliases = {"UnsafeView", "ReshapeAlias", "Alias", "Transpose", "T", "AsStrided", "Contiguous", "Unsqueeze", "Mv"}
    tried = {name.split()[0].rstrip(",") for name in NODES} | NONLINEAR.keys()

    assert set(graph_reader._BY_NAME) - aliases - tried <= {"Mm", "Bmm"}


@pytest.mark.parametrize("how", [lambda one, other: one * other, lambda one, other: other * one, torch.div])
def test_mean_times_a_number_with_a_gradient_is_read_by_its_mean(how):
    x, _, _ = made()
    scale = torch.tensor(0.5, dtype=torch.float64).requires_grad_()

    (term,) = read(how(x.square().mean(), scale.exp()))

    assert term.weight == N * C


def test_product_of_two_means_is_not_read():
    x, _, _ = made()

    (term,) = read(x.square().mean() * x.abs().mean())

    assert term.weight is None


def test_stopped_term_leaves_zeros_though_it_is_divided_by_0():
    x, _, _ = made()
    scale = torch.tensor(0.5, dtype=torch.float64).requires_grad_()
    loss = scale.exp() * (x.square().sum() / 0.0) + x.mean()

    first, *_ = read(loss)
    graph_reader.stop(first)
    loss.backward()

    assert scale.grad == 0
    assert torch.equal(x.grad, torch.full_like(x, 1 / (N * C)))


def test_mean_that_is_there_twice_is_read_twice():
    x, _, w = made()
    mean = (x.square() * w).sum() / w.sum()

    terms = read(mean + 0.5 * mean + x.abs().mean())

    assert [term.weight for term in terms] == pytest.approx([float(w.sum()) / 1.5, N * C])
