"""Each node that is read says what it is believed to say, in this version of torch: a canary for each."""

import math

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoaccum._loss import graph_reader
from autoaccum._loss.graph_reader import read, weight_at_once

N, C = 6, 4
CHANCE = torch.Generator().manual_seed(0)
X = torch.randn(N, C, generator=CHANCE, dtype=torch.float64)
Y = torch.randint(0, C, (N,), generator=CHANCE).index_fill(0, torch.tensor(0), -100)
W = torch.rand(N, C, generator=CHANCE, dtype=torch.float64) + 0.1
OF_CLASSES, SOME = float(W[0][Y[1:]].sum()), Y.clamp(min=0)
NUMBER = torch.tensor(8.0, dtype=torch.float64)


def outputs():
    return X.clone().requires_grad_()


def square(x):
    return x.square().sum()


def of_number(change):
    return lambda x: change(x.mean()), N * C


# Losses of outputs, with what each term's sum is divided by; by the node that is to be read.
NODES = {
    "Neg": (lambda x: -square(x), -1),
    "Mul": (lambda x: 0.5 * square(x), 2),
    "Mul by a tensor": (lambda x: square(x) * NUMBER, 1 / 8),
    "Mul of elements": (lambda x: (x.square() * NUMBER).sum(), 1 / 8),
    "Mul by 0": (lambda x: 0.0 * square(x) + x.mean(), N * C),
    "Mul by a learned number": (lambda x: x.square().mean() * NUMBER.clone().requires_grad_().exp(), N * C),
    "Div": (lambda x: square(x) / 5, 5),
    "Div by a tensor": (lambda x: (x.square() * W).sum() / W.sum(), float(W.sum())),
    "Div by a learned number": (lambda x: x.square().mean() / NUMBER.clone().requires_grad_().exp(), N * C),
    "Div of elements": (lambda x: (x.square() / W.sum()).sum(), float(W.sum())),
    "Add": (lambda x: square(x) / 3 + x.abs().mean(), 3, N * C),
    "Add of a constant": (lambda x: square(x) / 3 + 1, 3),
    "Add, alpha": (lambda x: torch.add(x.mean(), square(x), alpha=4), N * C, 1 / 4),
    "Sub": (lambda x: x.mean() - square(x), N * C, -1),
    "Rsub": (lambda x: 1 - x.mean(), -N * C),
    "Mean": (lambda x: x.square().mean(), N * C),
    "Mean of dimensions": (lambda x: x.square().mean((0, 1)), N * C),
    "Mean of sums": (lambda x: x.square().sum(1).mean(), N),
    "Sum": (square, 1),
    "Stack": (lambda x: torch.stack([x[0].sum(), x[1].sum()]).mean(), 2),
    "Cat": (lambda x: torch.cat([x[0].sum()[None], x[1].sum()[None]]).mean(), 2),
    "Expand": (lambda x: x.mean().expand(3).mean(), N * C),
    "Where": (lambda x: torch.where(W.sum() > 0, x.mean(), 0.0), N * C),
    "NllLoss": (lambda x: functional.cross_entropy(x, Y), N - 1),
    "NllLoss, weights": (lambda x: functional.cross_entropy(x, Y, W[0]), OF_CLASSES),
    "NllLoss, sum": (lambda x: functional.cross_entropy(x, Y, reduction="sum"), 1),
    "NllLoss2D": (lambda x: functional.cross_entropy(x.T[None], Y[None]), N - 1),
    "label smoothing": (lambda x: functional.cross_entropy(x, Y, label_smoothing=0.2), (N - 1) / 0.8, (N - 1) / 0.05),
    "MseLoss": (lambda x: functional.mse_loss(x, W), N * C),
    "SmoothL1Loss": (lambda x: functional.smooth_l1_loss(x, W), N * C),
    "HuberLoss": (lambda x: functional.huber_loss(x, W), N * C),
    "SoftMarginLoss": (lambda x: functional.soft_margin_loss(x, W.sign()), N * C),
    "BinaryCrossEntropy": (lambda x: functional.binary_cross_entropy(x.sigmoid(), W.clamp(max=1)), N * C),
    "BinaryCrossEntropyWithLogits": (
        lambda x: functional.binary_cross_entropy_with_logits(x, W.clamp(max=1)),
        N * C,
    ),
    "MultiMarginLoss": (lambda x: functional.multi_margin_loss(x, SOME), N),
    "MultilabelMarginLoss": (lambda x: functional.multilabel_margin_loss(x, SOME[:, None].expand(N, C)), N),
    "Dot": (lambda x: x.flatten() @ W.flatten() / 7, 7),
    "ToCopy of a number": of_number(lambda one: one.float()),
    "Squeeze of a number": of_number(lambda one: one[None].squeeze(0)),
    "View of a number": of_number(lambda one: one.view(1)),
    "Clone of a number": of_number(lambda one: one.clone()),
    "NanToNum of a number": of_number(lambda one: one.nan_to_num()),
    "Permute of a number": of_number(lambda one: one[None, None].permute(1, 0)),
}


