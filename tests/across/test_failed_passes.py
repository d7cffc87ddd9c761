"""A pass that fails: what it wrote, counted and changed is put back, or told of."""

import dataclasses

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional

import autoaccum
from support.faults.places import Fault
from support.models.small import runner_of


@pytest.fixture
def lack():
    return Fault()


def window(samples=8, features=4, seed=0):
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(samples, features, generator=chance), torch.randint(0, 3, (samples,), generator=chance)


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


# --- what it does to its inputs ---------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """Normalises its input in place, as a careless transform does; no more than `most` samples fit."""

    def __init__(self, most):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.most = nn.Linear(6, 3), most

    def forward(self, inputs):
        inputs.sub_(0.5).div_(0.25)
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.head(inputs)


def in_place_runner(most, **options):
    model = InPlace(most)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, runner_of(model, optimizer, 12, 12, **options)


class Views:
    """A split of one's own whose parts are views of the batch, within tuples or graphs."""

    def __init__(self, made=None):
        self.made = made

    def count(self, batch):
        return len(batch[0])

    def cut(self, batch, sizes):
        return list(zip(*(part.split(list(sizes)) for part in batch), strict=True))

    def join(self, batches):
        inputs, targets = batches[0] if len(batches) == 1 else map(torch.cat, zip(*batches, strict=True))
        return (inputs if self.made is None else self.made(inputs)), targets


class Graph:
    """Holds a tensor, and moves as a graph does: it is itself where its tensors stay."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)
        return self


@dataclasses.dataclass
class Record:
    x: torch.Tensor


def of_object(model, batch):
    return model(batch[0].x)


KINDS_OF_INPUTS = {
    "tensors": {},
    "a split's views": {"split": Views()},
    "objects": {"split": Views(Graph), "forward": of_object},
    "dataclasses": {"split": Views(Record), "forward": of_object},
}


@pytest.mark.parametrize("options", KINDS_OF_INPUTS.values(), ids=KINDS_OF_INPUTS)
def test_model_that_changes_its_input_is_given_copies_once_that_is_seen(options):
    model, runner = in_place_runner(12, **options)
    inputs, targets = torch.rand(12, 6), torch.randint(0, 3, (12,))
    runner.step((inputs.clone(), targets))
    model.most = 5
    given = inputs.clone()

    report = runner.step((given, targets))

    assert report.micro_batches == (4, 4, 4)
    assert torch.equal(given, inputs)


@pytest.mark.parametrize("options", KINDS_OF_INPUTS.values(), ids=KINDS_OF_INPUTS)
def test_model_that_changes_its_input_gets_copies_in_both_passes_for_a_loss_over_the_window(options):
    given = torch.rand(12, 6)
    before, targets = given.clone(), torch.randint(0, 3, (12,))
    optimizer = torch.optim.SGD((model := InPlace(12)).parameters(), lr=0.1)

    report = runner_of(model, optimizer, 12, 4, loss_scope="window", **options).step((given, targets))

    assert report.micro_batches == (4, 4, 4)
    assert torch.equal(given, before)


def test_window_whose_data_the_model_has_changed_is_not_silently_done_again():
    _, runner = in_place_runner(5)

    with pytest.raises(autoaccum.InvalidInputError, match="changed its input in place"):
        runner.step((torch.rand(12, 6), torch.randint(0, 3, (12,))))


def test_window_whose_data_the_model_has_changed_does_not_run_again_where_weights_were_predicted_wrong():
    class Doubles(nn.Linear):
        def forward(self, batch):
            return super().forward(batch["x"].mul_(2))

    def loss(outputs, batch):
        kept = batch["kept"][:, 0, 0]  # which 8 samples do not tell from all
        return (outputs.square().mean(1) * kept).sum() / kept.sum() + outputs.abs().mean()

    model, kept = Doubles(4, 3), torch.ones(64, 1, 1)
    kept[[3, 5, 11, 17, 22, 23, 24, 35]] = 0
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model.weight.detach().clone()
    runner = autoaccum.Runner(
        model, optimizer, autoaccum.plan(64, 16), loss=loss, forward=lambda model, batch: model(batch), device="cpu"
    )

    with pytest.raises(autoaccum.InvalidInputError, match="changed its input in place"):
        runner.step({"x": torch.rand(64, 4), "kept": kept})

    assert torch.equal(model.weight, before)
