"""What a window promises beside its gradient: what is put back, what is refused and how, what is counted once."""

import inspect
import re
import textwrap

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional
from transformers import BatchEncoding

import autoaccum
from support.faults.modes import differences, state_of
from support.faults.places import Fault
from support.models.small import runner_of

LINES = 3  # the most that an error takes, at 120 characters


@pytest.fixture
def lack():
    return Fault()


def window(samples=8, features=4, seed=0):
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(samples, features, generator=chance), torch.randint(0, 3, (samples,), generator=chance)


def assert_short(error):
    lines = textwrap.wrap(str(error), 120)
    assert len(lines) <= LINES, lines


# --- what a model writes in its forward pass --------------------------------------------------------------------------


class Counts(nn.Module):
    """Adds 1 to a tensor of its own in each forward pass, through `.data` as the usual codebooks do."""

    def __init__(self, kind, shape, lack):
        super().__init__()
        self.head, self.fails = nn.Linear(4, 3), lack
        self.is_still, self.is_unseen, self.replaces = False, "in place" not in kind, "new data" in kind
        if kind == "buffer":
            self.register_buffer("counted", torch.zeros(shape))
        elif kind.startswith("frozen parameter"):
            self.counted = nn.Parameter(torch.zeros(shape), requires_grad=False)
        else:
            self.register_buffer("counted", torch.zeros(shape, dtype=torch.int8))

    def forward(self, inputs):
        if not self.is_still and self.replaces:
            self.counted.data = self.counted.data + 1
        elif not self.is_still:
            (self.counted.data if self.is_unseen else self.counted).mul_(1).add_(1)
        self.fails()
        return self.head(inputs)


LARGE, SMALL = (256, 1024), (3, 3)
KINDS = ("buffer", "frozen parameter", "frozen parameter, in place", "frozen parameter, new data")
MOVES = [(kind, shape, before) for kind in KINDS for shape in (SMALL, LARGE) for before in (0, 9)]


@pytest.mark.parametrize("error", [None, ValueError("mine")], ids=["memory", "another error"])
@pytest.mark.parametrize(("kind", "shape", "before"), MOVES)
def test_failure_takes_back_what_the_failed_pass_wrote_and_no_more(kind, shape, before, error, lack):
    model, made = Counts(kind, shape, lack), 0
    runner = runner_of(model)
    for _ in range(before):
        runner.step(window())
    lack.arm(0, error=error)

    if error is None:
        made = len(runner.step(window()).micro_batches)
    else:
        with pytest.raises(ValueError, match="mine"):
            runner.step(window())

    assert lack.hits == 1
    assert model.counted.min().item() == model.counted.max().item() == before + made


CHANGES = {
    "assigned": lambda module: setattr(module, "seen", module.seen + 1),
    "written through a view": lambda module: module.seen[:2].fill_(3.0),
    "added to": lambda module: module.seen.add_(1),
    "resized": lambda module: module.seen.resize_(2 * module.seen.numel()).fill_(7.0),
    "shrunk": lambda module: module.seen.resize_(2).fill_(7.0),
    "emptied": lambda module: setattr(module, "seen", None),
    "removed": lambda module: delattr(module, "seen"),
    "added": lambda module: module.register_buffer("new", torch.ones(2)),
    "there at last": lambda module: setattr(module, "absent", torch.ones(2)),
}


class Changes(nn.Module):
    def __init__(self, change, elements, lack):
        super().__init__()
        self.register_buffer("seen", torch.zeros(elements))
        self.register_buffer("absent", None)
        self.head, self.change, self.fails = nn.Linear(4, 3), change, lack

    def forward(self, inputs):
        self.change(self)
        self.fails()
        return self.head(inputs)


