"""Evaluation counts every sample once, in micro-batches of its own size, and leaves training as it is."""

import contextlib
import gc
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import autoaccum
from autoaccum.errors import DoesNotFitError, InvalidInputError
from support.models.small import CountingLoader, assert_bitwise, batches_of, classifier, labelled, state_of

SIZES = (4, 1, 7, 3)
SAMPLES = sum(SIZES)
WIDTH = 1000
MIB = 2**20


@pytest.fixture
def model():
    return nn.Linear(4, 3).double()


@pytest.fixture
def data():
    return labelled(SAMPLES)


def exact(model, data, loss=functional.cross_entropy):
    model.eval()
    with torch.no_grad():
        value = loss(model(data[0]), data[1])
    model.train()
    return float(value)


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def micro_accuracy():
    return MulticlassAccuracy(3, average="micro")


def runner_of(model, samples=4, micro_batch=2, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"device": "cpu"} | options
    return autoaccum.Runner(model, optimizer, autoaccum.plan(samples, micro_batch), **settings)


def evaluations_of(model, batches, metrics=None, *, epochs=1, **options):
    """Evaluations of a training that changes no parameter; on a simulated device they begin with whole batches."""
    settings = {"device": autoaccum.Simulated(MIB), "loss": functional.cross_entropy, "progress": False} | options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    fitted = autoaccum.fit(
        model, [labelled(4)], 4, epochs=epochs, micro_batch=2, optimizer=optimizer, val_loader=batches, metrics=metrics,
        **settings,
    )  # fmt: skip
    return fitted.evaluations


def evaluated(model, batches, metrics=None, **options):
    return evaluations_of(model, batches, metrics, **options)[-1]


# --- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss", [functional.cross_entropy, nn.CrossEntropyLoss(reduction="sum")], ids=["mean", "sum, a sample"]
)
def test_mean_loss_is_that_of_all_samples_together_each_drawn_once(loss, data):
    model, loader = classifier(), CountingLoader(batches_of(data, *SIZES))

    found = runner_of(model, loss=loss).evaluate(loader)

    assert found == pytest.approx(exact(model, data), rel=1e-12)
    assert loader.drawn == len(SIZES)


class WithLoss(nn.Linear):
    """Returns its own mean over labelled tokens."""

    def __init__(self):
        super().__init__(4, 3, dtype=torch.float64)

    def forward(self, inputs, labels=None):
        outputs = super().forward(inputs)
        return outputs if labels is None else {"loss": over_tokens(outputs, labels)}


def over_tokens(outputs, targets):
    return functional.cross_entropy(outputs.transpose(1, 2), targets)


def with_penalty(outputs, targets):
    return {"tokens": over_tokens(outputs, targets), "penalty": outputs.square().mean()}


def sum_with_penalty(outputs, targets):
    return sum(with_penalty(outputs, targets).values())


def ragged_tokens():
    """Batches of (4, 5) tokens: all labelled, as a check finds them first; some; one per sample; none."""
    inputs, labels = torch.randn(16, 5, 4, dtype=torch.float64), torch.randint(3, (16, 5))
    labels[5:7, 1:] = labels[8:12, 1:] = labels[12:] = -100
    return list(zip(inputs.split(4), labels.split(4), strict=True))


def all_of(batches):
    return tuple(map(torch.cat, zip(*batches, strict=True)))


def clamped(outputs, targets):
    each = functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="sum")
    return each / (targets != -100).sum().clamp(min=1)


@pytest.mark.parametrize(
    "loss", [over_tokens, with_penalty, clamped], ids=["mean", "means of two counts", "at least 1"]
)
def test_mean_is_over_the_labelled_tokens_of_all_batches_whatever_the_first_shows(loss):
    model, batches = WithLoss(), ragged_tokens()
    outputs, targets = model(all_of(batches)[0]).detach(), all_of(batches)[1]

    found = runner_of(model, loss=loss).evaluate(batches)

    expected = loss(outputs, targets)
    assert found == pytest.approx(float(sum(expected.values()) if isinstance(expected, dict) else expected), rel=1e-12)


