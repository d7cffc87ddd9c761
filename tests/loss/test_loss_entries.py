"""A mapping of losses: which entries are trained on, which are reported, and what those weigh over a window."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._data.batches import as_window
from autoaccum._engine.evaluation import Evaluator
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError
from helpers import batches_of
from put_together import runner_of, training_step

SAMPLES = 12
CUTS = [(12,), (5, 4, 3)]


class Tagger(nn.Module):
    """Logits (N, C, T) for tokens (N, T)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)

    def forward(self, tokens):
        return self.embed(tokens).transpose(1, 2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tagger().double()


@pytest.fixture
def batch():
    tokens, targets = torch.randint(0, 11, (SAMPLES, 6)), torch.randint(0, 5, (SAMPLES, 6))
    for row in range(SAMPLES):
        targets[row, 1 + row % 6 :] = -100
    return tokens, targets


def tokens(outputs, targets):
    return functional.cross_entropy(outputs, targets)


def size(outputs):
    return outputs.square().mean()


def right(outputs, targets):
    return ((outputs.argmax(1) == targets) & (targets != -100)).double()


def accuracy(outputs, targets):
    return right(outputs, targets).sum() / (targets != -100).sum()


def total_and_parts(outputs, targets):
    total = tokens(outputs, targets)
    return {"ce": total, "loss": total, "again": 2 * total}


def total_and_metric(outputs, targets):
    return {"loss": tokens(outputs, targets), "accuracy": accuracy(outputs, targets)}


def detached_metric(outputs, targets):
    return {"ce": tokens(outputs, targets), "accuracy": accuracy(outputs, targets)}


def plain_numbers(outputs, targets):
    return {"loss": tokens(outputs, targets), "accuracy": accuracy(outputs, targets).item()}


def pair_and_metrics(outputs, targets):
    counts = (targets != -100).sum()
    return {
        "loss": (functional.cross_entropy(outputs, targets, reduction="sum"), counts),
        "accuracy": accuracy(outputs, targets),
        "as pair": (right(outputs, targets).sum(), counts),
    }


def detached_pair(outputs, targets):
    return {"ce": tokens(outputs, targets), "accuracy": (right(outputs, targets).sum(), (targets != -100).sum())}


def vector(outputs, targets):
    return {"loss": tokens(outputs, targets), "length": (targets != -100).sum(1)}


def summed(outputs, targets):
    return {
        "loss": functional.cross_entropy(outputs, targets, reduction="sum"),
        "right": right(outputs, targets).sum(),
    }


@torch.no_grad()
def exact(loss, model, batch):
    """What each entry is of the whole batch."""
    return {name: _value(value) for name, value in loss(model(batch[0]), batch[1]).items()}


@torch.no_grad()
def loss_of(model, batch):
    return float(tokens(model(batch[0]), batch[1]))


def _value(value):
    value = value[0] / value[1] if isinstance(value, tuple) else value
    return float(value.double().mean()) if isinstance(value, torch.Tensor) else value


def runner_with(model, sizes, loss, notices=None, **options):
    plan = autoaccum.Plan(sum(sizes), sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    notices = notices or Notices(silent=True)
    return autoaccum.Runner(model, optimizer, plan, loss=loss, device="cpu", notices=notices, **options)


def update(model, sizes, loss, batch, **options):
    """The report of one window, and by how much SGD with a rate of 1 has moved the model: the gradient."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    report = runner_with(model, sizes, loss, **options).step(batch)
    return report, [one - parameter.detach() for one, parameter in zip(before, model.parameters(), strict=True)]


def gradient(model, batch, loss):
    model.zero_grad()
    loss(model(batch[0]), batch[1]).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


REPORTED = [
    total_and_parts,
    total_and_metric,
    detached_metric,
    plain_numbers,
    pair_and_metrics,
    detached_pair,
    vector,
]


@pytest.mark.parametrize("scope", ["micro_batch", "window"])
@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("loss", REPORTED)
def test_what_is_no_part_of_the_total_is_reported_and_not_trained_on(loss, sizes, scope, model, batch):
    expected, wanted = exact(loss, model, batch), gradient(model, batch, tokens)

    report, moved = update(model, sizes, loss, batch, loss_scope=scope)

    torch.testing.assert_close(moved, wanted, rtol=1e-12, atol=1e-14)
    assert report.loss == pytest.approx(expected.get("loss", expected.get("ce")), rel=1e-12)
    assert dict(report.losses) == pytest.approx(expected, rel=1e-12)


class WithOwnLoss(nn.Module):
    """Returns its loss by itself, as Transformers' models do."""

    def __init__(self, inner, form):
        super().__init__()
        self.inner, self.form = inner, form

    def forward(self, tokens, labels):
        logits = self.inner(tokens)
        total = functional.cross_entropy(logits, labels)
        if self.form == "total":
            return {"loss": total, "logits": logits, "part": total * 0.5, "past": (logits, logits), "nothing": None}
        return {"class": total, "accuracy": accuracy(logits, labels)}


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize(("form", "losses"), [("total", {"loss", "part"}), ("parts", {"class", "accuracy"})])
def test_model_that_returns_a_mapping_is_held_to_the_same_rule(form, losses, sizes, model, batch):
    wanted = gradient(model, batch, tokens)
    expected = loss_of(model, batch)

    report, moved = update(WithOwnLoss(model, form), sizes, None, {"tokens": batch[0], "labels": batch[1]})

    torch.testing.assert_close(moved, wanted, rtol=1e-12, atol=1e-14)
    assert report.loss == pytest.approx(expected, rel=1e-12)
    assert report.losses.keys() == losses


@pytest.mark.parametrize("sizes", CUTS)
def test_each_of_several_losses_is_held_to_the_same_rule(sizes, model, batch):
    def classes(model, batch):
        return total_and_metric(model(batch[0]), batch[1])

    def small(model, batch):
        outputs = model(batch[0])
        return {"size": size(outputs), "largest": outputs.detach().amax((1, 2))}

    wanted = gradient(model, batch, lambda outputs, targets: tokens(outputs, targets) + size(outputs))
    outputs = model(batch[0]).detach()
    expected = {
        "classes/loss": float(tokens(outputs, batch[1])),
        "classes/accuracy": float(accuracy(outputs, batch[1])),
        "small/size": float(size(outputs)),
        "small/largest": float(outputs.amax((1, 2)).mean()),
    }

    report, moved = update(model, sizes, [classes, small], batch)

    torch.testing.assert_close(moved, wanted, rtol=1e-12, atol=1e-14)
    assert dict(report.losses) == pytest.approx(expected, rel=1e-12)
    assert report.loss == pytest.approx(expected["classes/loss"] + expected["small/size"], rel=1e-12)


def test_entry_without_a_graph_in_some_micro_batches_stays_a_loss(model, batch):
    def boxes(outputs, targets):
        found = size(outputs) if len(targets) > 3 else torch.zeros((), dtype=torch.float64)
        return {"ce": tokens(outputs, targets), "boxes": found}

    report, _ = update(model, (5, 4, 3), boxes, batch, loss_reduction="mean")

    assert report.loss == pytest.approx(sum(report.losses.values()), rel=1e-12)


# --- what is printed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (total_and_parts, "losses 'ce', 'again': reported, not trained on, since the entry 'loss'"),
        (detached_metric, "loss 'accuracy': reported, not trained on, since it has no gradient"),
    ],
)
def test_what_is_only_reported_is_told_once(loss, text, model, batch):
    notices = Notices(silent=True)
    runner = runner_with(model, (5, 4, 3), loss, notices)

    runner.step(batch)
    runner.step(batch)

    assert sum(text in said for said in notices.texts) == 1
    assert not any("could not be inferred" in said for said in notices.texts)


