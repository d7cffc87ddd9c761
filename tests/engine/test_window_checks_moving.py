"""Layers that move in every forward pass are named once; the remedies of docs/losses.md are exact."""

import re
import warnings
from collections import Counter, defaultdict

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.utils import spectral_norm

import autoaccum
from autoaccum.errors import InvalidInputError, LossWarning

WIDTH = 4


def a_batch(samples=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, WIDTH, generator=generator).double(), torch.zeros(samples, WIDTH).double()


def warned_of(model, *, sizes=3, windows=3, **options):
    """What is warned of, in Python and in the reports, which say the same."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LossWarning)
        runner = autoaccum.Runner(
            model.double(), None, autoaccum.plan(12, 12 // sizes), device="cpu", precision="fp32", **options
        )
        reported = [text for _ in range(windows) for text in runner.step(a_batch()).warnings]
    assert [str(one.message) for one in caught] == [f"autoaccum: {text}" for text in reported]
    return reported


def said_of(*layers, **options):
    said = warned_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers), **options)
    return [text for text in said if text.startswith("forward() moves")]


class Moco(nn.Module):
    """An encoder, its momentum copy, and a queue of keys."""

    def __init__(self):
        super().__init__()
        self.encoder, self.slow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("queue", torch.randn(24, WIDTH))

    def forward(self, inputs):
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.encoder.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            self.queue = torch.cat([self.queue, self.slow(inputs)])[-24:]
        return self.encoder(inputs)


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("embed_avg", torch.ones(WIDTH))

    def forward(self, inputs):
        self.embed_avg.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
        return inputs + self.embed_avg


class Stays(nn.Module):
    """Its buffers are written and stay what they are, or stay NaN."""

    def __init__(self):
        super().__init__()
        self.register_buffer("same", torch.ones(3))
        self.register_buffer("undefined", torch.full((3,), torch.nan))

    def forward(self, inputs):
        self.same.mul_(1.0)
        self.undefined.mul_(2.0)
        return inputs


class Counted(nn.Module):
    """Counts in a metric, which is meant to move."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)

    def forward(self, inputs):
        self.accuracy(inputs[:, :2], torch.zeros(len(inputs), dtype=torch.long))
        return inputs


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (Codebook, ["1.embed_avg"]),
        (Moco, ["1.queue", "1.slow.bias", "1.slow.weight"]),
        (lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)), ["1.weight_u", "1.weight_v"]),
    ],
    ids=["codebook", "momentum encoder and queue", "spectral norm"],
)
@pytest.mark.parametrize("options", [{}, {"loss": nn.MSELoss(), "loss_scope": "window"}], ids=["usual", "window loss"])
def test_what_forward_moves_is_named_once(layer, names, options):
    (text,) = said_of(layer(), **options)

    moved = re.match(r"forward\(\) moves (.*?): once for each micro-batch, not once an optimizer step", text)
    assert moved[1].split(", ") == names


@pytest.mark.parametrize(
    "layer", [Stays(), nn.Dropout(), nn.BatchNorm1d(WIDTH), Counted()], ids=lambda it: type(it).__name__
)
def test_what_stays_the_same_or_is_meant_to_move_is_not_spoken_of(layer):
    assert said_of(layer) == []


