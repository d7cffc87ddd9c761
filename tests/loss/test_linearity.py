"""A term whose value hides in rounding is found by the gradient that it bends, named, and measured."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._system.notices import Notices
from gradients import cut_gradient, joined
from helpers import CPU

N, T, V = 8, 12, 40
TOKENS = torch.randint(1, V, (N, T), generator=torch.Generator().manual_seed(0))
BATCH = {"tokens": TOKENS, "labels": TOKENS}


class Experts(nn.Module):
    """Two experts under a router, whose load-balancing loss is that of Mixtral."""

    def __init__(self, coefficient, *, reports=True):
        super().__init__()
        torch.manual_seed(0)
        self.coefficient, self.reports = coefficient, reports
        self.embed = nn.Embedding(V, 8)
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, V)

    def forward(self, tokens, labels):
        inside = self.embed(tokens).flatten(0, 1)
        shares = self.router(inside).softmax(-1)
        chosen = functional.one_hot(shares.argmax(-1), 4)
        mixed = sum(shares[:, [n]] * expert(inside) for n, expert in enumerate(self.experts))
        balance = 4 * (chosen.to(shares.dtype).mean(0) * shares.mean(0)).sum()
        loss = functional.cross_entropy(self.head(mixed), labels.flatten()) + self.coefficient * balance
        return {"loss": loss, "balance": balance} if self.reports else {"loss": loss}


class Tagger(nn.Module):
    """Linear in its samples, with a recurrent layer, and a bias whose gradient is zero but for rounding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, V)
        self.head.weight = self.embed.weight

    def forward(self, tokens, labels):
        inside = self.embed(tokens)
        inside = inside + self.attention(inside, inside, inside, need_weights=False)[0]
        inside = self.dropout(self.memory(inside)[0]).flatten(0, 1)
        return {"loss": functional.cross_entropy(self.head(self.norm(inside)), labels.flatten())}


def told(model, batch=BATCH, *, windows=1, loss=None, **options):
    """Make some windows' updates; return what was said of a term that bends the gradient."""
    notices = Notices(silent=True)
    plan = autoaccum.plan(N, 4)
    settings = {"device": CPU, "precision": "fp32"} | options
    runner = autoaccum.Runner(model, None, plan, loss=loss, notices=notices, **settings)
    for _ in range(windows):
        runner.step(batch)
    return [text for text in notices.texts if "not a mean or a sum over the samples" in text]


@pytest.mark.parametrize("coefficient", [0.01, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_load_balancing_loss_is_named_once_with_the_error_of_the_router(coefficient, dtype):
    model = Experts(coefficient).to(dtype)
    found, _ = cut_gradient(model, None, BATCH, (4, 4))
    whole = copy.deepcopy(model)
    whole(**BATCH)["loss"].backward()
    expected = joined(whole)
    router = slice(V * 8, V * 8 + 32)
    error = float((found[router] - expected[router]).norm() / expected[router].norm())
    assert error > 1e-3

    (text,) = told(model, windows=3)

    assert "its term 'balance' is" in text
    measured = re.search(r"the gradient of 'router.weight' is ([\d.]+) % off", text)
    assert 0.2 < float(measured[1]) / 100 / error < 5.0  # of fewer samples
    assert "loss_scope='window' cannot mend it, since the model computes this loss itself" in text


def test_term_that_is_not_reported_is_told_by_its_gradient():
    (text,) = told(Experts(0.002, reports=False))

    assert "it has a term that is not a mean" in text
    assert "the gradient of 'router.weight'" in text


def test_term_that_hides_in_bfloat16_parameters_is_found_if_it_is_large():
    (text,) = told(Experts(0.3).bfloat16())

    assert "router.weight" in text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [Tagger, lambda: Experts(0.0)], ids=["tagger", "experts"])
def test_nothing_is_said_of_a_model_that_is_linear_in_its_samples(make, dtype):
    assert told(make().to(dtype)) == []


@pytest.mark.parametrize("padded", [False, True])
def test_term_that_shows_leaves_the_rest_weighted_by_its_targets(padded):
    """It is far beyond rounding, so no weighting fits the loss with it."""
    labels = TOKENS.clone()
    if padded:
        for row, length in enumerate([12, 3, 5, 12, 1, 7, 2, 9]):
            labels[row, length:] = -100
    model, batch = Experts(2.0).double(), {"tokens": TOKENS, "labels": labels}
    notices = Notices(silent=True)

    cut_gradient(model, None, batch, (4, 4), notices=notices)

    assert sum("is a mean over the targets that count, but for a term" in text for text in notices.texts) == 1
    assert sum("its term 'balance' is" in text for text in notices.texts) == 1


def test_measuring_leaves_no_trace():
    model = Experts(0.1)
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    state = torch.get_rng_state()
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in model.parameters()]))
    plan = autoaccum.plan(N, 4)
    runner = autoaccum.Runner(model, optimizer, plan, device=CPU, precision="fp32", notices=Notices(silent=True))

    runner.step(BATCH)
    runner.step(BATCH)

    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, seen[0], seen[1]))  # nothing of the first window's measurement is in its gradient