def test_entry_that_cannot_be_reported_is_left_out_and_told(model, batch):
    notices = Notices(silent=True)

    def loss(outputs, targets):
        return {"loss": tokens(outputs, targets), "logits": outputs}

    report = runner_with(model, (12,), loss, notices).step(batch)

    assert report.losses.keys() == {"loss"}
    told = [said for said in notices.texts if said.startswith("loss 'logits' is a tensor of shape")]
    assert len(told) == 1
    assert "so it is not reported" in told[0]


def test_mapping_without_a_graph_is_refused(model, batch):
    def loss(outputs, targets):
        return {"ce": tokens(outputs, targets).detach(), "accuracy": accuracy(outputs, targets)}

    with pytest.raises(InvalidInputError, match=r"loss 'ce\+accuracy' has no gradient"):
        update(model, (12,), loss, batch)


@pytest.mark.parametrize("wrap", [lambda value: {"aux": value}, lambda value: [value, value], lambda value: (value,)])
def test_losses_in_a_container_are_refused_and_never_left_out(wrap, model, batch):
    def loss(outputs, targets):
        return {"ce": tokens(outputs, targets), "size": wrap(size(outputs))}

    with pytest.raises(InvalidInputError, match="loss 'size' is a "):
        update(model, (12,), loss, batch)


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("loss", REPORTED)
def test_evaluation_adds_what_training_adds(loss, trained, model, batch):
    step = training_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.0))
    if trained:
        runner_of(step, autoaccum.plan(12, 5)).step(as_window(batch))
    expected = exact(loss, model, batch)

    found = Evaluator(step).run(batches_of(batch, 5, 4, 3))

    assert found.loss == pytest.approx(loss_of(model, batch), rel=1e-12)
    assert dict(found.losses) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("form", ["total", "parts"])
def test_evaluation_before_any_training_asks_the_model(form, model, batch):
    wrapped = WithOwnLoss(model, form)

    found = Evaluator(training_step(wrapped)).run([{"tokens": batch[0], "labels": batch[1]}])

    assert found.loss == pytest.approx(loss_of(model, batch), rel=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_empty_mapping_is_refused_as_that():
    with pytest.raises(autoaccum.InvalidInputError, match="an empty mapping"):
        autoaccum.fit(
            torch.nn.Linear(2, 1), [(torch.ones(4, 2), torch.ones(4, 1))], 4, loss=lambda *_: {}, device="cpu",
            progress=False,
        )  # fmt: skip
