"""Evaluation counts every sample once, in a cut of its own, and leaves training as it is."""

import collections
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
from autoaccum._engine.evaluation import Evaluator
from autoaccum._system.notices import Notices
from autoaccum.errors import DoesNotFitError, InvalidInputError
from helpers import CountingLoader, assert_bitwise, batches_of, classifier, labelled, state_of
from put_together import training_step

SIZES = (4, 1, 7, 3)
SAMPLES = sum(SIZES)


@pytest.fixture
def model():
    return classifier()


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


def runner_of(model, plan=None, **options):
    return autoaccum.Runner(
        model, None, plan or autoaccum.plan(4, 2), notices=Notices(silent=True), **{"device": "cpu"} | options
    )


# --- the loss --------------------------------------------------------------------------------------------------------


def test_mean_loss_is_that_of_all_samples_together(model, data):
    found = runner_of(model).evaluate(batches_of(data, *SIZES))

    assert found == pytest.approx(exact(model, data), rel=1e-12)


def test_samples_are_counted_and_each_batch_is_drawn_once(model, data):
    loader = CountingLoader(batches_of(data, *SIZES))

    evaluation = Evaluator(training_step(model)).run(loader)

    assert evaluation.samples == SAMPLES
    assert loader.drawn == len(SIZES)


def test_loss_that_sums_is_reported_for_one_sample(model, data):
    runner = runner_of(model, loss=nn.CrossEntropyLoss(reduction="sum"))

    assert runner.evaluate(batches_of(data, *SIZES)) == pytest.approx(exact(model, data), rel=1e-12)


def test_losses_of_one_call_are_added(model, data):
    def several(outputs, targets):
        return {"class": functional.cross_entropy(outputs, targets), "size": outputs.square().mean(1)}

    found = runner_of(model, loss=several).evaluate(batches_of(data, *SIZES))

    assert found == pytest.approx(exact(model, data, lambda x, y: sum(v.mean() for v in several(x, y).values())))


def test_losses_with_forward_passes_of_their_own_are_added(model, data):
    def classes(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    def size(model, batch):
        return model(batch[0]).square().mean()

    evaluation = Evaluator(training_step(model, [classes, size]), accuracy).run(batches_of(data, *SIZES))

    assert evaluation.loss == pytest.approx(
        exact(model, data, lambda x, y: functional.cross_entropy(x, y) + x.square().mean())
    )
    assert evaluation.metrics["accuracy"] == pytest.approx(exact(model, data, accuracy))


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
    "loss", [None, functional.cross_entropy, nn.CrossEntropyLoss(), pair], ids=["chosen", "function", "module", "pair"]
)
def test_token_mean_runs_over_the_tokens_of_all_batches(loss, sentences):
    model = Tagger().double()

    found = runner_of(model, loss=loss).evaluate(batches_of(sentences, *SIZES))

    assert found == pytest.approx(exact(model, sentences), rel=1e-12)


def test_batch_in_which_nothing_counts_adds_nothing(sentences):
    model = Tagger().double()
    ignored = (sentences[0], torch.full_like(sentences[1], -100))

    found = runner_of(model, loss=nn.CrossEntropyLoss()).evaluate([ignored, sentences])

    assert found == pytest.approx(exact(model, sentences), rel=1e-12)


def test_loss_of_data_in_which_nothing_counts_is_not_a_number(sentences):
    ignored = (sentences[0], torch.full_like(sentences[1], -100))

    assert math.isnan(runner_of(Tagger(), loss=nn.CrossEntropyLoss()).evaluate([ignored]))


def test_loss_in_half_precision_does_not_overflow_when_it_is_added_up():
    model = nn.Linear(2, 2, bias=False).half()
    inputs, targets = torch.zeros(8, 2).half(), torch.full((8, 2), 100.0).half()

    found = runner_of(model, loss=nn.MSELoss()).evaluate([(inputs, targets)] * 4)

    assert found == 10_000.0