def test_mean_of_a_model_with_its_own_loss_is_over_the_labelled_tokens_of_all_batches():
    model, batches = WithLoss(), ragged_tokens()

    found = runner_of(model).evaluate([{"inputs": inputs, "labels": labels} for inputs, labels in batches])

    assert found == pytest.approx(exact(model, all_of(batches), over_tokens), rel=1e-12)


def test_terms_of_one_loss_with_divisors_of_their_own_are_weighed_by_samples_with_a_warning():
    model, batches = WithLoss(), ragged_tokens()

    with pytest.warns(autoaccum.errors.LossWarning, match="by their samples; return the terms by name"):
        found = runner_of(model, loss=sum_with_penalty).evaluate(batches)

    halves = [half for batch in batches[:3] for half in zip(*(entry.split(2) for entry in batch), strict=True)]
    losses = [exact(model, half, sum_with_penalty) for half in halves]
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-12)


@pytest.mark.filterwarnings("ignore:autoaccum. loss 'loss' has terms that are divided by numbers of their own")
def test_loss_of_several_terms_that_is_nan_though_something_counts_makes_an_evaluation_nan():
    model, batches = WithLoss(), ragged_tokens()[:3]
    runner = runner_of(model, loss=sum_with_penalty)
    assert math.isfinite(runner.evaluate(batches))

    batches[0][0][0] = torch.nan

    assert math.isnan(runner.evaluate(batches))


def test_several_terms_over_the_same_tokens_are_weighed_by_them_whatever_a_later_check_finds():
    def loss(outputs, targets):
        kept = targets != -100
        return over_tokens(outputs, targets) + (outputs.square().mean(2) * kept).sum() / kept.sum()

    model = WithLoss()
    for seed in range(4):
        chance = torch.Generator().manual_seed(seed)
        inputs = torch.randn(24, 5, 4, dtype=torch.float64, generator=chance)
        labels = torch.randint(3, (24, 5), generator=chance)
        labels[:, 1:][torch.rand(24, 4, generator=chance) < 0.5] = -100
        batches = list(zip(inputs.split(3), labels.split(3), strict=True))

        found = runner_of(model, loss=loss).evaluate(batches)

        assert found == pytest.approx(exact(model, all_of(batches), loss), rel=1e-9)


def test_guard_where_nothing_counts_adds_no_weight_to_an_evaluation():
    def loss(outputs, targets):
        kept = targets != -100
        each = (outputs.square().mean(2) * kept).sum()
        return each / kept.sum() if kept.any() else each * 0.0

    model, batches = WithLoss(), ragged_tokens()

    found = runner_of(model, loss=loss).evaluate(batches)

    assert found == pytest.approx(exact(model, all_of(batches), loss), rel=1e-9)


@pytest.mark.filterwarnings("ignore:autoaccum. loss 'loss' has terms that are divided by numbers of their own")
def test_penalty_on_parameters_that_the_model_returns_is_evaluated():
    class WithPenalty(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs), sum(p.square().sum() for p in self.parameters())

    def loss(outputs, targets):
        return functional.mse_loss(outputs[0], targets) + 0.1 * outputs[1]

    model, batch = WithPenalty(4, 3), (torch.randn(8, 4), torch.randn(8, 3))

    found = runner_of(model, loss=loss).evaluate([batch])

    assert found == pytest.approx(loss(model(batch[0]), batch[1]).item(), rel=1e-6)


@pytest.mark.parametrize("own", [True, False], ids=["of the model", "a function"])
def test_mean_over_at_least_k_that_an_evaluation_exceeds_before_any_training_is_exact(own):
    loss, model = over_kept(6), OfKept(6) if own else nn.Linear(4, 3).double()
    runner = runner_of(model, 16, 8, **({} if own else {"loss": loss, "forward": of_inputs}))
    whole = kept_of(16, kept=[*range(16)])

    found = runner.evaluate(parts_of(whole, 4))

    assert found == pytest.approx(over_kept(6)(nn.Linear.forward(model, whole["inputs"]), whole).item(), rel=1e-12)


