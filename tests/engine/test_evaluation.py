"""Evaluation counts every sample once, in micro-batches of its own size, and leaves training as it is."""

import contextlib
import math
import random

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

import autoaccum
from autoaccum._system.notices import Notices
from autoaccum.errors import DoesNotFitError, InvalidInputError, StateDamagedError
from helpers import CountingLoader, assert_bitwise, batches_of, classifier, labelled, state_of

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


def runner_of(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"device": "cpu", "notices": Notices(silent=True)} | options
    return autoaccum.Runner(model, optimizer, autoaccum.plan(4, 2), **settings)


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


def test_losses_with_forward_passes_of_their_own_are_added_and_metrics_get_outputs(model, data):
    def classes(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    def size(model, batch):
        return model(batch[0]).square().mean()

    found = evaluated(model, batches_of(data, *SIZES), accuracy, loss=[classes, size])

    assert found.loss == pytest.approx(
        exact(model, data, lambda x, y: functional.cross_entropy(x, y) + x.square().mean())
    )
    assert found.metrics["accuracy"] == pytest.approx(exact(model, data, accuracy))


class Tagger(nn.Module):
    """Logits (N, C, T) for tokens (N, T)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)

    def forward(self, tokens):
        return self.embed(tokens).transpose(1, 2)


@pytest.fixture
def sentences():
    tokens, targets = torch.randint(0, 11, (SAMPLES, 6)), torch.randint(0, 5, (SAMPLES, 6))
    for row in range(SAMPLES):
        targets[row, 1 + row % 6 :] = -100
    return tokens, targets


def pair(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="sum"), (targets != -100).sum()


@pytest.mark.parametrize(
    ("loss", "scope"),
    [
        (None, "micro_batch"),
        (functional.cross_entropy, "micro_batch"),
        (nn.CrossEntropyLoss(), "micro_batch"),
        (pair, "micro_batch"),
        (nn.CrossEntropyLoss(), "window"),
    ],
    ids=["chosen", "function", "module", "pair", "over the window"],
)
def test_token_mean_runs_over_the_tokens_of_all_batches(loss, scope, sentences):
    model = Tagger().double()

    found = runner_of(model, loss=loss, loss_scope=scope).evaluate(batches_of(sentences, *SIZES))

    assert found == pytest.approx(exact(model, sentences), rel=1e-12)


def test_batch_in_which_nothing_counts_adds_nothing_and_is_not_a_number_by_itself(sentences):
    model = Tagger().double()
    ignored = (sentences[0], torch.full_like(sentences[1], -100))
    runner = runner_of(model, loss=nn.CrossEntropyLoss())

    assert runner.evaluate([ignored, sentences]) == pytest.approx(exact(model, sentences), rel=1e-12)
    assert math.isnan(runner.evaluate([ignored]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite_is_told(value, model, data):
    targets = data[1].double().index_fill(0, torch.tensor([9]), value)

    found = evaluated(model, [(data[0], targets)], loss=lambda x, y: (x.sum(1) - y).square().mean())

    assert str(found.loss) == str(value)


def test_loss_in_half_precision_does_not_overflow_when_it_is_added_up():
    model = nn.Linear(2, 2, bias=False).half()
    inputs, targets = torch.zeros(8, 2).half(), torch.full((8, 2), 100.0).half()

    assert runner_of(model, loss=nn.MSELoss()).evaluate([(inputs, targets)] * 4) == 10_000.0


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.int64])
def test_weights_of_pairs_are_added_in_full(kind, model):
    def pair(outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="sum"), torch.tensor(len(targets)).to(kind)

    data = labelled(700)

    found = runner_of(model, loss=pair).evaluate(batches_of(data, *[7] * 100))

    assert found == pytest.approx(exact(model, data), rel=1e-12)


WEIGHTS = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), lambda x, y: functional.cross_entropy(x, y, WEIGHTS)], ids=["module", "weighted"]
)
@pytest.mark.parametrize("made", ["before", "within"])
def test_inference_mode_changes_neither_an_evaluation_nor_the_training_after_it(made, loss, model, data):
    runner = runner_of(model, loss=loss)
    expected, of_training = exact(model, data, loss), exact(model, [half[:4] for half in data], loss)

    with torch.inference_mode():
        batches = batches_of([half.clone() if made == "within" else half for half in data], *SIZES)
        found = runner.evaluate(batches)

    assert found == pytest.approx(expected, rel=1e-12)
    assert runner.step(autoaccum.Window(batches_of(data, *SIZES)[:1])).loss == pytest.approx(of_training, rel=1e-12)


@pytest.mark.parametrize("empty", [[], [labelled(0)]], ids=["none", "empty"])
@pytest.mark.parametrize("evaluate", [evaluated, lambda model, batches: runner_of(model).evaluate(batches)])
def test_loader_without_samples_is_refused(evaluate, empty, model):
    with pytest.raises(InvalidInputError, match="val_loader"):
        evaluate(model, empty)


# --- what it leaves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["micro_batch", "window"])
def test_model_its_gradients_and_random_state_are_left_as_they_were(scope, data):
    model = classifier()
    model[1].eval()
    runner = runner_of(model, loss=functional.cross_entropy, loss_scope=scope)
    model(data[0]).sum().backward()
    before, random_state = state_of(model), torch.get_rng_state()

    runner.evaluate(batches_of(data, *SIZES))

    assert_bitwise(state_of(model), before)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_model_sees_evaluation_mode_and_no_gradients(data):
    seen = []

    class Watching(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            seen.append((self.training, outputs.requires_grad))
            return outputs

    runner_of(Watching(4, 3).double(), loss=nn.CrossEntropyLoss()).evaluate(batches_of(data, *SIZES))

    assert set(seen) == {(False, False)}


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
    """A value for each sample."""
    return outputs.argmax(1) == targets


def hits(outputs, targets):
    """A float of Python's."""
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


@pytest.mark.parametrize("number", [np.float16(3000), np.full(70, 3000, dtype=np.float16), np.bool_(True)])
def test_numbers_of_numpy_are_added_in_full(number, model):
    found = evaluated(model, [labelled(70)] * 3, {"it": lambda outputs, targets: number})

    assert found.metrics == {"it": float(np.mean(number))}


def test_metrics_of_one_name_are_told_apart(model, data):
    found = evaluated(model, [data], [lambda x, y: 1.0, lambda x, y: 2.0, accuracy])

    assert found.metrics == {
        "<lambda>": 1.0,
        "<lambda> 2": 2.0,
        "accuracy": pytest.approx(exact(model, data, accuracy)),
    }


def test_metric_of_a_mapping_batch_gets_the_batch():
    class Model(nn.Linear):
        def forward(self, inputs, labels):
            return {"loss": functional.cross_entropy(super().forward(inputs), labels), "logits": inputs}

    inputs, labels = labelled(6)
    batch, seen = {"inputs": inputs, "labels": labels}, []

    autoaccum.fit(
        Model(4, 3).double(), [batch], 6, epochs=1, device="cpu", progress=False, val_loader=[batch],
        metrics=lambda outputs, given: seen.append((outputs, given)) or 0.0,
    )  # fmt: skip

    assert all(outputs.keys() == {"loss", "logits"} and given.keys() == batch.keys() for outputs, given in seen)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("accuracy", r"callable of \(outputs, targets\) or a torchmetrics object"),
        ([accuracy, None], r"callable of \(outputs, targets\) or a torchmetrics object"),
        ({"it": lambda outputs, targets: None}, "metric 'it' returned "),
        ({"it": lambda outputs, targets: [0.5]}, "metric 'it' returned "),
        (MulticlassConfusionMatrix(3), r"'MulticlassConfusionMatrix'.*shape \(3, 3\)"),
    ],
)
def test_what_is_no_metric_or_gives_no_number_is_refused_before_training(metric, said, model, data):
    before = state_of(model)

    with pytest.raises(InvalidInputError, match=said):
        evaluated(model, [data], metric)

    assert_bitwise(state_of(model), before)