@pytest.mark.parametrize("empty", [[], [(torch.zeros(0, 4).double(), torch.zeros(0).long())]], ids=["none", "empty"])
def test_loader_without_samples_is_refused(empty, model):
    with pytest.raises(InvalidInputError, match="validation loader gave no samples"):
        runner_of(model).evaluate(empty)


# --- what it leaves --------------------------------------------------------------------------------------------------


def test_model_is_left_as_it_was(model, data):
    model[1].eval()
    runner = runner_of(model)
    before, random_state = state_of(model), torch.get_rng_state()

    runner.evaluate(batches_of(data, *SIZES))

    assert_bitwise(state_of(model), before)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_modes_are_put_back_when_the_loader_fails(model, data):
    def loader():
        yield data
        raise RuntimeError("CUDA out of memory. The loader's own.")

    model[1].eval()
    before = state_of(model)

    with pytest.raises(RuntimeError, match="The loader's own"):
        runner_of(model).evaluate(loader())

    assert_bitwise(state_of(model), before)


def test_model_sees_evaluation_mode_and_no_gradients(data):
    seen = []

    class Watching(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            seen.append((self.training, outputs.requires_grad))
            return outputs

    runner_of(Watching(4, 3).double(), loss=nn.CrossEntropyLoss()).evaluate(batches_of(data, *SIZES))

    assert set(seen) == {(False, False)}


# --- metrics ---------------------------------------------------------------------------------------------------------


def evaluate(model, data, metrics, **options):
    return Evaluator(training_step(model), metrics, **options).run(batches_of(data, *SIZES)).metrics


def right(outputs, targets):
    """A value for each sample."""
    return outputs.argmax(1) == targets


def hits(outputs, targets):
    """A float of Python's."""
    return float(right(outputs, targets).double().mean())


@pytest.mark.parametrize("metric", [accuracy, right, hits])
def test_values_of_a_callable_are_averaged_over_the_samples(metric, model, data):
    assert evaluate(model, data, metric) == {metric.__name__: pytest.approx(exact(model, data, accuracy), rel=1e-12)}


def test_torchmetrics_object_counts_for_itself(model, data):
    metric = MulticlassAccuracy(3, average="micro")

    found = evaluate(model, data, metric)

    assert found == {"MulticlassAccuracy": pytest.approx(exact(model, data, accuracy))}


def test_second_evaluation_begins_anew(model, data):
    evaluator = Evaluator(training_step(model), [accuracy, MulticlassAccuracy(3, average="micro")])
    evaluator.run(batches_of(labelled(9), 9))

    metrics = evaluator.run(batches_of(data, *SIZES)).metrics

    assert list(metrics.values()) == [pytest.approx(exact(model, data, accuracy))] * 2


def test_names_of_a_mapping_are_kept(model, data):
    assert evaluate(model, data, {"top": accuracy, "auroc": MulticlassAUROC(3)}).keys() == {"top", "auroc"}


def test_metrics_of_one_name_are_told_apart(model, data):
    found = evaluate(model, data, [lambda x, y: 1.0, lambda x, y: 2.0, accuracy])

    assert found == {"<lambda>": 1.0, "<lambda> 2": 2.0, "accuracy": pytest.approx(exact(model, data, accuracy))}


def test_collection_of_metrics_is_reported_by_name(model, data):
    collection = torchmetrics.MetricCollection({"micro": MulticlassAccuracy(3, average="micro")})

    found = evaluate(model, data, {"accuracy": collection})

    assert found == {"accuracy/micro": pytest.approx(exact(model, data, accuracy))}


def test_metric_of_a_mapping_batch_gets_the_batch():
    class Model(nn.Linear):
        def forward(self, inputs, labels):
            return {"loss": functional.cross_entropy(super().forward(inputs), labels), "logits": inputs}

    inputs, labels = labelled(6)
    batch = {"inputs": inputs, "labels": labels}
    seen = []

    Evaluator(training_step(Model(4, 3).double()), lambda outputs, given: seen.append((outputs, given)) or 0.0).run(
        [batch]
    )

    ((outputs, given),) = seen
    assert outputs["logits"] is inputs
    assert given.keys() == batch.keys()


@pytest.mark.parametrize("metric", ["accuracy", 3, [accuracy, None], {"top": "accuracy"}])
def test_what_is_no_metric_is_refused(metric, model):
    with pytest.raises(InvalidInputError, match=r"callable of \(outputs, targets\) or a torchmetrics object"):
        Evaluator(training_step(model), metric)


# --- memory ----------------------------------------------------------------------------------------------------------

WIDTH = 1000


class Wide(nn.Module):
    """Takes about 8 kB a sample while it runs, and next to nothing otherwise."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, inputs):
        wide = inputs.repeat(1, WIDTH // 4)
        return self.head(inputs) + 0 * (wide + wide).sum(1, keepdim=True)


def test_memory_that_runs_out_cuts_the_evaluation_and_not_the_training(data):
    model = Wide().double()
    memory = autoaccum.Simulated(5 * WIDTH * 8)
    events = []

    class Notes(autoaccum.Callback):
        def on_oom(self, event, *, step):
            events.append(event)

        def on_plan(self, plan, *, step, probe):
            events.append(plan)

    runner = runner_of(model, device=memory, callbacks=[Notes()])
    plan = runner.plan

    with memory.limited(None):
        found = runner.evaluate(batches_of(data, SAMPLES))

    assert found == pytest.approx(exact(model, data), rel=1e-12)
    assert runner.plan is plan
    assert (runner.oom_events, events) == (0, [])


def test_memory_that_runs_out_is_told_and_the_cut_kept_for_the_next_evaluation(data):
    model = Wide().double()
    memory = autoaccum.Simulated(5 * WIDTH * 8)
    events = []
    evaluator = Evaluator(training_step(model, memory=memory), accuracy, events.append)
    with memory.limited(None):
        first = evaluator.run([data])
    sizes = [event.size for event in events]
    events.clear()

    with memory.limited(None):
        second = evaluator.run([data])

    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == SAMPLES
    assert events == []
    assert (second.loss, second.metrics, second.samples) == (first.loss, first.metrics, first.samples)
    assert first.metrics["accuracy"] == pytest.approx(exact(model, data, accuracy), rel=1e-12)


def test_one_sample_that_does_not_fit_is_an_error_that_leaves_the_model(data):
    model = Wide().double()
    memory = autoaccum.Simulated(WIDTH * 8)
    runner = runner_of(model, device=memory)
    before = state_of(model)

    with memory.limited(None), pytest.raises(DoesNotFitError, match=r"a sample of shape.*in an evaluation"):
        runner.evaluate(batches_of(data, SAMPLES))

    assert_bitwise(state_of(model), before)


def running_out(metric, *, at):
    """A metric whose update number `at` counts and then runs out of memory."""
    update, calls = metric.update, []

    def failing(outputs, targets):
        calls.append(len(targets))
        update(outputs, targets)
        if len(calls) == at:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    metric.update = failing
    return metric


class Counter:
    """A metric as a user writes it."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right, self.seen, self.classes = 0, [], {}

    def update(self, outputs, targets):
        self.right += int(right(outputs, targets).sum())
        self.seen += targets.tolist()
        for target in targets.tolist():
            self.classes[target] = self.classes.get(target, 0) + 1

    def compute(self):
        return {"right": self.right, "seen": len(self.seen), "of class 0": self.classes[0]}


class Totals:
    """An object within a metric."""

    __slots__ = ("right", "seen")

    def __init__(self):
        self.right, self.seen = 0, []


class Nested(Counter):
    """A metric whose counts lie within other things."""

    def reset(self):
        self.by_class = {0: [], 1: [], 2: []}
        self.last = collections.deque(maxlen=1000)
        self.totals = Totals()
        self.sums = [torch.zeros(2), (np.zeros(2), [0])]
        self.counts = collections.defaultdict(collections.Counter)

    def update(self, outputs, targets):
        hits = right(outputs, targets)
        for target, hit in zip(targets.tolist(), hits.tolist(), strict=True):
            self.by_class[target].append(hit)
            self.counts[target]["seen"] += 1
        self.last.extend(targets.tolist())
        self.totals.right += int(hits.sum())
        self.totals.seen += targets.tolist()
        self.sums[0] += len(targets)
        self.sums[1][0][0] += len(targets)
        self.sums[1][1][0] += len(targets)

    def compute(self):
        return {
            "of class 0": len(self.by_class[0]),
            "last": len(self.last),
            "right": self.totals.right,
            "seen": len(self.totals.seen),
            "tensor": float(self.sums[0][1]),
            "array": self.sums[1][0][0],
            "number": self.sums[1][1][0],
            "counted": sum(self.counts[n]["seen"] for n in range(3)),
        }


class Running:
    """A callable that returns what it has counted so far."""

    def __init__(self):
        self.state = {"seen": []}

    def __call__(self, outputs, targets):
        self.state["seen"].append(len(targets))
        return sum(self.state["seen"])


METRICS = {
    "counts in tensors": lambda: MulticlassAccuracy(3),
    "matrix": lambda: torchmetrics.ClasswiseWrapper(MulticlassAccuracy(3, average=None)),
    "lists": lambda: MulticlassAUROC(3),
    "collection": lambda: torchmetrics.MetricCollection([MulticlassAccuracy(3), MulticlassAUROC(3)]),
    "groups": lambda: torchmetrics.MetricCollection(
        {"micro": MulticlassAccuracy(3, average="micro"), "macro": MulticlassAccuracy(3, average="macro")}
    ),
    "wrapper": lambda: torchmetrics.MinMaxMetric(MulticlassAccuracy(3)),
    "own": Counter,
    "nested": Nested,
}


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("make", METRICS.values(), ids=METRICS)
def test_metric_in_which_memory_ran_out_counts_no_sample_twice(make, at, model, data):
    expected = evaluate(model, data, {"it": make()})

    found = evaluate(model, data, {"it": running_out(make(), at=at)})

    assert found == expected


def test_callable_in_which_memory_ran_out_counts_no_sample_twice(model, data):
    calls = []

    def failing(outputs, targets):
        calls.append(len(targets))
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return accuracy(outputs, targets)

    evaluation = Evaluator(training_step(model), [accuracy, failing]).run(batches_of(data, *SIZES))

    assert calls == [4, 1, 7, 4, 3, 3]
    assert (
        evaluation.metrics["failing"] == evaluation.metrics["accuracy"] == pytest.approx(exact(model, data, accuracy))
    )
    assert evaluation.loss == pytest.approx(exact(model, data), rel=1e-12)


def test_callable_that_counts_for_itself_counts_no_sample_twice(model, data):
    calls = []

    class Failing(Running):
        def __call__(self, outputs, targets):
            calls.append(super().__call__(outputs, targets))
            if len(calls) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return calls[-1]

    running = Failing()

    evaluate(model, data, running)

    assert len(calls) > len(SIZES)
    assert sum(running.state["seen"]) == SAMPLES


@pytest.mark.parametrize("make", [Counter, Nested])
def test_metric_is_given_nothing_of_a_cut_whose_forward_pass_failed(make, data):
    """Also where nothing of it could be put back."""
    model, given = Wide().double(), []

    class Recording(make):
        def update(self, outputs, targets):
            given.append(len(targets))
            self.kind_that_is_not_known = object()
            super().update(outputs, targets)

    memory = autoaccum.Simulated("24KiB")
    with memory.limited(None):
        found = Evaluator(training_step(model, memory=memory), {"it": Recording()}).run([data, data])

    assert sum(given) == 2 * SAMPLES
    assert len(given) > 2
    assert found.metrics["it/seen"] == 2 * SAMPLES


class Unknown(Counter):
    """Holds something of which nobody knows what is in it."""

    def __init__(self):
        super().__init__()
        self.held = object()


class Gathering(Counter):
    """Gathers tensors, and writes to one of them."""

    def reset(self):
        super().reset()
        self.gathered = [torch.zeros(1) for _ in range(100)]

    def update(self, outputs, targets):
        super().update(outputs, targets)
        self.gathered[0] += 1


@pytest.mark.parametrize("make", [Unknown, Gathering])
def test_metric_that_cannot_be_put_back_ends_the_evaluation_and_says_so(make, model, data):
    with pytest.raises(DoesNotFitError, match=r"metric 'it', a .*, ran out of memory while it was counting"):
        evaluate(model, data, {"it": running_out(make(), at=2)})


@pytest.mark.parametrize("value", [None, "good", [0.5]])
def test_metric_that_returns_no_number_is_refused_by_its_name(value, model, data):
    with pytest.raises(InvalidInputError, match="metric 'it' returned "):
        evaluate(model, data, {"it": lambda outputs, targets: value})


def test_error_of_a_metric_arrives_as_it_is(model, data):
    def broken(outputs, targets):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate(model, data, broken)


def test_metric_that_gives_a_matrix_is_refused_by_its_name(model, data):
    with pytest.raises(InvalidInputError, match=r"'MulticlassConfusionMatrix'.*shape \(3, 3\)"):
        evaluate(model, data, MulticlassConfusionMatrix(3))


# --- a loss over the whole batch -------------------------------------------------------------------------------------


def against_each_other(outputs, targets):
    """Every sample of a batch stands against every other one."""
    same = (targets[:, None] == targets).to(outputs)
    return functional.binary_cross_entropy_with_logits(outputs @ outputs.T, same)


def of_batches(model, batches, loss=against_each_other):
    """The mean over the batches, weighed by their samples, of a loss that sees all of a batch."""
    total = sum(exact(model, batch, loss) * len(batch[1]) for batch in batches)
    return total / sum(len(batch[1]) for batch in batches)


@pytest.mark.parametrize("trained_size", [None, 2], ids=["whole batches", "cut"])
def test_loss_over_the_window_is_that_of_each_batch_of_the_loader(trained_size, model, data):
    metrics = [accuracy, MulticlassAccuracy(3, average="micro")]
    evaluator = Evaluator(training_step(model, against_each_other), metrics, loss_scope="window")

    found = evaluator.run(batches_of(data, *SIZES), trained_size=trained_size)

    assert found.loss == pytest.approx(of_batches(model, batches_of(data, *SIZES)), rel=1e-12)
    assert list(found.metrics.values()) == [pytest.approx(exact(model, data, accuracy))] * 2
    assert found.samples == SAMPLES


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: {"near": against_each_other(x, y) / 4, "far": against_each_other(x, y) * 3 / 4},
        lambda x, y: (against_each_other(x, y) * len(y), len(y)),
        lambda x, y: against_each_other(x, y).expand(len(y)),
    ],
    ids=["mapping", "pair", "vector"],
)
def test_loss_over_the_window_may_have_any_form(loss, model, data):
    evaluator = Evaluator(training_step(model, loss), loss_scope="window")

    found = evaluator.run(batches_of(data, *SIZES))

    assert found.loss == pytest.approx(of_batches(model, batches_of(data, *SIZES)), rel=1e-12)