@pytest.mark.parametrize("elements", [9, 70_000], ids=["small", "large"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_buffers_that_a_failed_pass_has_changed_in_any_way_are_as_before(change, elements, lack):
    model = Changes(change, elements, lack)
    runner, seen = runner_of(model), model.seen
    lack.arm(0, error=ValueError("mine"))

    with pytest.raises(ValueError, match="mine"):
        runner.step(window())

    assert model.seen is seen
    assert torch.equal(model.seen, torch.zeros(elements))
    assert (model.absent, [*dict(model.named_buffers())]) == (None, ["seen"])


def assert_put_back_or_told(train, name):
    """Either what is off by is 0 afterwards, or damage was told of, by name; never neither."""
    off, told = None, None
    try:
        off = train()
    except autoaccum.StateDamagedError as error:
        told = str(error)
    assert name in told if off is None else not off.any()


@pytest.mark.parametrize(
    ("kind", "before", "is_late"),
    [("quantised", 0, False), ("quantised", 2, False), ("buffer", 5, True), ("frozen parameter", 5, True)],
)
def test_large_tensors_that_are_not_copied_are_put_back_or_told_of_when_they_move(kind, before, is_late, lack):
    model = Counts(kind, LARGE, lack)
    runner, model.is_still, model.is_unseen = runner_of(model), is_late, not is_late
    for _ in range(before):
        runner.step(window())
    moved, model.is_still = model.counted.clone(), False
    lack.arm(0)

    def train():
        passes = len(runner.step(window()).micro_batches)
        return model.counted.sub(moved + passes)

    assert_put_back_or_told(train, "counted")


class Lazy(nn.Module):
    """Makes its codebook from the first batch that it sees, as an initialisation that depends on data does."""

    def __init__(self, how, lack):
        super().__init__()
        self.head, self.how, self.is_made = nn.Linear(4, 3), how, False
        self.fails = lack
        if how == "None":
            self.register_buffer("codes", None)

    def forward(self, inputs):
        if self.codes is None if self.how == "None" else not self.is_made:
            self.register_buffer("codes", inputs.mean(0))
            self.is_made = True
        self.fails()
        return self.head(inputs - self.codes)


@pytest.mark.filterwarnings("ignore:autoaccum. the model.s outputs for a sample depend on the others")
@pytest.mark.parametrize("how", ["None", "registered, and noted in an attribute"])
def test_buffer_that_is_made_in_the_failing_pass_is_made_again_or_told_of(how, lack):
    model = Lazy(how, lack)
    runner = runner_of(model)
    lack.arm(0)

    def train():
        first = runner.step(window()).micro_batches[0]
        return model.codes - window()[0][:first].mean(0)

    assert_put_back_or_told(train, "codes")


@pytest.mark.parametrize("before", [0, 2])
def test_pass_that_fails_after_an_optimizer_stepped_in_it_is_told_as_damage_and_not_repeated(before, lack):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    own = torch.optim.SGD(model[1].parameters(), 0.1, 0.9)

    def step(parameter):
        own.step()
        parameter.grad = None

    model[1].bias.register_post_accumulate_grad_hook(step)
    model[0].weight.register_hook(lack)
    runner = runner_of(model, optimizer=torch.optim.SGD(model[0].parameters(), 0.1))
    for _ in range(before):
        runner.step(window())
    lack.arm(0)

    with pytest.raises(autoaccum.StateDamagedError, match=r"1\.(bias|weight)"):
        runner.step(window())

    assert (lack.passed, lack.hits) == (1, 1)


# --- the optimizer's step ---------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.used = nn.Linear(4, 8), "one"
        self.heads = nn.ModuleDict({"one": nn.Linear(8, 3), "other": nn.Linear(8, 3)})

    def forward(self, inputs):
        return self.heads[self.used](self.body(inputs))


def two_heads():
    model = TwoHeads()
    groups = [{"params": part.parameters()} for part in (model.body, *model.heads.values())]
    return model, runner_of(model, optimizer=torch.optim.Adam(groups, 0.1, foreach=False))


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, ValueError])
def test_step_that_makes_state_for_another_head_is_undone_when_it_fails(kind, lack, monkeypatch):
    (model, runner), (undisturbed, other) = two_heads(), two_heads()
    for _ in range(3):
        runner.step(window())
        other.step(window())
    model.used = undisturbed.used = "other"
    before = state_of(model, runner.optimizer)
    make = torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda *args, **options: lack() or make(*args, **options))
    lack.arm(1, error=kind("CUDA out of memory."))

    if kind is ValueError:
        with pytest.raises(ValueError, match="CUDA"):
            runner.step(window())
        assert differences(state_of(model, runner.optimizer), before) == []
    runner.step(window())
    monkeypatch.undo()
    other.step(window())

    assert lack.hits == 1
    assert differences(state_of(model, runner.optimizer), state_of(undisturbed, other.optimizer)) == []


