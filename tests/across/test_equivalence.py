"""The gradient is that of the whole window, however it is cut."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import autoaccum
from support.losses.gradients import (
    assert_as_exact_as_full_batch,
    assert_full_batch_gradient,
    cut_gradient,
    cuts,
    distance,
    full_batch_gradient,
)
from support.models.small import fit_quietly

WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 5.0, 0.5], dtype=torch.float64)


def classifier(classes=4):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, classes)).double()


class Tagger(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, classes)

    def forward(self, tokens):
        return self.head(self.embed(tokens)).transpose(1, 2)


def tagger():
    return Tagger().double()


CUT = (7, 2, 1)


@pytest.fixture
def images():
    return torch.randn(10, 6, dtype=torch.float64), torch.randint(0, 4, (10,))


@pytest.fixture
def tokens():
    """Ten sentences of seven tokens, padded from lengths 1 to 7, so that every cut counts differently."""
    lengths = torch.tensor([1, 7, 2, 6, 3, 5, 4, 1, 7, 2])[:, None]
    return torch.randint(0, 11, (10, 7)), torch.randint(0, 5, (10, 7)).masked_fill(torch.arange(7) >= lengths, -100)


def summed(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="sum")


def shifted(outputs, targets):
    return functional.cross_entropy(outputs[..., :-1], targets[:, 1:])


def pair(outputs, targets):
    counts = targets != -100
    return (functional.cross_entropy(outputs, targets, reduction="none") * counts).sum(), counts.sum()


def energy(outputs):
    return outputs.square().mean()


# --- windows ----------------------------------------------------------------------------------------------------------


def test_window_of_pieces_is_one_window(images):
    inputs, targets = images
    pieces = [(inputs[:3], targets[:3]), (inputs[3:4], targets[3:4]), (inputs[4:], targets[4:])]
    model = classifier()
    expected, _ = full_batch_gradient(model, nn.CrossEntropyLoss(), images)

    found, _ = cut_gradient(model, nn.CrossEntropyLoss(), pieces, (4, 3, 3))

    assert distance(found, expected) <= 1e-12


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), functional.cross_entropy], ids=["module", "function"])
def test_pieces_of_different_length_are_cut_between_and_weigh_by_their_tokens(loss):
    model = tagger()
    pieces = [(torch.randint(0, 11, (n, t)), torch.randint(0, 5, (n, t))) for n, t in [(3, 7), (4, 2), (3, 5)]]
    logits = [model(inputs).transpose(1, 2).flatten(0, 1) for inputs, _ in pieces]
    value = functional.cross_entropy(torch.cat(logits), torch.cat([targets.flatten() for _, targets in pieces]))
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])

    found, report = cut_gradient(model, loss, autoaccum.Window(pieces), (3, 2, 2, 3))

    assert distance(found, expected) <= 1e-12
    assert report.loss == pytest.approx(value.item(), rel=1e-12)


def test_last_window_of_fit_has_the_gradient_of_what_is_left(tokens):
    """Five windows of four sentences and a last one of two, with SGD: as torch does it with full batches."""
    inputs, targets = (torch.cat([half, half.flip(0), half[:2]]) for half in tokens)
    model = tagger()
    by_hand = copy.deepcopy(model)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    for x, y in zip(inputs.split(4), targets.split(4), strict=True):
        optimizer.zero_grad()
        functional.cross_entropy(by_hand(x), y).backward()
        optimizer.step()

    result = fit_quietly(
        model,
        list(zip(inputs.split(3), targets.split(3), strict=True)),
        4,
        loss=functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        micro_batch=3,
        precision="fp32",
    )

    assert [report.samples for report in result.history] == [4, 4, 4, 4, 4, 2]
    assert [report.micro_batches for report in result.history][-2:] == [(2, 2), (2,)]
    torch.testing.assert_close(model.state_dict(), by_hand.state_dict(), rtol=1e-12, atol=1e-14)


# --- a provisional weight ---------------------------------------------------------------------------------------------


def many_counted(outputs, targets):
    """A pair whose weight is far from the number of samples, against which gradients are first accumulated."""
    total, weight = pair(outputs, targets)
    return 1e3 * total, 1e3 * weight


@pytest.mark.parametrize("loss", [pair, many_counted])
def test_norm_to_clip_is_that_of_the_whole_window(loss, tokens):
    model = tagger()
    expected, _ = full_batch_gradient(model, loss, tokens)
    norm = float(expected.norm())

    clipped, report = cut_gradient(model, loss, tokens, CUT, clip_grad_norm=norm / 3)
    left, _ = cut_gradient(model, loss, tokens, CUT, clip_grad_norm=norm * 1.001)

    assert report.grad_norm == pytest.approx(norm, rel=1e-12)
    assert float(clipped.norm()) == pytest.approx(norm / 3, rel=1e-5)  # torch divides by norm + 1e-6
    assert distance(left, expected) <= 1e-12


@pytest.mark.parametrize("clip_grad_norm", [None, 1e-2])
def test_provisional_weight_is_set_right_before_the_scaler_unscales(clip_grad_norm, tokens):
    model = Tagger()
    expected, _ = full_batch_gradient(model, pair, tokens)
    seen = []

    class Keeps(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]]))

    runner = autoaccum.Runner(
        copy.deepcopy(model),
        lambda parameters: Keeps(parameters, lr=1.0),
        autoaccum.Plan(10, (4, 3, 3)),
        loss=pair,
        device="cpu",
        precision="fp16",
        clip_grad_norm=clip_grad_norm,
    )

    report = runner.step(tokens)

    assert not report.skipped
    wanted = expected if clip_grad_norm is None else expected * (clip_grad_norm / expected.norm())
    assert distance(seen[0], wanted.double()) <= 5e-3  # fp16 has eleven bits
    if clip_grad_norm is not None:
        assert report.grad_norm == pytest.approx(float(expected.norm()), rel=5e-3)


# --- anything at all --------------------------------------------------------------------------------------------------


def per_sample(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none").sum(1)


def together(outputs, targets):
    return {"tokens": functional.cross_entropy(outputs, targets), "pair": pair(outputs, targets), "e": energy(outputs)}


LOSSES = {
    "mean": lambda dtype: nn.CrossEntropyLoss(),
    "sum": lambda dtype: nn.CrossEntropyLoss(reduction="sum"),
    "ignore 3": lambda dtype: nn.CrossEntropyLoss(ignore_index=3),
    "function that ignores 0": lambda dtype: lambda x, y: functional.cross_entropy(x, y, ignore_index=0),
    "class weights": lambda dtype: nn.CrossEntropyLoss(weight=WEIGHTS.to(dtype)),
    "smoothing": lambda dtype: nn.CrossEntropyLoss(weight=WEIGHTS.to(dtype), label_smoothing=0.2),
    "vector": lambda dtype: per_sample,
    "pair": lambda dtype: pair,
    "function": lambda dtype: functional.cross_entropy,
    "function that sums": lambda dtype: summed,
    "function that shifts": lambda dtype: shifted,
    "mapping": lambda dtype: together,
    "list": lambda dtype: [
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        lambda model, batch: shifted(model(batch[0]), batch[1]),
        lambda model, batch: energy(model(batch[0])),
        lambda model, batch: 1e-3 * model(batch[0]).abs().sum(),
    ],
}


@st.composite
def cases(draw):
    """A kind of loss, tokens with targets of which some (not all) do not count, and a cut."""
    kind = draw(st.sampled_from(sorted(LOSSES)))
    samples, length = draw(st.integers(2, 9)), draw(st.integers(2, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    inputs = torch.randint(0, 11, (samples, length), generator=generator)
    targets = torch.randint(0, 5, (samples, length), generator=generator)
    mask = draw(st.lists(st.booleans(), min_size=samples * length, max_size=samples * length))
    targets[torch.tensor(mask).view(samples, length)] = {"ignore 3": 3, "function that ignores 0": 0}.get(kind, -100)
    targets[0, 1] = 1  # counts also where the first column does not
    return LOSSES[kind], (inputs, targets), draw(cuts(samples))


@pytest.mark.parametrize("examples", [20, pytest.param(300, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("is_single", [False, True])
def test_any_mask_any_cut_any_loss_gives_the_full_batch_gradient_and_in_float32_as_exactly(examples, is_single):
    @settings(max_examples=examples // (1 + is_single))
    @given(case=cases())
    def assert_of(case):
        loss, window, sizes = case
        torch.manual_seed(0)
        if is_single:
            assert_as_exact_as_full_batch(tagger(), (loss(torch.float64), loss(torch.float32)), window, sizes)
        else:
            assert_full_batch_gradient(tagger(), loss(torch.float64), window, sizes)

    assert_of()


def test_float32_cut_of_a_wider_network_is_as_exact_as_the_full_batch():
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)).double()
    window = torch.randn(100, 64, dtype=torch.float64), torch.randint(0, 10, (100,))

    assert_as_exact_as_full_batch(model, nn.CrossEntropyLoss(), window, (34, 33, 33))