def test_mean_over_targets_stays_weighed_by_them(sentences):
    model = Tagger().double()
    evaluator = Evaluator(training_step(model, nn.CrossEntropyLoss()), loss_scope="window")

    found = evaluator.run(batches_of(sentences, *SIZES))

    assert found.loss == pytest.approx(exact(model, sentences), rel=1e-12)


def test_memory_that_runs_out_cuts_the_forward_pass_and_not_the_loss(data):
    model, events, seen = Wide().double(), [], []
    memory = autoaccum.Simulated(5 * WIDTH * 8)

    def loss(outputs, targets):
        seen.append(len(outputs))
        return against_each_other(outputs, targets)

    evaluator = Evaluator(training_step(model, loss, memory=memory), accuracy, events.append, loss_scope="window")
    with memory.limited(None):
        found = evaluator.run([data])

    assert found.loss == pytest.approx(exact(model, data, against_each_other), rel=1e-12)
    assert found.metrics["accuracy"] == pytest.approx(exact(model, data, accuracy))
    assert seen == [SAMPLES]
    assert len(events) > 0


def test_representations_that_are_views_do_not_keep_what_they_are_views_of(data):
    class View(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs).repeat(1, WIDTH // 4)[:, :4]

    memory, events = autoaccum.Simulated(5 * WIDTH * 8), []
    evaluator = Evaluator(
        training_step(View(4, 4).double(), against_each_other, memory=memory), None, events.append, loss_scope="window"
    )

    with memory.limited(None):
        evaluator.run([data])

    # Four or five of the fifteen samples fit at once; kept views would soon leave room for one.
    assert min(event.size for event in events) > 4


def test_loss_over_the_window_that_does_not_fit_says_so(data):
    def greedy(outputs, targets):
        return outputs.mean() + outputs.new_zeros(10 * WIDTH).mean()

    memory, events = autoaccum.Simulated(5 * WIDTH * 8), []
    evaluator = Evaluator(
        training_step(Wide().double(), greedy, memory=memory), None, events.append, loss_scope="window"
    )

    with memory.limited(None), pytest.raises(DoesNotFitError, match=f"the loss over all {SAMPLES} samples"):
        evaluator.run([data])

    assert [event.size for event in events[-2:]] == [None, None]


def test_loss_over_the_window_leaves_the_model_as_it_was(model, data):
    evaluator = Evaluator(training_step(model, against_each_other), loss_scope="window")
    before = state_of(model)

    evaluator.run(batches_of(data, *SIZES))

    assert_bitwise(state_of(model), before)


def test_loss_over_the_window_has_to_take_outputs(model):
    with pytest.raises(InvalidInputError, match="loss_scope='window' takes one loss"):
        Evaluator(training_step(model), loss_scope="window")


class Drawing(nn.Module):
    """Draws, in evaluation too, from generators that it holds; a model and a loss."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))
        self.of_torch = torch.Generator().manual_seed(1)
        self.of_python = random.Random(1)  # noqa: S311 - no secret
        self.of_numpy = np.random.default_rng(1)

    def forward(self, *given):
        noise = torch.rand((), generator=self.of_torch) + self.of_python.random() + self.of_numpy.random()
        if len(given) > 1:
            return nn.functional.cross_entropy(*given) + 0.0 * noise
        return given[0] @ (self.weight + noise).double() + torch.rand(())

    def states(self):
        return [
            self.of_torch.get_state().tolist(),
            self.of_python.getstate(),
            self.of_numpy.bit_generator.state,
            torch.get_rng_state().tolist(),
        ]


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "failing"])
@pytest.mark.parametrize("of", ["model", "loss"])
def test_evaluation_of_a_runner_leaves_the_generators_that_modules_hold(data, of, fails):
    model, loss = (Drawing(), nn.CrossEntropyLoss()) if of == "model" else (nn.Linear(4, 3).double(), Drawing())
    drawing = model if of == "model" else loss
    runner = autoaccum.Runner(model, torch.optim.SGD(model.parameters()), autoaccum.plan(4, 3), loss=loss, device="cpu")
    before = drawing.states()

    def batches():
        yield from batches_of(data, *SIZES)
        if fails:
            raise LookupError

    with pytest.raises(LookupError) if fails else contextlib.nullcontext():
        runner.evaluate(batches())

    assert drawing.states() == before