def test_sum_over_k_of_at_least_k_that_an_evaluation_exceeds_before_any_training_is_warned_of():
    def loss(outputs, batch):
        return (outputs.square().mean(1) * batch["kept"]).sum() / max(6, int(batch["kept"].sum()))

    runner = runner_of(nn.Linear(4, 3).double(), 16, 8, loss=loss, forward=of_inputs)

    with pytest.warns(autoaccum.errors.LossWarning, match=r"is divided by 6 in all .* and is taken for a sum"):
        runner.evaluate(parts_of(kept_of(16, kept=[*range(16)]), 4))


@pytest.mark.filterwarnings("ignore:autoaccum. loss 'loss' has terms that are divided by numbers of their own")
def test_term_in_which_nothing_counts_in_the_first_batch_is_evaluated():
    def loss(outputs, batch):
        others = functional.cross_entropy(outputs[:, 1:], batch["others"]).nan_to_num()
        return functional.cross_entropy(outputs[:, :2], batch["labels"]) + others

    model = nn.Linear(4, 3)
    batch = {"x": torch.randn(8, 4), "labels": torch.randint(2, (8,)), "others": torch.full((8,), -100)}
    runner = runner_of(model, loss=loss, forward=lambda model, batch: model(batch["x"]))

    found = runner.evaluate([batch, batch | {"others": torch.ones(8).long()}])

    assert math.isfinite(found)


def test_named_term_whose_coefficient_is_0_is_evaluated():
    factor = [1.0]

    def loss(outputs, targets):
        return {"mean": outputs.square().mean(), "penalty": factor[0] * outputs.exp().sum() / targets.numel()}

    model = nn.Linear(4, 6)
    runner = runner_of(model, loss=loss)
    batch = torch.randn(8, 4), torch.randn(8, 6)
    runner.step(batch)
    factor[0] = 0.0

    assert runner.evaluate([batch]) == pytest.approx(model(batch[0]).square().mean().item(), rel=1e-6)


@pytest.mark.parametrize("scope", ["micro_batch", "window"])
@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(torch.rand(3)), nn.CrossEntropyLoss(label_smoothing=0.1)],
    ids=["plain", "of weighted classes", "smoothed"],
)
def test_probabilities_as_targets_are_evaluated_before_training(loss, scope):
    model, batch = nn.Linear(4, 3), (torch.randn(6, 4), torch.randn(6, 3).softmax(1))

    found = runner_of(model, loss=loss, loss_scope=scope).evaluate([batch])

    assert found == pytest.approx(loss(model(batch[0]), batch[1]).item(), rel=1e-6)


@pytest.mark.parametrize("own", [True, False], ids=["of the model", "a function"])
@pytest.mark.parametrize("labelled", [(1, 5, 2), (5, 1, 3), (2, 5, 5)])
def test_mean_over_batches_of_one_sample_each_is_over_their_labelled_tokens(own, labelled):
    inputs, labels = torch.randn(3, 5, 4, dtype=torch.float64), torch.randint(3, (3, 5))
    labels[torch.arange(5) >= torch.tensor(labelled)[:, None]] = -100
    model = WithLoss()

    rows = zip(inputs.split(1), labels.split(1), strict=True)
    batches = [{"inputs": one, "labels": other} if own else (one, other) for one, other in rows]
    found = runner_of(model, **({} if own else {"loss": over_tokens})).evaluate(batches)

    assert found == pytest.approx(exact(model, (inputs, labels), over_tokens), rel=1e-12)


class OfKeptElements(nn.Linear):
    """Returns its own mean over the elements of the rows that a mask keeps."""

    def __init__(self):
        super().__init__(4, 4, dtype=torch.float64)

    def forward(self, inputs, kept):
        off = (super().forward(inputs) - inputs).square() * kept[:, None]
        return {"loss": off.sum() / (kept.sum() * inputs.shape[1])}


def test_mean_over_elements_of_what_a_mask_keeps_is_exact_though_the_mask_kept_all_in_training():
    model, runner = (one := OfKeptElements()), runner_of(one, 16, 8)
    runner.step(kept_of(16, kept=[*range(16)]))
    whole = kept_of(12, kept=[0, 1, 4, 8, 9, 10])

    found = runner.evaluate(parts_of(whole, 4))

    assert found == pytest.approx(model(**whole)["loss"].item(), rel=1e-12)


