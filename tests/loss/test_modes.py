"""Losses are tried in training mode, beside dropout: terms that exist only there are found, and nothing is left."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._loss.modes import Clamps, quiet_training, without_onednn
from support.faults.modes import InterruptAtLine
from support.models.small import CPU

N, IN, HIDDEN = 16, 6, 8
X = torch.randn(N, IN, generator=torch.Generator().manual_seed(0))
PAIR = X, torch.arange(N) % 3


class GradientOnly(torch.autograd.Function):
    """Adds a loss by its gradient alone, as DeepSeek's gate does."""

    @staticmethod
    def forward(ctx, outputs, loss):
        return outputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones((), dtype=gradient.dtype)


class Gate(nn.Module):
    """A mixture of four linear experts, balanced in training mode."""

    def __init__(self, *, balance="added", dropout=0.1):
        torch.manual_seed(0)
        super().__init__()
        self.router, self.dropout = nn.Linear(IN, 4), nn.Dropout(dropout)
        self.experts = nn.ModuleList(nn.Linear(IN, HIDDEN) for _ in range(4))
        self.head = nn.Linear(HIDDEN, 3)
        self.balance, self.aux_loss = balance, None

    def forward(self, inputs):
        shares = self.router(inputs).softmax(-1)
        mixed = self.dropout(sum(shares[:, [n]] * expert(inputs) for n, expert in enumerate(self.experts)))
        if self.training and self.balance == "gradient only":
            mixed = GradientOnly.apply(mixed, 0.01 * self._balance(shares))
        self.aux_loss = self._balance(shares) if self.training else None
        return self.head(mixed)

    def _balance(self, shares):
        chosen = functional.one_hot(shares.argmax(-1), 4).to(shares.dtype)
        return 4 * (chosen.mean(0) * shares.mean(0)).sum()


def with_aux(model, batch):
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    return loss if model.aux_loss is None or model.balance != "added" else loss + 0.01 * model.aux_loss


def step(model, loss, batch=PAIR, **options):
    """Make an update from two micro-batches; return what was said of gradients that may be wrong."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    runner = autoaccum.Runner(
        model, optimizer, autoaccum.plan(N, 8), loss=loss, device=CPU, precision="fp32", **options
    )
    return runner.step(batch).warnings


def test_term_of_training_mode_is_refused():
    with pytest.raises(autoaccum.InvalidInputError, match="term 2 of 2 of loss 'with_aux' is neither a mean nor a sum"):
        step(Gate(), [with_aux])


def test_term_that_is_a_gradient_alone_is_refused():
    with pytest.raises(autoaccum.InvalidInputError, match="neither a mean nor a sum over samples"):
        step(Gate(balance="gradient only").double(), [with_aux], (X.double(), PAIR[1]))


def test_quiet_training_that_is_interrupted_at_any_line_leaves_modules_as_they_were():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def check():
        with quiet_training([net], noting=Clamps()), without_onednn():
            net(torch.zeros(2, 3))

    listing = InterruptAtLine("autoaccum")
    with listing:
        check()

    for line in range(1, listing.count + 1):
        with pytest.raises(KeyboardInterrupt), InterruptAtLine("autoaccum", line):
            check()
        assert all(part.training for part in net.modules())
        assert torch.backends.mkldnn.enabled
    assert listing.count > 40
