"""The gradient is that of the whole window, however it is cut."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum.notices import Notices


def gradient_of(model, loss, window, sizes, **options):
    """The gradient that one step in this cut applies: SGD with learning rate 1 moves by it."""
    model = copy.deepcopy(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        autoaccum.Plan(sum(sizes), sizes),
        loss=loss,
        device="cpu",
        notices=Notices(silent=True),
        **options,
    )
    report = runner.step(window)
    assert report.micro_batches == tuple(sizes)
    return [start - now.detach() for start, now in zip(before, model.parameters(), strict=True)], report.loss


def assert_same(model, loss, window, sizes, *, tolerance=1e-12, **options):
    whole, whole_loss = gradient_of(model, loss, window, (sum(sizes),), **options)
    cut, cut_loss = gradient_of(model, loss, window, sizes, **options)
    scale = max(float(gradient.abs().max()) for gradient in whole)
    for one, other in zip(whole, cut, strict=True):
        assert float((one - other).abs().max()) <= tolerance * scale
    assert cut_loss == pytest.approx(whole_loss, rel=1e-10)


def classifier(classes=4):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, classes)).double()


class Tagger(nn.Module):
    """Logits (N, C, T) for tokens (N, T)."""

    def __init__(self, classes=5):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, classes)

    def forward(self, tokens):
        return self.head(self.embed(tokens)).transpose(1, 2)


CUTS = [(10,), (5, 5), (4, 3, 3), (7, 2, 1), (1,) * 10]


@pytest.fixture
def images():
    torch.manual_seed(0)
    return torch.randn(10, 6, dtype=torch.float64), torch.randint(0, 4, (10,))


@pytest.fixture
def tokens():
    """Ten sentences of seven tokens, padded from lengths 1 to 7, so that every cut counts differently."""
    torch.manual_seed(0)
    inputs = torch.randint(0, 11, (10, 7))
    targets = torch.randint(0, 5, (10, 7))
    for row, length in enumerate([1, 7, 2, 6, 3, 5, 4, 1, 7, 2]):
        targets[row, length:] = -100
    return inputs, targets


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 2.0, 5.0], dtype=torch.float64)),
        nn.CrossEntropyLoss(ignore_index=2),
        nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([0.1, 1.0, 2.0, 5.0], dtype=torch.float64)),
        None,
    ],
    ids=["mean", "sum", "vector", "class weights", "ignore_index", "smoothing", "chosen"],
)
def test_classification_loss_gives_the_full_batch_gradient(loss, sizes, images):
    assert_same(classifier(), loss, images, sizes)


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.L1Loss(reduction="sum"), nn.HuberLoss(), None])
def test_regression_loss_gives_the_full_batch_gradient(loss, sizes):
    window = torch.randn(10, 6, dtype=torch.float64), torch.randn(10, 3, dtype=torch.float64)

    assert_same(classifier(3), loss, window, sizes)


@pytest.mark.parametrize("sizes", CUTS)
def test_token_mean_counts_tokens_and_not_samples(sizes, tokens):
    assert_same(Tagger().double(), nn.CrossEntropyLoss(), tokens, sizes)


@pytest.mark.parametrize("sizes", CUTS)
def test_plain_function_with_a_token_mean_is_found_out(sizes, tokens):
    assert_same(Tagger().double(), functional.cross_entropy, tokens, sizes)


@pytest.mark.parametrize("sizes", CUTS)
def test_plain_function_that_sums_is_found_out(sizes, tokens):
    def summed(outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="sum")

    assert_same(Tagger().double(), summed, tokens, sizes)


@pytest.mark.parametrize("sizes", CUTS)
def test_plain_function_with_a_sample_mean_over_padded_tokens_is_found_out(sizes, tokens):
    def mean_of_means(outputs, targets):
        per_token = functional.cross_entropy(outputs, targets, reduction="none")
        counts = targets != -100
        return (per_token.sum(1) / counts.sum(1)).mean()

    assert_same(Tagger().double(), mean_of_means, tokens, sizes)


@pytest.mark.parametrize("sizes", CUTS)
def test_sum_and_weight_pair_is_divided_by_the_weight_of_the_window(sizes, tokens):
    def pair(outputs, targets):
        counts = targets != -100
        return (functional.cross_entropy(outputs, targets, reduction="none") * counts).sum(), counts.sum()

    assert_same(Tagger().double(), pair, tokens, sizes)


@pytest.mark.parametrize("sizes", CUTS)
def test_pair_beside_other_losses_is_divided_by_its_own_weight(sizes, tokens):
    def several(outputs, targets):
        counts = targets != -100
        return {
            "tokens": ((functional.cross_entropy(outputs, targets, reduction="none") * counts).sum(), counts.sum()),
            "size": outputs.square().mean(dim=(1, 2)),
            "peak": ((outputs.amax(1) * counts).sum(), 2.0 * len(outputs)),
        }

    assert_same(Tagger().double(), several, tokens, sizes)


@pytest.mark.parametrize("sizes", CUTS)
def test_losses_of_different_weight_in_one_mapping_keep_their_own(sizes, tokens):
    def several(outputs, targets):
        return {
            "tokens": functional.cross_entropy(outputs, targets),
            "energy": outputs.square().mean(),
            "total": 1e-3 * outputs.abs().sum(),
        }

    assert_same(Tagger().double(), several, tokens, sizes)


@pytest.mark.parametrize("sizes", CUTS)
def test_list_of_losses_is_the_sum_of_them(sizes, tokens):
    def tagging(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    def energy(model, batch):
        return model(batch[0]).square().mean()

    model = Tagger().double()

    assert_same(model, [tagging, energy], tokens, sizes)
    together, loss = gradient_of(model, [tagging, energy], tokens, sizes)
    expected = tagging(model, tokens) + energy(model, tokens)
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for got, want in zip(together, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-15)


def test_micro_batch_in_which_nothing_counts_adds_nothing(tokens):
    inputs, targets = tokens
    targets[4:6] = -100

    assert_same(Tagger().double(), nn.CrossEntropyLoss(), (inputs, targets), (4, 2, 4))


def test_window_in_which_nothing_counts_is_an_error_that_leaves_everything(tokens):
    inputs, targets = tokens
    model = Tagger()
    before = copy.deepcopy(model.state_dict())
    runner = autoaccum.Runner(model, None, autoaccum.plan(10, 4), loss=nn.CrossEntropyLoss(), device="cpu")

    with pytest.raises(autoaccum.InvalidInputError, match="no target of this window"):
        runner.step((inputs, torch.full_like(targets, -100)))

    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_window_of_pieces_is_one_window(images):
    inputs, targets = images
    pieces = [(inputs[:3], targets[:3]), (inputs[3:4], targets[3:4]), (inputs[4:], targets[4:])]
    model = classifier()
    whole, whole_loss = gradient_of(model, None, images, (10,))

    cut, cut_loss = gradient_of(model, None, pieces, (4, 3, 3))

    assert cut_loss == pytest.approx(whole_loss, rel=1e-12)
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_pieces_of_different_length_are_cut_between_and_weigh_by_their_tokens():
    torch.manual_seed(0)
    model = Tagger().double()
    pieces = [(torch.randint(0, 11, (n, t)), torch.randint(0, 5, (n, t))) for n, t in [(3, 7), (4, 2), (3, 5)]]
    logits = [model(inputs).transpose(1, 2).flatten(0, 1) for inputs, _ in pieces]
    expected = functional.cross_entropy(torch.cat(logits), torch.cat([targets.flatten() for _, targets in pieces]))
    runner = autoaccum.Runner(
        model, torch.optim.SGD(model.parameters(), lr=1.0), autoaccum.plan(10, 3), loss=nn.CrossEntropyLoss()
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = torch.autograd.grad(expected, list(model.parameters()))

    report = runner.step(autoaccum.Window(pieces))

    assert report.micro_batches == (3, 2, 2, 3)
    assert report.loss == pytest.approx(expected.item(), rel=1e-12)
    for start, now, gradient in zip(before, model.parameters(), gradients, strict=True):
        torch.testing.assert_close(start - now.detach(), gradient, rtol=1e-11, atol=1e-15)


def test_question_what_a_loss_runs_over_stays_open_until_padding_comes(tokens):
    inputs, targets = tokens
    full = torch.randint(0, 5, targets.shape)
    model = Tagger().double()
    runner = autoaccum.Runner(
        model, torch.optim.SGD(model.parameters(), lr=0.0), autoaccum.plan(10, 4), loss=functional.cross_entropy
    )
    runner.step((inputs, full))

    report = runner.step((inputs, targets))

    assert report.loss == pytest.approx(functional.cross_entropy(model(inputs), targets).item(), rel=1e-12)


def test_loss_that_couples_the_batch_weighs_by_samples_and_says_so(images, capsys):
    def contrastive(outputs, targets):
        return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    runner = autoaccum.Runner(classifier(), None, autoaccum.plan(10, 4), loss=contrastive, device="cpu")

    for _ in range(2):
        runner.step(images)

    assert capsys.readouterr().err.count("could not be found out") == 1


def test_loss_reduction_says_what_would_else_be_found_out(images):
    def odd(outputs, targets):
        return outputs.square().sum() + outputs.mean() ** 2

    model = classifier()
    summed, loss = gradient_of(model, odd, images, (5, 5), loss_reduction="sum")
    parts = sum(odd(model(images[0][half]), None) for half in (slice(0, 5), slice(5, 10)))

    assert loss == pytest.approx(parts.item(), rel=1e-12)
    for got, want in zip(summed, torch.autograd.grad(parts, list(model.parameters())), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-15)


def test_clipping_sees_the_gradient_of_the_whole_window(images):
    options = {"clip_grad_norm": 1e-3}
    model = classifier()

    assert_same(model, nn.CrossEntropyLoss(reduction="sum"), images, (4, 3, 3), **options)
    clipped, _ = gradient_of(model, nn.CrossEntropyLoss(reduction="sum"), images, (4, 3, 3), **options)
    assert float(torch.stack([part.norm() for part in clipped]).norm()) == pytest.approx(1e-3, rel=1e-2)


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from(["mean", "sum", "vector", "pair", "weights", "smoothing", "function"]),
    samples=st.integers(2, 9),
    length=st.integers(1, 6),
)
def test_any_mask_any_cut_any_loss_gives_the_full_batch_gradient(data, kind, samples, length):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    inputs, targets = torch.randint(0, 11, (samples, length)), torch.randint(0, 5, (samples, length))
    mask = data.draw(st.lists(st.booleans(), min_size=samples * length, max_size=samples * length))
    targets[torch.tensor(mask).view(samples, length)] = -100
    targets[0, 0] = 1  # something has to count
    cut_at = sorted(data.draw(st.sets(st.integers(1, samples - 1), max_size=samples - 1)))
    sizes = tuple(stop - start for start, stop in zip([0, *cut_at], [*cut_at, samples], strict=True))
    weight = torch.rand(5, dtype=torch.float64) + 0.1

    def per_sample(outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none").sum(1)

    def pair(outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none"), (targets != -100).sum()

    loss = {
        "mean": nn.CrossEntropyLoss(),
        "sum": nn.CrossEntropyLoss(reduction="sum"),
        "vector": per_sample,
        "pair": pair,
        "weights": nn.CrossEntropyLoss(weight=weight),
        "smoothing": nn.CrossEntropyLoss(weight=weight, label_smoothing=0.2),
        "function": functional.cross_entropy,
    }[kind]

    assert_same(Tagger().double(), loss, (inputs, targets), sizes)


def test_float32_cut_is_no_further_from_float64_than_the_full_batch(images):
    torch.manual_seed(0)
    exact_model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)).double()
    inputs, targets = torch.randn(100, 64, dtype=torch.float64), torch.randint(0, 10, (100,))
    exact, _ = gradient_of(exact_model, nn.CrossEntropyLoss(), (inputs, targets), (100,))
    model = copy.deepcopy(exact_model).float()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def distance(sizes):
        trained = copy.deepcopy(model)
        gradients = []
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: gradients.extend(p.grad.clone() for p in trained.parameters()))
        runner = autoaccum.Runner(trained, optimizer, autoaccum.Plan(100, sizes), loss=nn.CrossEntropyLoss())
        runner.step((inputs.float(), targets))
        return max(float((g - e).norm() / e.norm()) for g, e in zip(gradients, exact, strict=True))

    assert len(before) == len(exact)
    assert distance((34, 33, 33)) <= max(2 * distance((100,)), 1e-6)