def over_kept(least):
    def loss(outputs, batch):
        return (outputs.square().mean(1) * batch["kept"]).sum() / batch["kept"].sum().clamp(min=least)

    return loss


class OfKept(nn.Linear):
    """Returns its own mean over what a mask keeps, at least so many."""

    def __init__(self, least):
        super().__init__(4, 3, dtype=torch.float64)
        self.loss = over_kept(least)

    def forward(self, inputs, kept):
        return {"loss": self.loss(super().forward(inputs), {"kept": kept})}


def kept_of(samples, **rows):
    """A batch with masks that keep these rows."""
    masks = {name: torch.isin(torch.arange(samples), torch.tensor(own)).double() for name, own in rows.items()}
    return {"inputs": torch.randn(samples, 4, dtype=torch.float64), **masks}


def parts_of(batch, size):
    return [{name: part[at : at + size] for name, part in batch.items()} for at in range(0, len(batch["inputs"]), size)]


def of_inputs(model, batch):
    return model(batch["inputs"])


@pytest.mark.filterwarnings("ignore:autoaccum. loss 'loss' divides by more in a micro-batch")  # a k that is new
@pytest.mark.parametrize("own", [True, False], ids=["of the model", "a function"])
@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("kept", [(1, 4, 5), (5,), ()], ids=["few in each batch", "one in all", "none"])
def test_mean_over_at_least_so_many_is_that_of_training_where_fewer_count(own, least, kept):
    loss, model = over_kept(least), OfKept(least) if own else nn.Linear(4, 3).double()
    runner = runner_of(model, 16, 8, **({} if own else {"loss": loss, "forward": of_inputs}))
    runner.step(kept_of(16, kept=[*range(4, 16)]))
    runner.step(kept_of(16, kept=[*range(8)]))  # none in the second micro-batch
    whole = kept_of(12, kept=kept)

    found = runner.evaluate(parts_of(whole, 3))

    outputs = functional.linear(whole["inputs"], model.weight, model.bias)
    assert found == pytest.approx(loss(outputs, whole).item(), rel=1e-12)


@pytest.mark.filterwarnings("ignore:autoaccum. loss 'loss' divides by more in a micro-batch")  # and other masks
@pytest.mark.parametrize("size", [3, 12])
def test_check_that_an_evaluation_asks_for_makes_no_sum_of_a_mean(size):
    """Masks that were alike until now are not, and no more are kept than max(3, n) has at least."""
    loss, model = over_kept(3), nn.Linear(4, 3).double()
    runner = runner_of(model, 16, 8, loss=loss, forward=of_inputs)
    runner.step(kept_of(16, kept=[*range(4, 16)], others=[*range(4, 16)]))
    whole = kept_of(12, kept=[0, 4, 8], others=[0, 1, 4, 7, 8, 11])

    found = runner.evaluate(parts_of(whole, size))

    assert found == pytest.approx(loss(of_inputs(model, whole), whole).item(), rel=1e-12)


class OfRows(nn.Linear):
    """Returns its own mean over rows, and runs out of memory for more than a few of them."""

    def __init__(self, most):
        super().__init__(4, 3, dtype=torch.float64)
        self.most = most

    def forward(self, inputs, labels):
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("told to")
        return {"loss": functional.cross_entropy(super().forward(inputs), labels, reduction="sum") / len(labels)}