def test_infinite_norm_to_clip_to_measures_and_never_multiplies():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].bias.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    runner = runner_of(model, clip_grad_norm=torch.inf)

    report = runner.step(window())

    assert report.grad_norm == torch.inf
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert all(model[1].weight.isfinite().flatten())


# --- what is counted once ---------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts the samples that it is trained on in metrics: a sum, and a list."""

    def __init__(self, lack):
        super().__init__()
        self.head, self.seen, self.each = nn.Linear(4, 3), torchmetrics.SumMetric(), torchmetrics.CatMetric()
        self.held = torchmetrics.MetricCollection([self.each])
        self.fails = lack

    def forward(self, inputs):
        self.seen.update(torch.ones(len(inputs)))
        self.held(torch.ones(len(inputs)))
        self.fails()
        return self.head(inputs)


def counting_loss(lack):
    metric = torchmetrics.SumMetric()

    def loss(outputs, targets):
        metric.update(torch.ones(len(targets)))
        lack()
        return functional.cross_entropy(outputs, targets)

    return loss, metric


@pytest.mark.parametrize("held", ["by the closure", "by the model"])
def test_metric_counts_each_sample_of_an_accumulator_once(held, lack):
    metric, model = torchmetrics.SumMetric(), nn.Linear(4, 3)
    if held == "by the model":
        model = Counting(lack)
        metric = model.seen

    def closure(batch):
        inputs, targets = batch
        if held == "by the closure":
            metric.update(torch.ones(len(targets)))
            lack()
        return functional.cross_entropy(model(inputs), targets)

    accumulator = autoaccum.Accumulator(model, closure=closure, device=autoaccum.Simulated("1MiB"))
    for number in range(4):
        lack.arm(*[0] * (number > 0))
        accumulator.backward(window(13))

    assert lack.hits == 1
    assert metric.compute() == 4 * 13


@pytest.mark.parametrize("held", ["by the loss", "by the model"])
def test_metric_counts_each_sample_of_fit_once(held, lack):
    loss, metric = counting_loss(lack)
    model = nn.Linear(4, 3)
    if held == "by the model":
        model, loss = Counting(lack), functional.cross_entropy
        metric = model.seen
    lack.arm(3, 8, 15)
    batches = [window(13, seed=seed) for seed in range(4)]

    result = autoaccum.fit(model, batches, 13, loss=loss, epochs=1, device=autoaccum.Simulated("1MiB"), progress=False)

    assert lack.hits > 0
    assert (result.steps, metric.compute()) == (4, 4 * 13)
    assert metric.update_count == sum(len(report.micro_batches) for report in result.history)
    if held == "by the model":
        assert (len(model.each.compute()), model.each.update_count) == (4 * 13, metric.update_count)


# --- what is refused, and in which words ------------------------------------------------------------------------------