class Carries(nn.Module):
    """Subtracts what it keeps of earlier calls: in a buffer, a tensor, a list or a number that is no buffer."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, WIDTH), kind
        if kind == "buffer":
            self.register_buffer("kept", torch.zeros(WIDTH))
        else:
            self.kept = {"tensor": torch.zeros(WIDTH), "in place": torch.zeros(WIDTH), "list": [], "number": 0.0}[kind]

    def forward(self, inputs):
        outputs = self.layer(inputs)
        mean = outputs.detach().mean(0)
        if self.kind == "list":
            centred = outputs - sum(self.kept)
            self.kept.append(0.1 * mean)
        else:
            centred = outputs - self.kept
            if self.kind == "in place":
                self.kept.mul_(0.9).add_(mean, alpha=0.1)
            else:
                self.kept = 0.9 * self.kept + 0.1 * (float(mean.sum()) if self.kind == "number" else mean)
        return centred


KINDS = ["buffer", "tensor", "in place", "list", "number"]


class Hidden(nn.Module):
    """Goes on from the state of the last call, if that had as many samples."""

    def __init__(self):
        super().__init__()
        self.layer, self.state = nn.GRU(1, WIDTH, batch_first=True), None

    def forward(self, inputs):
        state = self.state if self.state is not None and self.state.shape[1] == len(inputs) else None
        outputs, state = self.layer(inputs[:, :, None], state)
        self.state = state.detach()
        return outputs[:, -1]


@pytest.mark.parametrize("loss", [None, lambda outputs, targets: (outputs - targets).square().mean()])
@pytest.mark.parametrize("kind", KINDS)
def test_state_that_a_model_carries_from_call_to_call_is_named_and_is_no_comparison_of_samples(kind, loss):
    (text,) = warned_of(Carries(kind), loss=loss)

    assert text.startswith("forward() moves kept: once for each micro-batch")


def test_hidden_state_that_is_carried_is_told_as_that():
    first, *others = warned_of(Hidden(), windows=9)

    assert first.startswith("forward() moves state: once for each micro-batch")
    assert all(text.startswith("the model's outputs depend on state that forward() carries") for text in others)


def test_comparison_of_samples_by_way_of_state_is_told_as_state_with_any_loss():
    first, second = warned_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Codebook()))

    assert first.startswith("the model's outputs depend on state that forward() carries")
    assert second.startswith("forward() moves 1.embed_avg")
    with pytest.raises(
        InvalidInputError, match=r"called again for all, it is .*: it depends on state that forward\(\)"
    ):
        warned_of(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), Codebook()),
            loss=lambda outputs, targets: (outputs - targets).square().mean(),
        )


def test_model_that_compares_samples_is_told_as_that_whatever_it_counts():
    class Centres(nn.Linear):
        calls = 0

        def forward(self, inputs):
            self.calls += 1
            self.last = super().forward(inputs)
            return self.last - self.last.mean(0)

    (text,) = warned_of(Centres(WIDTH, WIDTH))

    assert text.startswith("the model's outputs for a sample depend on the others of its micro-batch")


def test_what_is_kept_to_be_looked_at_and_never_read_is_not_spoken_of():
    class Kept(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.all, self.by_name = [], {}

        def forward(self, inputs):
            self.last = super().forward(inputs)
            self.all.append(self.last.detach())
            self.by_name["last"] = self.last
            return self.last

    assert warned_of(Kept(WIDTH, WIDTH)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_checks_leave_what_a_model_keeps_as_attributes_as_it_was(kind):
    torch.manual_seed(0)
    checked = Carries(kind)
    torch.manual_seed(0)
    stated = Carries(kind)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossWarning)
        for model, options in ((checked, {}), (stated, {"loss_reduction": "mean"})):
            warned_of(model, **options)

    assert repr(checked.kept) == repr(stated.kept)


class Counts(nn.Module):
    """Counts its calls somewhere, and reads the number."""

    def __init__(self, make, add):
        super().__init__()
        self.layer, self.add = nn.Linear(WIDTH, WIDTH), add
        self.kept = make()

    def forward(self, inputs):
        self.add(self)
        return self.layer(inputs)


class CountsInBuffer(Counts):
    """Counts in a large buffer of whole numbers."""

    def __init__(self):
        super().__init__(lambda: None, lambda self: self.count.add_(1))
        self.register_buffer("count", torch.zeros(70_000, dtype=torch.long))


def replace(self):
    hidden, cell = self.kept
    self.kept = (hidden + 1, cell + 1)


def again():
    held = [0]
    held.append(held)
    return held


COUNTS = {
    "large buffer of whole numbers": CountsInBuffer,
    "large tensor": lambda: Counts(lambda: torch.zeros(70_000), lambda self: self.kept.add_(1)),
    "list in a dict": lambda: Counts(lambda: {"a": [0]}, lambda self: self.kept["a"].append(1)),
    "dict in a list": lambda: Counts(lambda: [{"a": 0}], lambda self: self.kept[0].update(a=self.kept[0]["a"] + 1)),
    "tensor in a dict": lambda: Counts(lambda: {"a": torch.zeros(3)}, lambda self: self.kept["a"].add_(1)),
    "tuple": lambda: Counts(lambda: (torch.zeros(3), torch.zeros(3)), replace),
    "tensor in a tuple": lambda: Counts(lambda: (torch.zeros(3), 1), lambda self: self.kept[0].add_(1)),
    "defaultdict": lambda: Counts(lambda: defaultdict(list), lambda self: self.kept["a"].append(1)),
    "Counter": lambda: Counts(Counter, lambda self: self.kept.update(a=1)),
    "list that holds itself": lambda: Counts(again, lambda self: self.kept[1].append(1)),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_checks_leave_what_a_model_counts_anywhere_in_its_attributes_as_it_was(kind):
    checked, stated = COUNTS[kind](), COUNTS[kind]()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossWarning)
        for model, options in ((checked, {}), (stated, {"loss_reduction": "mean"})):
            warned_of(model, loss=lambda outputs, targets: (outputs - targets).square().mean(), **options)

    assert repr(checked.kept) == repr(stated.kept)
    assert repr(list(checked.buffers())) == repr(list(stated.buffers()))


@pytest.mark.parametrize("kind", KINDS)
def test_window_of_one_micro_batch_is_not_spoken_of(kind):
    assert warned_of(Carries(kind), sizes=1) == []


class Centred(nn.Module):
    """A loss that moves a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, outputs, targets):
        value = (outputs - targets + self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
        return value


def test_loss_that_moves_is_warned_of_by_fit_and_accumulator_alike():
    with pytest.warns(LossWarning, match=r"forward\(\) moves center"):
        result = autoaccum.fit(
            nn.Linear(WIDTH, WIDTH).double(), [a_batch()], 12, loss=Centred(), micro_batch=4, progress=False,
            device="cpu",
        )  # fmt: skip
    accumulator = autoaccum.Accumulator(nn.Linear(WIDTH, WIDTH).double(), loss=Centred(), micro_batch=4, device="cpu")
    with pytest.warns(LossWarning, match=r"forward\(\) moves center"):
        report = accumulator.backward(a_batch())

    (text,) = result.warnings
    assert text.startswith("forward() moves center")
    assert report.warnings == (text,)


class Average:
    """A moving average, as many a library keeps it beside the modules."""

    calls = 0

    def __init__(self):
        self.value = torch.zeros(WIDTH).double()

    def update(self, outputs):
        Average.calls += 1
        self.value = 0.9 * self.value + 0.1 * outputs.detach().mean(0)


def in_an_object(average):
    return lambda outputs: average.update(outputs) or outputs - average.value


def in_a_closure(_):
    calls = [0]

    def layer(outputs):
        calls[0] += 1
        return outputs * (1 + 0.1 * calls[0])

    return layer


def in_a_class(average):
    return lambda outputs: average.update(outputs) or outputs * (1 + 0.1 * Average.calls)


class Applies(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, inputs):
        return self.function(self.linear(inputs))


@pytest.mark.parametrize("loss", [None, lambda outputs, targets: (outputs - targets).square().mean()])
@pytest.mark.parametrize("kept", [in_an_object, in_a_closure, in_a_class])
def test_state_that_no_module_holds_is_warned_of(kept, loss):
    told = warned_of(Applies(kept(Average())), loss=loss)

    assert any("differs from pass to pass" in text for text in told)


@pytest.mark.parametrize("loss", [None, lambda outputs, targets: (outputs - targets).square().mean()])
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.RReLU(), nn.BatchNorm1d(WIDTH), nn.Tanh(), Applies(torch.sin)])
def test_layers_that_keep_nothing_elsewhere_are_not_warned_of(layer, loss):
    assert warned_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer), loss=loss) == []