@pytest.mark.filterwarnings("ignore:autoaccum. two samples that can be joined do not fit at once")
@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("first", [[1, 0, 2, 0, 2, 0, 1, 1, 0, 2, 0, 1], [1] * 12, [1, 2, 2] * 4])
@pytest.mark.parametrize("sizes", [(12, 12), (1, 2, 21)])
def test_count_that_fits_the_samples_of_a_check_by_accident_is_told_from_the_rows_by_others(sizes, first, most):
    model, inputs = OfRows(most), torch.randn(24, 4, dtype=torch.float64)
    labels = torch.tensor([*first, *[1, 0, 2, 0, 2, 0, 1, 1, 0, 2, 0, 1]])  # of some samples, the sum is their number
    rows = zip(inputs.split(sizes), labels.split(sizes), strict=True)
    batches = [{"inputs": one, "labels": other} for one, other in rows]

    found = runner_of(model, device=autoaccum.Simulated(MIB)).evaluate(batches)

    outputs = functional.linear(inputs, model.weight, model.bias).detach()
    assert found == pytest.approx(float(functional.cross_entropy(outputs, labels)), rel=1e-12)


# --- what it leaves --------------------------------------------------------------------------------------------------


class Drawing(nn.Linear):
    """Draws, in evaluation too, from generators that it holds."""

    def __init__(self):
        super().__init__(4, 3, dtype=torch.float64)
        self.of_torch = torch.Generator().manual_seed(1)
        self.of_python = random.Random(1)  # noqa: S311 - no secret
        self.of_numpy = np.random.default_rng(1)

    def forward(self, inputs):
        noise = torch.rand((), generator=self.of_torch) + self.of_python.random() + self.of_numpy.random()
        return super().forward(inputs) + noise

    def states(self):
        generators = self.of_torch.get_state().tolist(), self.of_python.getstate(), self.of_numpy.bit_generator.state
        return generators, [part.training for part in self.modules()]


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "failing"])
def test_modes_and_generators_that_modules_hold_are_left_as_they_were(data, fails):
    model = Drawing()
    before = model.states()

    def batches():
        yield data
        if fails:
            raise RuntimeError("CUDA out of memory. The loader's own.")

    with pytest.raises(RuntimeError, match="The loader's own") if fails else contextlib.nullcontext():
        runner_of(model).evaluate(batches())

    assert model.states() == before


# --- metrics ---------------------------------------------------------------------------------------------------------


def right(outputs, targets):
    return outputs.argmax(1) == targets


def hits(outputs, targets):
    return float(right(outputs, targets).double().mean())


METRICS = {
    "number": accuracy,
    "vector": right,
    "float": hits,
    "torchmetrics": micro_accuracy(),
    "collection": torchmetrics.MetricCollection({"micro": micro_accuracy()}),
    "extremes": torchmetrics.MinMaxMetric(micro_accuracy()),
}


@pytest.mark.parametrize("device", ["cpu", autoaccum.Simulated(MIB)], ids=["micro-batches", "whole batches"])
def test_metrics_run_over_all_samples_in_each_evaluation_anew(device, model, data):
    expected = exact(model, data, accuracy)

    found = evaluations_of(model, batches_of(data, *SIZES), METRICS, epochs=2, device=device)

    names = [*list(METRICS)[:4], "collection/micro", "extremes/raw", "extremes/max", "extremes/min"]
    assert len(found) == 2
    for one in found:
        assert one.metrics == {name: pytest.approx(expected) for name in names}
        assert (one.loss, one.samples) == (pytest.approx(exact(model, data), rel=1e-12), SAMPLES)


def test_metric_that_counts_is_warned_of_and_a_value_for_each_sample_is_not(model, data):
    def correct(outputs, targets):
        return (outputs.argmax(1) == targets[0]).sum() + 2

    def each(outputs, targets):
        return outputs.argmax(1)

    with pytest.warns(UserWarning, match="metric 'correct' looks like a count") as told:
        evaluations_of(model, batches_of(data, *SIZES), [correct, each])

    assert len({str(one.message) for one in told if "'each'" in str(one.message)}) == 0


# --- metrics alone ---------------------------------------------------------------------------------------------------


