"""What losses weigh in micro-batches of unlike samples."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import autoaccum


def _tokens(samples):
    return sum(len(steps) for steps in samples)


def _padded(samples):
    lengths = torch.tensor([len(steps) for steps in samples])
    steps = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return steps, torch.arange(steps.shape[1]) < lengths[:, None]


def _per_sample(outputs, mask):
    return (outputs.squeeze(-1).square() * mask).sum(1) / mask.sum(1)


def _per_sample_and_by_weight(outputs, mask):
    each = outputs.squeeze(-1).square() * mask
    return {"samples": _per_sample(outputs, mask), "tokens": each.sum() / mask.sum()}


def _by_sample_and_its_mean(model, batch):
    each = _per_sample(model(batch[0]), batch[1])
    return {"loss": each, "mean": each.mean().detach()}


def _by_weight(model, batch):
    return (model(batch[0]).squeeze(-1).square() * batch[1]).sum() / batch[1].sum()


@pytest.mark.parametrize("loss", [_per_sample, _per_sample_and_by_weight, [_by_sample_and_its_mean, _by_weight]])
def test_a_loss_of_each_sample_counts_by_samples_whatever_the_split_weighs(loss):
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(length, 4, generator=generator, dtype=torch.float64) for length in (2, 3, 9, 4)]
    found = []
    for micro_batch in (4, 1):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1, dtype=torch.float64)
        runner = autoaccum.Runner(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            autoaccum.plan(4, micro_batch),
            loss=loss,
            forward=None if isinstance(loss, list) else lambda model, batch: model(batch[0]),
            split=autoaccum.ListOfSamples(_padded, weight=_tokens),
        )
        report, batches = runner.step(samples), [samples] if micro_batch > 1 else [samples[:2], samples[2:]]
        found.append([report.loss, *report.losses.values(), *model.weight[0].tolist(), runner.evaluate(batches)])
    assert found[1] == pytest.approx(found[0], rel=1e-12)


# --- divisors of 0, and clamped ones ----------------------------------------------------------------------------------


def _stepped(loss, last, cut, *, before=()):
    """Make a step of SGD from each batch; return how far the last is from that of the whole batch, and warnings."""
    torch.manual_seed(7)
    model = torch.nn.Linear(6, 4).double()
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        autoaccum.Plan(sum(cut), cut),
        loss=loss,
        device="cpu",
        precision="fp32",
    )
    warned = []
    for batch in (*before, last):
        weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
        expected = torch.nn.Linear(6, 4).double()
        expected.load_state_dict({"weight": weight, "bias": bias})
        raw = loss(expected(batch[0]), batch[1])
        (raw[0] / raw[1] if isinstance(raw, tuple) else raw).backward()
        warned += runner.step(batch).warnings
        difference = float((weight - expected.weight.grad - model.weight.detach()).abs().max())
    return difference, warned


CLASSES = torch.tensor([0, 0, 0, 2, 3, 1, 2, 3, 1, 2, 3, 1])
OF_CLASSES = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)


def _inputs():
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("is_torchs", [True, False])
def test_smoothing_of_classes_of_weight_0_is_refused_where_they_are_alone_and_exact_elsewhere(is_torchs):
    of_torch = torch.nn.CrossEntropyLoss(weight=OF_CLASSES, label_smoothing=0.1)

    def by_hand(outputs, targets):
        return of_torch(outputs, targets)

    loss = of_torch if is_torchs else by_hand
    difference, warned = _stepped(loss, (_inputs(), CLASSES), (4, 4, 4))
    with pytest.raises(autoaccum.InvalidInputError, match="divides by 0 in a micro-batch in which something counts"):
        _stepped(loss, (_inputs(), CLASSES), (3, 3, 3, 3))

    assert difference < 1e-12
    assert not warned


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_micro_batch_of_ignored_targets_or_of_weight_0_alone_adds_nothing(smoothing):
    ignored = torch.nn.CrossEntropyLoss(weight=OF_CLASSES + 1, label_smoothing=smoothing, ignore_index=0)
    lightless = torch.nn.CrossEntropyLoss(weight=OF_CLASSES)

    for loss in (ignored, lightless):
        difference, _ = _stepped(loss, (_inputs(), CLASSES), (3, 3, 3, 3))
        assert difference < 1e-12


SIGNED = torch.tensor([1.0, -1.0, 2.0] * 4, dtype=torch.float64)


def _signed(outputs, weights):
    return (outputs.square().mean(1) * weights).sum() / weights.sum()


@pytest.mark.parametrize("checked", [0, 1, 2])  # the third window is not
def test_weights_that_cancel_in_a_micro_batch_are_refused(checked):
    before = [(_inputs(), SIGNED.abs())] * checked
    with pytest.raises(autoaccum.InvalidInputError, match="divides by 0 in a micro-batch in which something counts"):
        _stepped(_signed, (_inputs(), SIGNED), (2,) * 6, before=before)


@pytest.mark.parametrize(("checked", "said"), [(0, "not finite from the start"), (2, "look for NaN among the weights")])
def test_nan_among_the_weights_is_refused(checked, said):
    before = [(_inputs(), SIGNED.abs())] * checked
    weights = SIGNED.abs().index_fill(0, torch.tensor(5), torch.nan)
    with pytest.raises(autoaccum.InvalidInputError, match=said):
        _stepped(_signed, (_inputs(), weights), (2,) * 6, before=before)


def test_weights_that_cancel_are_exact_as_a_pair():
    def pair(outputs, weights):
        return (outputs.square().mean(1) * weights).sum(), weights.sum()

    difference, _ = _stepped(pair, (_inputs(), SIGNED), (2,) * 6)

    assert difference < 1e-12


@pytest.mark.parametrize("seed", [0, 1, 2, 5, 7])  # in others a micro-batch has exactly one, which may be a clamp
@pytest.mark.parametrize("by_hand", [False, True])
def test_no_clamp_is_told_where_a_count_fits_by_accident(by_hand, seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(4, (12,), generator=generator)

    def loss(outputs, targets):
        if by_hand:
            kept = (targets != 1).double()
            each = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
            return (each * kept).sum() / kept.sum()
        return torch.nn.functional.cross_entropy(outputs, targets, label_smoothing=0.2, ignore_index=1)

    difference, warned = _stepped(loss, (_inputs(), targets), (3, 3, 3, 3), before=[(_inputs(), targets)] * 3)

    assert difference < 1e-12
    assert not warned


# --- compiled losses: checked as they are written, and not to be read when they train ---------------------------------


class OwnLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 20)

    def forward(self, inputs, labels):
        logits = self.layer(inputs).view(-1, 5, 4)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Logits(OwnLoss):
    def forward(self, inputs):
        return self.layer(inputs).view(-1, 5, 4)


def mean_of_tokens(logits, labels):
    return functional.cross_entropy(logits.transpose(1, 2), labels)


def beside_another(logits, labels):
    return mean_of_tokens(logits, labels) + 0.3 * logits.square().mean()


def compiled_in_place():
    loss = torch.nn.CrossEntropyLoss()
    loss.compile(backend="aot_eager")
    return lambda logits, labels: loss(logits.transpose(1, 2), labels)


def with_a_compiled_term():
    term = compiled(mean_of_tokens)
    return lambda logits, labels: term(logits, labels) + 0.3 * mean_of_tokens(logits, labels)


def compiled(what):
    return torch.compile(what, backend="aot_eager")


def trained(model, loss, size):
    torch.manual_seed(0)
    model = model()
    labels = torch.randint(4, (12, 5))
    labels[0], labels[1:3, 2:], labels[7, 1:] = -100, -100, -100
    inputs = torch.randn(12, 6)
    batch = {"inputs": inputs, "labels": labels} if loss is None else (inputs, labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"micro_batch": size, "optimizer": optimizer, "progress": False}
    result = autoaccum.fit(model, [batch] * 5, 12, loss=loss, val_loader=[batch], **options)  # some windows are steady
    return [*model.parameters(), *result.history[-1].losses.values()], result


OF_THE_COMPILER = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@OF_THE_COMPILER
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (lambda: compiled(OwnLoss()), lambda: None),
        (Logits, lambda: compiled(mean_of_tokens)),
        (Logits, compiled_in_place),
        (Logits, with_a_compiled_term),
    ],
    ids=["model with its own loss", "function", "in place", "a compiled term"],
)
def test_compiled_mean_trains_as_the_whole_batch(model, loss):
    (*parts, logged), _ = trained(model, loss(), 5)
    (*whole, expected), _ = trained(model, loss(), 12)

    torch.testing.assert_close(parts, whole)
    assert logged == pytest.approx(expected)


@OF_THE_COMPILER
def test_compiled_loss_of_two_means_is_refused_in_words():
    with pytest.raises(autoaccum.InvalidInputError, match="had 2 terms when it was checked, and now has a graph"):
        trained(Logits, compiled(beside_another), 3)