def test_loss_of_outputs_is_compared_in_float64_by_its_value_and_once_by_its_gradient():
    passes = []
    model = nn.Linear(4, 3)
    model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    batch = torch.randn(N, 4), torch.arange(N) % 3

    assert told(model, batch, loss=functional.cross_entropy, windows=3) == []

    # A few samples and their two parts, in evaluation and in training mode, and each window's two micro-batches.
    assert sum(passes) == 2 * 3 + 3 * 2


def test_hidden_term_of_a_loss_of_outputs_shows_in_float64_and_its_gradient_is_measured():
    def bent(outputs, targets):
        return functional.cross_entropy(outputs, targets) + 1e-7 * (1e5 * outputs.mean(0)).cos().sum()

    batch = torch.randn(N, 4), torch.arange(N) % 3

    (text,) = told(nn.Linear(4, 3), batch, loss=bent)

    assert "Pass loss_scope='window', which is exact" in text


def test_router_logits_that_do_not_run_along_the_samples_cannot_be_mended_by_the_window():
    class Logits(Experts):
        def forward(self, tokens):
            inside = self.embed(tokens)
            return {"logits": self.head(inside), "router_logits": self.router(inside.flatten(0, 1))}

    def loss(outputs, batch):
        shares = outputs["router_logits"].softmax(-1)
        chosen = functional.one_hot(shares.argmax(-1), 4).to(shares.dtype)
        balance = 4 * (chosen.mean(0) * shares.mean(0)).sum()
        return functional.cross_entropy(outputs["logits"].transpose(1, 2), batch["labels"]) + 0.002 * balance

    (text,) = told(Logits(0.0), loss=loss)

    assert "the outputs that loss= takes do not have one row for each sample" in text


def test_noise_is_not_taken_for_a_term():
    def noisy(model, batch):
        return functional.cross_entropy(model(batch[0]) + torch.randn(()), batch[1]) * (1 + 1e-2 * torch.rand(()))

    batch = torch.randn(N, 4), torch.arange(N) % 3

    assert told(nn.Linear(4, 3), batch, loss=[noisy], loss_reduction="mean") == []


def test_memory_that_is_lacking_for_it_costs_nothing_but_the_measurement():
    class Lacking(Experts):
        def forward(self, tokens, labels):
            if torch.is_grad_enabled() and not self.training:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(tokens, labels)

    model, notices = Lacking(0.1), Notices(silent=True)
    plan = autoaccum.plan(N, 4)
    runner = autoaccum.Runner(model, None, plan, device=CPU, precision="fp32", notices=notices)

    first = runner.step(BATCH)

    assert first.oom_events == 0
    assert first.micro_batches == (4,) * (N // 4)
    assert not any("not a mean or a sum" in text for text in notices.texts)


@pytest.mark.parametrize("coefficient", [0.001, 0.02, 0.5])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_router_of_transformers_is_named(kind, coefficient):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=4,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)

    (text,) = told(model, {"input_ids": TOKENS, "labels": TOKENS})

    assert "its term 'aux_loss' is" in text