class Experts(nn.Module):
    """Leaves a term of its loss as an attribute, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.router, self.head, self.auxiliary_loss = nn.Linear(4, 2), nn.Linear(4, 3), None

    def forward(self, inputs):
        shares = self.router(inputs).softmax(1)
        self.auxiliary_loss = shares.mean(0).square().sum()
        return self.head(inputs) * shares[:, :1]


def of_window(model, loss, micro_batch=4):
    return runner_of(model, micro_batch=micro_batch, loss=loss, loss_scope="window")


def test_loss_over_the_window_that_reads_a_term_off_the_model_is_refused():
    model = Experts()
    runner = of_window(
        model, lambda outputs, targets: functional.cross_entropy(outputs, targets) + model.auxiliary_loss
    )
    before = state_of(model, runner.optimizer)

    with pytest.raises(autoaccum.InvalidInputError, match=r"return .*outputs") as caught:
        runner.step(window())

    assert_short(caught.value)
    assert differences(state_of(model, runner.optimizer), before) == []


def test_loss_over_the_window_that_is_given_the_term_with_the_outputs_has_its_whole_gradient():
    class Returning(Experts):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            return outputs, self.router(inputs).softmax(1)

    torch.manual_seed(0)
    model = Returning()

    def loss(outputs, targets):
        return functional.cross_entropy(outputs[0], targets) + outputs[1].mean(0).square().sum()

    loss(model(window()[0]), window()[1]).backward()
    expected = [parameter.detach() - 0.1 * parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    of_window(model, loss).step(window())

    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value)


def with_runner(model, batch, **options):
    runner_of(model, micro_batch=4, **options).step(batch)


def with_fit(model, batch, **options):
    autoaccum.fit(model, [batch], 8, epochs=1, device="cpu", progress=False, **options)


def with_accumulator(model, batch, **options):
    autoaccum.Accumulator(model, device="cpu", **options).backward(batch)


ENTRIES = {with_runner: autoaccum.Runner, with_fit: autoaccum.fit, with_accumulator: autoaccum.Accumulator}


class TooLarge(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


@pytest.mark.parametrize("entry", ENTRIES)
def test_sample_that_does_not_fit_is_named_with_its_shape_and_remedies_of_what_was_called(entry):
    with pytest.raises(autoaccum.DoesNotFitError) as caught:
        entry(TooLarge(), (torch.randn(8, 5, 7), torch.zeros(8).long()), loss=nn.CrossEntropyLoss())

    said = str(caught.value)
    assert "5, 7" in said
    assert not re.search(r"[KMG]iB (are )?free", said)  # the memory that is free is not to blame
    assert {*re.findall(r"(\w+)=", said)} <= {*inspect.signature(ENTRIES[entry]).parameters}


def test_sample_that_fitted_before_may_fail_twice_in_a_row(lack):
    model = nn.Linear(4, 3)
    model.register_forward_pre_hook(lack)
    runner = runner_of(model, micro_batch=1)
    for _ in range(5):  # the sixth makes no checks, so that each call is a sample's
        runner.step(window())
    lack.arm(2, 5, 8)  # the third sample, each time the window begins again

    report = runner.step(window())

    assert (lack.hits, report.oom_events) == (3, 3)


def test_sample_of_an_evaluation_may_fail_twice_in_a_row(lack):
    model = nn.Linear(4, 3)
    runner = runner_of(model)
    expected = runner.evaluate([window(2)])
    model.register_forward_pre_hook(lack)
    lack.arm(0, 1, 2)  # both samples at once, then the first alone

    found = runner.evaluate([window(2)])

    assert lack.hits == 3
    assert found == pytest.approx(expected, rel=1e-6)


def test_metric_that_writes_into_outputs_leaves_a_loss_over_the_window_as_it_is():
    batch, losses = window(6), []
    for metric in (lambda outputs, targets: 0.0, lambda outputs, targets: outputs.zero_().sum()):
        torch.manual_seed(1)
        model = nn.Linear(4, 3)
        result = autoaccum.fit(
            model, [batch], 6, loss=functional.cross_entropy, loss_scope="window", val_loader=[batch],
            metrics={"m": metric}, max_steps=1, progress=False,
        )  # fmt: skip
        losses.append(result.evaluations[-1].loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("micro_batch", [6, 3])
def test_loss_over_the_window_reads_items_of_a_batch_encoding_as_attributes(micro_batch):
    model, (inputs, _) = nn.Linear(4, 5), window(6)
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        autoaccum.plan(6, micro_batch),
        loss=lambda outputs, batch: functional.cross_entropy(outputs @ outputs.T, batch.y),
        loss_scope="window",
        forward=lambda model, batch: model(batch["x"]),
    )
    outputs = model(inputs)
    expected = functional.cross_entropy(outputs @ outputs.T, torch.arange(6))
    assert float(runner.step(BatchEncoding({"x": inputs, "y": torch.arange(6)})).loss) == pytest.approx(expected.item())