class Detector(nn.Module):
    """Returns its losses in training mode, and what it has found in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 4).double()

    def forward(self, images, targets):
        found = [self.head(image.mean((1, 2))) for image in images]
        if not self.training and not any("asked" in target for target in targets):
            return [{"boxes": one} for one in found]
        off = [(one - target["boxes"]).square().mean() for one, target in zip(found, targets, strict=True)]
        return {"boxes": torch.stack(off).mean()}


def images(samples):
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return [random(3, 4, 4) for _ in range(samples)], [{"boxes": random(4)} for _ in range(samples)]


def distance(outputs, targets):
    return torch.stack([(a["boxes"] - b["boxes"]).abs().mean() for a, b in zip(outputs, targets, strict=True)]).mean()


def both(model, batch):
    return model(*batch)


def fitted(val_loader, metrics=distance, **options):
    settings = {"loss_reduction": "mean", "micro_batch": 2, "optimizer": "sgd", "progress": False} | options
    model = Detector()
    return model, autoaccum.fit(
        model, [images(4)], 4, forward=both, val_loader=val_loader, metrics=metrics, device="cpu", **settings
    )


@pytest.mark.parametrize("options", [{}, {"loss_reduction": None}], ids=["mean", "checked"])
def test_model_without_a_loss_in_evaluation_mode_is_evaluated_by_its_metrics_alone(options, tmp_path):
    held = [images(4), images(3)]

    model, result = fitted(held, epochs=2, checkpoint=tmp_path, **options)

    *_, evaluation = result.evaluations
    model.eval()
    expected = [float(distance(model(*batch), batch[1]).detach()) for batch in held]
    assert evaluation.loss is None
    assert evaluation.losses == {}
    assert evaluation.samples == 7
    assert evaluation.metrics["distance"] == pytest.approx((4 * expected[0] + 3 * expected[1]) / 7, rel=1e-12)
    assert result.best_checkpoint is None


def test_plateau_and_early_stopping_without_a_loss_are_refused_or_take_a_metric():
    with pytest.raises(InvalidInputError, match="ReduceLROnPlateau moves with the validation loss, and the model"):
        fitted([images(4)], scheduler=partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5))
    with pytest.raises(InvalidInputError, match="monitor='loss' is not among what is evaluated: 'distance'"):
        fitted([images(4)], callbacks=[autoaccum.EarlyStopping()])

    _, result = fitted([images(4)], epochs=9, callbacks=[autoaccum.EarlyStopping(1, "distance", "max")])

    assert result.stopped.startswith("distance has not improved")


def test_loss_of_some_validation_samples_alone_is_refused():
    asked, targets = images(2)
    some = asked, [target | {"asked": torch.ones(1)} for target in targets]

    with pytest.raises(InvalidInputError, match="a loss for some of the validation samples"):
        fitted([images(2), some])


def test_model_without_a_loss_in_evaluation_mode_and_without_metrics_is_told_of_them():
    with pytest.raises(InvalidInputError, match=r"let forward= return the loss .*evaluated by fit's metrics="):
        fitted([images(4)], metrics=None)
    runner = autoaccum.Runner(Detector(), "sgd", autoaccum.plan(4, 2), forward=both, device="cpu")
    with pytest.raises(InvalidInputError, match=r"evaluated by fit's metrics="):
        runner.evaluate([images(4)])


# --- memory ----------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Takes about 8 kB a sample while it evaluates, and next to nothing otherwise.

    Counts the samples that it evaluates in a buffer, and in a frozen parameter.
    """

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.also_seen = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, inputs):
        if self.training:
            return self.head(inputs)
        self.seen += len(inputs)
        with torch.no_grad():
            self.also_seen += len(inputs)
        wide = inputs.repeat(1, WIDTH // 4)
        return self.head(inputs) + 0 * (wide + wide).sum(1, keepdim=True)


@pytest.fixture
def wide():
    return Wide().double()


def room(samples):
    return autoaccum.Simulated(samples * WIDTH * 8)


class Sizes(autoaccum.Callback):
    def __init__(self):
        self.told = []

    def on_oom(self, event, *, step):
        self.told.append(event.size)

    def on_evaluation(self, evaluation, *, epoch, step):
        self.told.append("done")


class Seen:
    """A metric as a user writes it."""

    def reset(self):
        self.sizes = []

    def update(self, outputs, targets):
        self.sizes.append(len(targets))

    def compute(self):
        return {"samples": sum(self.sizes), "most": max(self.sizes)}


def test_memory_that_runs_out_changes_no_number_and_the_size_is_kept(wide, data):
    sizes, metrics = Sizes(), {"it": Seen(), "micro": micro_accuracy(), "auroc": MulticlassAUROC(3), "mean": accuracy}
    expected = evaluated(wide, [data, data], metrics)

    found = evaluations_of(wide, [data, data], metrics, epochs=2, device=room(9), callbacks=[sizes])

    *failed, done, end = sizes.told
    assert (failed[0], failed) == (SAMPLES, sorted(failed, reverse=True))
    assert (done, end) == ("done", "done")
    for one in found:
        assert one.metrics["it/most"] < SAMPLES
        assert one.metrics == pytest.approx({**expected.metrics, "it/most": one.metrics["it/most"]})
        assert (one.loss, one.samples) == (pytest.approx(expected.loss, rel=1e-12), 2 * SAMPLES)


def test_what_a_failed_micro_batch_wrote_is_put_back_and_the_plan_is_not_touched(wide, data):
    runner = runner_of(wide, device=room(5))
    plan = runner.plan

    found = runner.evaluate([data])

    assert wide.seen == wide.also_seen == SAMPLES
    assert (runner.plan, runner._runner.events.oom_events) == (plan, 0)
    assert found == pytest.approx(exact(wide, data), rel=1e-12)


def test_copies_of_frozen_parameters_do_not_stay_into_the_training(wide, data):
    class Alive(autoaccum.Callback):
        def on_evaluation(self, evaluation, *, epoch, step):
            gc.collect()
            found.append(sum(isinstance(one, torch.Tensor) and one.shape == (97, 7) for one in gc.get_objects()))

    wide.slow, found = nn.Linear(7, 97).requires_grad_(requires_grad=False), []

    evaluated(wide, [data], callbacks=[Alive()], epochs=3)

    assert found[-1] == 1


def test_one_sample_that_does_not_fit_is_an_error_that_leaves_the_model(wide, data):
    runner = runner_of(wide, device=room(1), loss=nn.CrossEntropyLoss())
    before = state_of(wide)

    with pytest.raises(DoesNotFitError, match=r"a sample of shape.*in an evaluation"):
        runner.evaluate([data])

    assert_bitwise(state_of(wide), before)


def test_metric_that_counts_and_runs_out_of_memory_says_so_before_training(model, data):
    class Greedy(Seen):
        def update(self, outputs, targets):
            super().update(outputs, targets)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(DoesNotFitError, match=r"metric 'it', a Greedy, ran out of memory while it counted 15 samples"):
        evaluated(model, [data], {"it": Greedy()})


# --- a loss over the whole batch -------------------------------------------------------------------------------------


def against_each_other(outputs, targets):
    same = (targets[:, None] == targets).to(outputs)
    return functional.binary_cross_entropy_with_logits(outputs @ outputs.T, same)


def of_batches(model, batches):
    """The mean over the batches, weighed by their samples, of a loss that sees all of a batch."""
    total = sum(exact(model, batch, against_each_other) * len(batch[1]) for batch in batches)
    return total / sum(len(batch[1]) for batch in batches)


@pytest.mark.parametrize("device", ["cpu", autoaccum.Simulated(MIB)], ids=["micro-batches", "whole batches"])
@pytest.mark.parametrize(
    "loss",
    [
        against_each_other,
        lambda x, y: {"near": against_each_other(x, y) / 4, "far": against_each_other(x, y) * 3 / 4},
        lambda x, y: (against_each_other(x, y) * len(y), len(y)),
        lambda x, y: against_each_other(x, y).expand(len(y)),
    ],
    ids=["number", "mapping", "pair", "vector"],
)
def test_loss_over_the_window_is_that_of_each_batch_of_the_loader(loss, device, model, data):
    batches = batches_of(data, *SIZES)

    found = evaluated(model, batches, [accuracy, micro_accuracy()], loss=loss, loss_scope="window", device=device)

    assert found.loss == pytest.approx(of_batches(model, batches), rel=1e-12)
    assert list(found.metrics.values()) == [pytest.approx(exact(model, data, accuracy))] * 2
    assert found.samples == SAMPLES
