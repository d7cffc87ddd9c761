"""Losses are tried in training mode, beside dropout: terms that exist only there are found, and nothing is left."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from helpers import CPU, assert_bitwise

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


def ce(outputs, targets):
    """Not torch's own function, which is not tried."""
    return functional.cross_entropy(outputs, targets)


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


def test_term_of_training_mode_is_told():
    with pytest.warns(autoaccum.LossWarning, match="term 2 of 2 is neither a mean nor a sum"):
        step(Gate(), [with_aux])


def test_term_that_is_a_gradient_alone_is_refused():
    with pytest.raises(autoaccum.InvalidInputError, match="neither a mean nor a sum over samples"):
        step(Gate(balance="gradient only").double(), [with_aux], (X.double(), PAIR[1]))


def test_model_that_mixes_samples_in_training_mode_is_refused():
    class Centred(nn.Sequential):
        def forward(self, inputs):
            inside = self[0](inputs)
            return self[1](inside - inside.mean(0) if self.training else inside)

    with pytest.raises(autoaccum.InvalidInputError, match="neither a mean nor a sum over samples"):
        step(Centred(nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, 3)), ce)


class Functional(nn.Module):
    """Draws its dropout by functions, and normalises by one."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.first, self.last = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, 3)
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.register_buffer("variance", torch.ones(HIDDEN))

    def forward(self, inputs):
        inside = functional.dropout(self.first(inputs), 0.5, training=self.training)
        heads = inside.reshape(-1, 1, 2, 4)
        rate = 0.5 if self.training else 0.0
        inside = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=rate).flatten(1)
        inside = functional.batch_norm(inside, self.mean, self.variance, training=self.training)
        inside = functional.rrelu(functional.alpha_dropout(inside, 0.5, self.training), training=self.training)
        return self.last(inside)


class Noise(nn.Module):
    """A layer of its own that draws noise."""

    def forward(self, inputs):
        return inputs * torch.bernoulli(torch.full_like(inputs[:, :1], 0.5)) * 2 if self.training else inputs


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(IN, HIDDEN, num_layers=2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(HIDDEN, 2, dropout=0.5, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(HIDDEN, 2, 16, dropout=0.5, batch_first=True)
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, inputs):
        inside = self.memory(inputs.unsqueeze(1).expand(-1, 3, -1))[0]
        return self.head(self.encoder(self.attention(inside, inside, inside)[0]).mean(1))


def spectral():
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(IN, HIDDEN))
    older = nn.utils.spectral_norm(nn.Linear(HIDDEN, HIDDEN))
    return nn.Sequential(normed, older, nn.BatchNorm1d(HIDDEN, momentum=None), nn.Linear(HIDDEN, 3))


class Annealed(nn.Sequential):
    """Counts its calls in training mode, in an attribute, a buffer and a list."""

    def __init__(self):
        super().__init__(nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, 3))
        self.calls, self.seen = 0, []
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs):
        if self.training:
            self.calls += 1
            self.seen.append(1)
            self.steps += 1
        return self[1](self[0](inputs)) * (1 + self.calls + len(self.seen) + float(self.steps))


class DropsLayers(nn.Sequential):
    """Two runs may drop the same layers by chance."""

    def forward(self, inputs):
        for layer in list(self)[:-1]:
            inputs = inputs if self.training and torch.rand(()) < 0.5 else layer(inputs)
        return self[-1](inputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DropsLayers(nn.Linear(IN, IN), nn.Linear(IN, IN), nn.Linear(IN, 3)),
        Functional,
        Recurrent,
        spectral,
        Annealed,
        lambda: nn.Sequential(nn.Linear(IN, HIDDEN), Noise(), nn.Linear(HIDDEN, 3)),
        lambda: nn.Sequential(nn.Linear(IN, HIDDEN), nn.RReLU(), nn.AlphaDropout(), nn.Linear(HIDDEN, 3)),
    ],
    ids=["dropped layers", "functions", "recurrent", "moving", "counting", "own noise", "layers"],
)
def test_nothing_is_said_of_layers_that_are_ordinary_in_training_mode(make):
    assert step(make(), ce) == ()


@pytest.mark.parametrize("make", [Functional, Recurrent])
def test_term_is_found_beside_dropout_of_every_kind(make):
    def squared(model, batch):
        outputs = model(batch[0])
        loss = functional.cross_entropy(outputs, batch[1])
        return loss + outputs.mean(0).square().sum() if model.training else loss

    with pytest.warns(autoaccum.LossWarning, match="term 2 of 2 is neither a mean nor a sum"):
        step(make(), [squared])


def test_nothing_is_left_of_the_trial():
    class Writing(Gate):
        def __init__(self):
            super().__init__(dropout=0.5)
            self.register_buffer("seen", torch.zeros(()))
            self.teacher = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, inputs):
            self.seen += 1
            self.teacher.data.mul_(0.5)
            return super().forward(inputs)

    def after(**options):
        model = Writing()
        torch.manual_seed(1)
        step(model, ce, **options)
        return model.state_dict(), torch.get_rng_state(), [part.training for part in model.modules()]

    assert_bitwise(after(), after(loss_reduction="mean"))


def test_model_in_evaluation_mode_is_not_run_in_training_mode():
    assert step(Gate().eval(), [with_aux]) == ()
