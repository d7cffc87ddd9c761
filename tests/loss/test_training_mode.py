"""Terms that exist in training mode only are found by their gradient, beside dropout, and nothing is left of it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._system.notices import Notices
from helpers import CPU

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

    def __init__(self, *, balance="added", dropout=0.1, bound=True):
        torch.manual_seed(0)
        super().__init__()
        self.router, self.dropout = nn.Linear(IN, 4), nn.Dropout(dropout)
        self.experts = nn.ModuleList(nn.Linear(IN, HIDDEN) for _ in range(4))
        self.head = nn.Linear(HIDDEN, 3)
        self.balance, self.bound = balance, bound
        self.calls, self.aux_loss = 0, None

    def forward(self, inputs):
        self.calls += 1
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


def said_of(model, loss, batch=PAIR, *, windows=1):
    notices = Notices(silent=True)
    plan = autoaccum.plan(N, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    runner = autoaccum.Runner(model, optimizer, plan, loss=loss, notices=notices, device=CPU, precision="fp32")
    for _ in range(windows):
        runner.step(batch)
    return [text for text in notices.texts if text.startswith("loss ") and "off" in text]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("balance", ["added", "gradient only"])
def test_term_of_training_mode_is_told_once_with_its_error(balance, dtype):
    model = Gate(balance=balance).to(dtype)

    (text,) = said_of(model, [with_aux], (X.to(dtype), PAIR[1]), windows=3)

    assert "in training mode only" in text
    assert "the gradient of 'router.weight' is" in text


def test_weight_of_a_term_that_is_adapted_by_gradients_in_training_mode_is_told():
    """The weight of VQGAN's adversarial term: a ratio of gradient norms at the last layer."""

    def adapted(model, batch):
        outputs = model(batch[0])
        own, other = functional.cross_entropy(outputs, batch[1]), outputs.square().mean()
        if not model.training:
            return own
        sizes = [torch.autograd.grad(term, model[-1].weight, retain_graph=True)[0].norm() for term in (own, other)]
        return own + other * (sizes[0] / (sizes[1] + 1e-4)).detach()

    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Dropout(0.5), nn.Linear(HIDDEN, 3))

    (text,) = said_of(model, [adapted])

    assert "in training mode only" in text


def test_model_that_mixes_samples_in_training_mode_is_told_so():
    class Centred(nn.Sequential):
        def forward(self, inputs):
            inside = self[0](inputs)
            return self[1](inside - inside.mean(0) if self.training else inside)

    (text,) = said_of(Centred(nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, 3)), functional.cross_entropy)

    assert "the model's outputs for a sample depend, in training mode, on the other samples" in text


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


@pytest.mark.parametrize(
    "make",
    [
        Functional,
        Recurrent,
        spectral,
        Annealed,
        lambda: nn.Sequential(nn.Linear(IN, HIDDEN), Noise(), nn.Linear(HIDDEN, 3)),
        lambda: nn.Sequential(nn.Linear(IN, HIDDEN), nn.RReLU(), nn.AlphaDropout(), nn.Linear(HIDDEN, 3)),
    ],
    ids=["functions", "recurrent", "moving", "counting", "own noise", "layers"],
)
def test_nothing_is_said_of_layers_that_are_ordinary_in_training_mode(make):
    assert said_of(make(), functional.cross_entropy) == []


@pytest.mark.parametrize("make", [Functional, Recurrent, lambda: nn.Sequential(Noise(), nn.Linear(IN, 3))])
def test_term_is_found_beside_dropout_of_every_kind(make):
    def squared(model, batch):
        outputs = model(batch[0])
        loss = functional.cross_entropy(outputs, batch[1])
        return loss + outputs.mean(0).square().sum() if model.training else loss

    (text,) = said_of(make(), [squared])

    assert "in training mode only" in text


def test_model_that_draws_numbers_of_its_own_is_left_alone():
    """Mixup in forward: which sample meets which is drawn for each micro-batch."""

    class Mixed(nn.Linear):
        def forward(self, inputs):
            return super().forward(
                0.7 * inputs + 0.3 * inputs[torch.randperm(len(inputs))] if self.training else inputs
            )

    assert said_of(Mixed(IN, 3), functional.cross_entropy) == []


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("layers", [1, 2])
def test_layer_that_is_dropped_at_random_is_no_term(rate, layers):
    """Two runs may drop the same layers by chance."""

    class Dropping(nn.Sequential):
        def forward(self, inputs):
            for layer in list(self)[:-1]:
                inputs = inputs if self.training and torch.rand(()) < rate else layer(inputs)
            return self[-1](inputs)

    model = Dropping(*(nn.Linear(IN, IN) for _ in range(layers)), nn.Linear(IN, 3))

    assert said_of(model, functional.cross_entropy) == []


@pytest.mark.parametrize("copies", [True, False])
def test_nothing_is_left_of_the_comparison(copies, monkeypatch):
    if not copies:
        monkeypatch.setattr("autoaccum._loss.stand_ins._COPIED", 0)

    class Writing(Gate):
        def __init__(self):
            super().__init__(dropout=0.5)
            self.register_buffer("seen", torch.zeros(()))
            self.history, self.cache = [], {}

        def forward(self, inputs):
            if self.training:
                self.seen += 1
                self.history.append(inputs.dtype)
                self.head.weight.data.mul_(0.5)
            self.cache.setdefault("scale", torch.ones((), dtype=inputs.dtype))
            return super().forward(inputs) * self.cache["scale"]

    model = Writing()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    (text,) = said_of(model, [with_aux])

    assert "in training mode only" in text
    steps = N // 8
    assert model.history == [torch.float32] * steps
    assert (model.calls, float(model.seen)) == (steps, steps)
    assert model.cache["scale"].dtype is torch.float32
    assert torch.equal(model.head.weight, before["head.weight"] * 0.5**steps)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    for _ in range(steps):
        functional.dropout(torch.zeros(8, HIDDEN), 0.5)
    assert torch.equal(torch.get_rng_state(), after)


def test_model_in_evaluation_mode_is_not_run_in_training_mode():
    model = Gate().eval()

    assert said_of(model, [with_aux]) == []
