"""The gradient is that of the whole window, however it is cut."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import autoaccum
from support.losses.forms import FORMS, WINDOWS, C, D, Tagger, window
from support.losses.gradients import (
    assert_as_exact_as_full_batch,
    cut_gradient,
    cuts,
    distance,
    full_batch_gradient,
)
from support.losses.outcomes import by_runner, outcome
from support.models.small import fit_quietly

CUT = (7, 2, 1)
TOKENS = WINDOWS[0]["x"], WINDOWS[0]["labels"]


@pytest.fixture
def model():
    return Tagger().double()


# --- windows ----------------------------------------------------------------------------------------------------------


def test_window_of_pieces_is_one_window(model):
    pieces = [*zip(*(half.split((3, 1, 6)) for half in TOKENS), strict=True)]
    expected, _ = full_batch_gradient(model, nn.CrossEntropyLoss(), TOKENS)

    found, _ = cut_gradient(model, nn.CrossEntropyLoss(), pieces, (4, 3, 3))

    assert distance(found, expected) <= 1e-12


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), functional.cross_entropy], ids=["module", "function"])
def test_pieces_of_different_length_are_cut_between_and_weigh_by_their_tokens(loss, model):
    shapes = (3, 7), (4, 2), (3, 5)
    pieces = [(torch.randn(*shape, D).double(), torch.randint(0, C, shape)) for shape in shapes]
    logits = [model(inputs).transpose(1, 2).flatten(0, 1) for inputs, _ in pieces]
    value = functional.cross_entropy(torch.cat(logits), torch.cat([targets.flatten() for _, targets in pieces]))
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])

    found, report = cut_gradient(model, loss, autoaccum.Window(pieces), (3, 2, 2, 3))

    assert distance(found, expected) <= 1e-12
    assert report.loss == pytest.approx(value.item(), rel=1e-12)


def test_last_window_of_fit_has_the_gradient_of_what_is_left(model):
    """Five windows of four sentences and a last one of two, with SGD: as torch does it with full batches."""
    inputs, targets = (torch.cat([half, half.flip(0), half[:2]]) for half in TOKENS)
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


def pair(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="sum"), (targets != -100).sum()


def many_counted(outputs, targets):
    """A pair whose weight is far from the number of samples, against which gradients are first accumulated."""
    total, weight = pair(outputs, targets)
    return 1e3 * total, 1e3 * weight


@pytest.mark.parametrize("loss", [pair, many_counted])
def test_norm_to_clip_is_that_of_the_whole_window(loss, model):
    expected, _ = full_batch_gradient(model, loss, TOKENS)
    norm = float(expected.norm())

    clipped, report = cut_gradient(model, loss, TOKENS, CUT, clip_grad_norm=norm / 3)
    left, _ = cut_gradient(model, loss, TOKENS, CUT, clip_grad_norm=norm * 1.001)

    assert report.grad_norm == pytest.approx(norm, rel=1e-12)
    assert float(clipped.norm()) == pytest.approx(norm / 3, rel=1e-5)  # torch divides by norm + 1e-6
    assert distance(left, expected) <= 1e-12


@pytest.mark.parametrize("clip_grad_norm", [None, 1e-2])
def test_provisional_weight_is_set_right_before_the_scaler_unscales(clip_grad_norm):
    model, tokens = Tagger(), (TOKENS[0].float(), TOKENS[1])
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

OF_TORCH = (
    "of tokens",
    "of tokens, sum",
    "ignore_index=0",
    "ignore_index=255, smoothing",
    "weight",
    "weight, smoothing",
)
NAMES = [
    *(f"nn.CrossEntropyLoss {name}" for name in OF_TORCH),
    *("ce ignore", "ce smoothing, weights", "0.3 * ce", "sum", "pair", "dict of three", "a list of losses"),
    *("nn.CrossEntropyLoss none", "nn.MSELoss mean", "ce + L2 of weights"),
]


@st.composite
def cases(draw):
    """A form, the lengths of samples of which some (not all) have no label that counts, a seed, and a cut."""
    lengths = draw(st.text("0123456", min_size=2, max_size=9).filter(lambda digits: set(digits) != {"0"}))
    return draw(st.sampled_from(NAMES)), lengths, draw(st.integers(0, 99)), draw(cuts(len(lengths)))


@pytest.mark.parametrize("examples", [20, pytest.param(300, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("is_single", [False, True])
def test_any_labels_any_cut_any_loss_gives_the_full_batch_gradient_and_in_float32_as_exactly(examples, is_single):
    @settings(max_examples=examples // (1 + is_single))
    @given(case=cases())
    def assert_of(case):
        name, lengths, seed, sizes = case
        form, one = FORMS[name], window(0, [*map(int, lengths)], [1] * len(lengths), seed)
        if is_single:
            model, options = form.model().double(), {"forward": form.forward}
            assert_as_exact_as_full_batch(model, form.loss, form.batch(one), sizes, **options)
        else:
            assert outcome(replace(form, windows=[one], cut=sizes), by_runner) == "exact"

    assert_of()


def test_float32_cut_of_a_wider_network_is_as_exact_as_the_full_batch():
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)).double()
    window = torch.randn(100, 64, dtype=torch.float64), torch.randint(0, 10, (100,))

    assert_as_exact_as_full_batch(model, nn.CrossEntropyLoss(), window, (34, 33, 33))