@pytest.mark.parametrize("name", NODES)
def test_weight_is_read(name):
    loss, *expected = NODES[name]

    found = read(loss(outputs()))

    assert [one.weight for one in found] == pytest.approx(expected, rel=1e-12)
    assert weight_at_once(loss(outputs())) in (None, found[0].weight)


# Numbers that are a multiple of what they are computed from for some samples and not for others, by their node.
NONLINEAR = {
    "Abs": lambda x: (x.mean() - 1).abs(),
    "Sqrt": lambda x: x.square().mean().sqrt(),
    "Rsqrt": lambda x: x.square().mean().rsqrt(),
    "Pow": lambda x: x.mean().pow(2),
    "Exp": lambda x: x.mean().exp(),
    "Log": lambda x: x.exp().sum().log(),
    "Log1P": lambda x: x.square().mean().log1p(),
    "Reciprocal": lambda x: x.mean().reciprocal(),
    "Sigmoid": lambda x: x.mean().sigmoid(),
    "Tanh": lambda x: x.mean().tanh(),
    "Softplus": lambda x: functional.softplus(x.mean()),
    "Clamp": lambda x: x.mean().clamp(0, 1),
    "ClampMin": lambda x: x.mean().clamp(min=0),
    "ClampMax": lambda x: x.mean().clamp(max=1),
    "Relu": lambda x: x.mean().relu(),
    "LeakyRelu": lambda x: functional.leaky_relu(x.mean()),
    "Maximum": lambda x: torch.maximum(x.mean(), x.sum()),
    "Minimum": lambda x: torch.minimum(x.mean(), x.sum()),
    "Max": lambda x: x.max(),
    "Min": lambda x: x.min(),
}
OTHERS = {
    "norm": lambda x: x.norm(),
    "1 / a mean": lambda x: 1 / x.square().mean(),
    "product of two means": lambda x: x.square().mean() * x.abs().mean(),
    "checkpointed": lambda x: checkpoint(lambda: (x * W).sum() / W.sum(), use_reentrant=False),
}


@pytest.mark.parametrize("name", [*NONLINEAR, *OTHERS])
def test_what_is_no_sum_of_elements_is_not_read(name):
    assert read((NONLINEAR | OTHERS)[name](outputs()))[0].weight is None


def test_half_precision_does_not_round_a_count():
    x = torch.zeros(999, 2, dtype=torch.bfloat16, requires_grad=True)

    assert read(functional.cross_entropy(x, torch.zeros(999, dtype=torch.long)))[0].weight == 999


def test_what_is_multiplied_by_0_alone_is_divided_by_infinity():
    assert read(0.0 * square(outputs()))[0].weight == math.inf


def test_every_node_has_its_canary():
    aliases = {"UnsafeView", "ReshapeAlias", "Alias", "Transpose", "T", "AsStrided", "Contiguous", "Unsqueeze", "Mv"}
    tried = {name.split()[0].rstrip(",") for name in NODES} | NONLINEAR.keys()

    assert set(graph_reader._BY_NAME) - aliases - tried <= {"Mm", "Bmm"}


def test_stopped_term_leaves_zeros_though_it_is_divided_by_0():
    x, scale = outputs(), NUMBER.clone().requires_grad_()
    loss = scale.exp() * (square(x) / 0.0) + x.mean()

    first, *_ = read(loss)
    graph_reader.stop(first)
    loss.backward()

    assert scale.grad == 0
    assert torch.equal(x.grad, torch.full_like(x, 1 / (N * C)))


def test_mean_that_is_there_twice_is_read_twice():
    x = outputs()
    mean = (x.square() * W).sum() / W.sum()

    terms = read(mean + 0.5 * mean + x.abs().mean())

    assert [term.weight for term in terms] == pytest.approx([float(W.sum()) / 1.5, N * C])