# --- memory ----------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Takes about 8 kB a sample while it evaluates, and next to nothing otherwise; counts the samples it evaluates."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        if self.training:
            return self.head(inputs)
        self.seen += len(inputs)
        wide = inputs.repeat(1, WIDTH // 4)
        return self.head(inputs) + 0 * (wide + wide).sum(1, keepdim=True)


@pytest.fixture
def wide():
    return Wide().double()


def room(samples):
    return autoaccum.Simulated(samples * WIDTH * 8)


class Sizes(autoaccum.Callback):
    """Notes how many samples memory ran out with, and when evaluations ended."""

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

    assert wide.seen == SAMPLES
    assert (runner.plan, runner.oom_events) == (plan, 0)
    assert found == pytest.approx(exact(wide, data), rel=1e-12)


def test_one_sample_that_does_not_fit_is_an_error_that_leaves_the_model(wide, data):
    runner = runner_of(wide, device=room(1), loss=nn.CrossEntropyLoss())
    before = state_of(wide)

    with pytest.raises(DoesNotFitError, match=r"a sample of shape.*in an evaluation"):
        runner.evaluate([data])

    assert_bitwise(state_of(wide), before)


def test_size_grows_back_once_the_memory_is_there_again(data):
    sizes = []

    class Beside(nn.Linear):
        """Has a neighbour at first, which leaves memory for three samples."""

        def forward(self, inputs):
            if len(sizes) < 20 and len(inputs) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            sizes.append(len(inputs))
            return super().forward(inputs)

    model = Beside(4, 3).double()
    options = {"device": autoaccum.Simulated(MIB), "loss": functional.cross_entropy, "loss_reduction": "mean"}
    found = runner_of(model, **options).evaluate([data] * 80)

    assert (sizes[:20], sizes[-1]) == ([3] * 20, SAMPLES)
    assert found == pytest.approx(exact(model, data), rel=1e-12)


def test_wide_batch_that_fails_cuts_no_narrow_one_and_every_batch_as_wide():
    sizes = []

    class Texts(nn.Linear):
        """Has memory for 30 numbers."""

        def forward(self, texts):
            if texts.numel() > 30:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            sizes.append(len(texts))
            return super().forward(texts.sum(1, keepdim=True))

    narrow, wide = (torch.ones(6, width) for width in (5, 10))
    options = {"device": autoaccum.Simulated(MIB), "loss": lambda outputs, _: outputs.mean(), "loss_reduction": "mean"}
    runner = runner_of(Texts(1, 1), **options)

    for _ in range(2):
        runner.evaluate([narrow, wide, narrow, wide, torch.ones(2, 10)])

    assert sizes == [6, 3, 3, 6, 3, 3, 2] * 2


class Long(nn.Module):
    """Takes next to no memory without gradients, and about 80 kB a sample with them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3).double()
        self.sizes = []

    def forward(self, inputs):
        self.sizes.append(len(inputs))
        wide = self.head(inputs)[:, :1].repeat(1, 1000)
        for _ in range(10):
            wide = wide.sin()
        return self.head(inputs) + 0 * wide.sum(1, keepdim=True)


def own_loss(outputs, targets):
    return functional.cross_entropy(outputs, targets)


def test_trying_the_loss_takes_fewer_samples_and_cuts_no_micro_batch(data):
    model = Long()
    runner = runner_of(model, loss=own_loss, device=autoaccum.Simulated("400KiB"))

    found = runner.evaluate([data] * 2)

    assert found == pytest.approx(exact(model, data), rel=1e-12)
    assert model.sizes.count(SAMPLES) >= 2


def test_trying_the_loss_that_does_not_fit_says_so(data):
    runner = runner_of(Long(), loss=own_loss, device=autoaccum.Simulated("60KiB"))

    with pytest.raises(DoesNotFitError, match=r"trying the loss on a few samples does not fit.*loss_reduction="):
        runner.evaluate([data])


def test_lack_of_memory_after_a_large_buffer_has_begun_to_move_is_not_hidden(data):
    class Bank(nn.Linear):
        """Writes a bank of features in a late evaluation pass, and then runs out of memory."""

        def __init__(self):
            super().__init__(4, 3)
            self.register_buffer("bank", torch.zeros(70_000))
            self.passes = 0

        def forward(self, inputs):
            self.passes += 1
            if self.passes == 20:
                self.bank += 1
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(inputs)

    runner = runner_of(Bank().double(), device=autoaccum.Simulated(MIB), loss_reduction="mean")

    with pytest.raises(StateDamagedError, match="had written bank"):
        runner.evaluate([data] * 20)


def test_samples_that_the_model_has_changed_in_place_are_not_taken_twice(data):
    class InPlace(Wide):
        def forward(self, inputs):
            return super().forward(inputs.add_(1))

    runner = runner_of(InPlace().double(), device=room(5))

    with pytest.raises(InvalidInputError, match="changed its input in place"):
        runner.evaluate([data])


def test_samples_made_in_inference_mode_are_evaluated(wide, data):
    with torch.inference_mode():
        batch = tuple(half.clone() for half in data)

    assert runner_of(wide, device=room(5)).evaluate([batch]) == pytest.approx(exact(wide, data), rel=1e-12)


def test_callable_in_which_memory_runs_out_is_called_again_and_no_sample_counts_twice(model, data):
    def greedy(outputs, targets):
        if len(targets) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return accuracy(outputs, targets)

    found = evaluated(model, batches_of(data, *SIZES), [accuracy, greedy, Seen(), micro_accuracy()])

    *averages, of_metric = (found.metrics[name] for name in ("accuracy", "greedy", "MulticlassAccuracy"))
    assert [*averages, of_metric] == [pytest.approx(exact(model, data, accuracy))] * 3
    assert found.metrics["Seen/samples"] == SAMPLES
    assert found.loss == pytest.approx(exact(model, data), rel=1e-12)


def test_metric_that_counts_and_runs_out_of_memory_says_so_before_training(model, data):
    class Greedy(Seen):
        def update(self, outputs, targets):
            super().update(outputs, targets)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(DoesNotFitError, match=r"metric 'it', a Greedy, ran out of memory while it counted 15 samples"):
        evaluated(model, [data], {"it": Greedy()})


def test_metric_that_runs_out_of_memory_while_it_computes_says_so(model, data):
    class Greedy(Seen):
        def compute(self):
            if len(self.sizes) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return 0.0

    with pytest.raises(DoesNotFitError, match="metric 'it', a Greedy, ran out of memory while it computed its result"):
        evaluated(model, [data, data], {"it": Greedy()})


# --- a loss over the whole batch -------------------------------------------------------------------------------------


def against_each_other(outputs, targets):
    """Every sample of a batch stands against every other one."""
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


def test_memory_that_runs_out_cuts_the_forward_pass_and_not_the_loss(wide, data):
    seen = []

    def loss(outputs, targets):
        seen.append(len(outputs))
        return against_each_other(outputs, targets)

    found = runner_of(wide, loss=loss, loss_scope="window", device=room(5)).evaluate([data])

    assert found == pytest.approx(exact(wide, data, against_each_other), rel=1e-12)
    assert seen[0] == SAMPLES


@pytest.mark.parametrize("scope", ["micro_batch", "window"])
def test_outputs_that_are_views_take_no_memory_from_the_next_micro_batch(scope, data):
    sizes = []

    class View(nn.Linear):
        def forward(self, inputs):
            sizes.append(len(inputs))
            return super().forward(inputs).repeat(1, WIDTH // 4)[:, :4]

    options = {"loss": functional.cross_entropy, "loss_reduction": "mean", "loss_scope": scope}
    runner_of(View(4, 4).double(), device=room(6), **options).evaluate([data])

    assert sizes[-3:] == [5, 5, 5]  # six would fit; kept views would leave room for fewer


def test_loss_over_the_window_that_does_not_fit_says_so(wide, data):
    def greedy(outputs, targets):
        return outputs.mean() + outputs.new_zeros(10 * WIDTH).mean()

    runner = runner_of(wide, loss=greedy, loss_scope="window", device=room(5))

    with pytest.raises(DoesNotFitError, match=f"the loss over all {SAMPLES} samples"):
        runner.evaluate([data])