# --- what has the value of a mean, and another gradient ---------------------------------------------------------------

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
PAIR = X, torch.arange(16) % 3


def balanced(outputs, targets):
    """A term that is scaled to the size of another, as losses are often balanced."""
    own, other = functional.cross_entropy(outputs, targets), outputs.square().mean()
    return own + other * (own / other).detach()


def divided(outputs, targets):
    value = functional.cross_entropy(outputs, targets)
    return value / value.detach()


class UnitGradient(torch.autograd.Function):
    """Divides the gradient by its norm."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


class BetweenSamples(nn.Sequential):
    """Attends between the samples of a micro-batch."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs):
        inside = self[1](self[0](inputs))
        return self[2](inside + (inside @ inside.T).softmax(-1) @ inside)


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def said_of(model, loss, batch=PAIR, micro_batch=8, **options):
    notices = Notices(silent=True)
    runner = autoaccum.Runner(
        model,
        None,
        autoaccum.plan(16, micro_batch),
        loss=loss,
        notices=notices,
        device=CPU,
        precision="fp32",
        **options,
    )
    runner.step(batch)
    return [text for text in notices.texts if text.startswith("loss ")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "loss",
    [
        balanced,
        divided,
        lambda outputs, targets: functional.cross_entropy(UnitGradient.apply(outputs), targets),
    ],
    ids=["balanced", "divided by itself", "unit gradient"],
)
def test_gradient_that_is_not_that_of_the_value_is_told_of(loss, dtype):
    (text,) = said_of(linear().to(dtype), loss, (X.to(dtype), PAIR[1]))

    assert "not a mean or a sum over the samples" in text
    assert "loss_scope='window'" in text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), functional.cross_entropy, None], ids=["module", "function", "default"]
)
def test_model_that_mixes_samples_is_told_of_whatever_the_loss(loss, dtype):
    said = said_of(BetweenSamples().to(dtype), loss, (X.to(dtype), PAIR[1]))

    assert sum("the model's outputs for a sample depend on the other samples" in text for text in said) == 1


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), functional.cross_entropy, None], ids=["module", "function", "default"]
)
@pytest.mark.parametrize("micro_batch", [8, 2])
def test_nothing_is_said_of_an_ordinary_classifier(loss, micro_batch):
    model = linear()
    model.insert(1, nn.BatchNorm1d(8))

    assert [text for text in said_of(model, loss, micro_batch=micro_batch) if "off" in text] == []


def test_memory_that_is_short_for_a_reduction_known_beforehand_is_no_event():
    class Tight(nn.Linear):
        def forward(self, inputs):
            if inputs.dtype is torch.float64:
                raise torch.OutOfMemoryError("told to")
            return super().forward(inputs)

    notices, plan = Notices(silent=True), autoaccum.plan(16, 8)
    runner = autoaccum.Runner(
        Tight(6, 3), None, plan, loss=nn.CrossEntropyLoss(), notices=notices, device=CPU, precision="fp32"
    )

    assert [runner.step(PAIR).oom_events for _ in range(4)] == [0, 0, 0, 0]


def test_comparison_leaves_no_gradient_on_other_modules_that_a_loss_uses():
    head = nn.Linear(3, 3)

    said_of(
        linear(), lambda outputs, targets: functional.cross_entropy(head(outputs), targets).detach() + outputs.mean()
    )

    assert [parameter.grad for parameter in head.parameters()] == [None, None]
    runner = autoaccum.Runner(linear(), None, autoaccum.plan(16, 8), loss=nn.CrossEntropyLoss(), device=CPU)
    other = torch.nn.Parameter(torch.ones(3))
    runner = autoaccum.Runner(
        linear(),
        None,
        autoaccum.plan(16, 8),
        loss=lambda outputs, targets: functional.cross_entropy(outputs * other, targets),
    )
    seen = []
    runner.optimizer.register_step_pre_hook(lambda *_: seen.append(other.grad.clone()))
    runner.step(PAIR)
    outputs = linear()(X)
    functional.cross_entropy(outputs * other, PAIR[1]).backward()

    torch.testing.assert_close(other.grad - seen[0], seen[0])
