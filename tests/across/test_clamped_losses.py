"""No loss that is divided by max(k, n) trains silently wrong, whatever else the batch counts."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from support.losses.forms import Form
from support.losses.outcomes import by_runner, outcome

N, WINDOWS = 8, 9
OTHERS = {
    "none": None,
    "a mean": lambda o, b, mask, least: o.square().mean(),
    "a mean over the same": lambda o, b, mask, least: (o[:, 1].abs() * b[mask]).sum() / b[mask].sum().clamp(min=least),
    "a mean over b": lambda o, b, mask, least: (o[:, 1].abs() * b["b"]).sum() / b["b"].sum().clamp(min=1),
    "a sum": lambda o, b, mask, least: o.abs().sum() * 0.01,
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@dataclass(frozen=True)
class Clamped:
    """A mean over what a mask of the batch keeps, at least so many of them, beside another mask.

    Attributes:
        kept: The part of samples that both masks keep.
        differ: The part of samples of which one of them is other than the other.
        least: The k of max(k, n); 0 for n itself.
        times: What that is multiplied by. (What 2 * max(2, n) divides by is told only once n was more than 4.)
        factor: What the loss is multiplied by; None for another number in each window.
        mask: The mask that counts.
        other: What is added.
        is_named: Whether it is a loss of its own.
        is_split: Whether windows are lists of samples, which a split joins.
        is_real: Whether the masks are real numbers.
    """

    kept: float
    differ: float
    least: int
    times: int
    factor: float | None
    mask: str
    other: str
    is_named: bool
    is_split: bool
    is_real: bool
    dtype: torch.dtype
    cut: tuple[int, ...]

    def windows(self, seed):
        chance, found = torch.Generator().manual_seed(seed), []
        for _ in range(WINDOWS):
            a = torch.rand(N, generator=chance) < self.kept
            b = a ^ (torch.rand(N, generator=chance) < self.differ)
            x = torch.randn(N, 7, generator=chance, dtype=torch.float64)
            masks = (a.double(), b.double()) if self.is_real else (a.double(), b.long())
            found.append({"x": x[:, :4], "z": x[:, 4:], "a": masks[0], "b": masks[1]})
        return found

    def loss(self, window):
        """Return the loss of a window, whose number `window` returns."""

        def loss(o, b):
            factor = 1 + 0.1 * window() if self.factor is None else self.factor
            n = self.times * b[self.mask].sum().clamp(min=self.least)
            value = factor * ((o - b["z"]).square().mean(1) * b[self.mask]).sum() / n
            if self.other == "none":
                return value
            other = OTHERS[self.other](o, b, self.mask, max(self.least, 1))
            return {"clamped": value, "other": other} if self.is_named else value + other

        return loss

    def outcome(self, seed):
        windows = []  # of the training
        low = {"lr": 0.1, "tolerance": 1e-3} if self.dtype is torch.float32 else {"lr": 1e-3, "tolerance": 1e-8}
        mixes = self.other != "none" and not self.is_named
        loss = self.loss(lambda: len(windows))
        form = Form(loss, model=Net, cut=self.cut, dtype=self.dtype, mixes=mixes, **low)

        def counting(form, model, optimizer):
            train = (by_split if self.is_split else by_runner)(form, model, optimizer)

            def counted(batches):
                windows.append(None)
                return train(batches)

            return counted

        return outcome(form, counting, self.windows(seed))


def drawn(seed):
    chance = random.Random(seed)  # noqa: S311 - of a test
    cut, least = [], chance.choice([0, 1, 1, 1, 2, 3])
    while sum(cut) < N:
        cut.append(chance.choice([1, 1, 2, 2, 3, 4]))
    cut[-1] -= sum(cut) - N
    return Clamped(
        kept=chance.choice([0.1, 0.3, 0.5, 0.8, 0.95]),
        differ=chance.choice([0, 0, 0.03, 0.1]),
        least=least,
        times=1 if least > 1 else chance.choice([1, 1, 2, 3, 4]),
        factor=chance.choice([1, 1, 2, -1, None]),
        mask=chance.choice("aab"),
        other=chance.choice(["none", *OTHERS]),
        is_named=chance.random() < 0.4,
        is_split=chance.random() < 0.4,
        is_real=chance.random() < 0.5,
        dtype=torch.float32 if chance.random() < 0.3 else torch.float64,
        cut=tuple(cut) if len(cut) > 1 else (4, 4),
    )


def stacked(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def by_split(form, model, optimizer):
    runner = autoaccum.Runner(
        model,
        optimizer,
        autoaccum.Plan(N, form.cut),
        forward=form.forward,
        loss=form.loss,
        split=autoaccum.ListOfSamples(
            lambda rows: {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        ),
        device="cpu",
    )

    def train(batches):
        report = runner.step([{name: one[row] for name, one in batches[0].items()} for row in range(N)])
        return [report.loss], report.warnings

    return train


@pytest.mark.parametrize("start", [0, *(pytest.param(start, marks=pytest.mark.sweep) for start in range(20, 620, 60))])
def test_no_clamped_loss_trains_silently_wrong(start):
    for seed in range(start, start + (60 if start else 20)):
        found = drawn(seed).outcome(seed)
        assert found in ("exact", "warned", "refused", "stopped"), (seed, drawn(seed), found)


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("cut", [(1,) * N, (2, 2, 1, 3)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 6))])
def test_clamp_of_what_the_batch_does_not_count_is_no_silent_mean(least, cut, seed):
    chance, windows = torch.Generator().manual_seed(seed), []
    for _ in range(5):
        x = torch.randn(N, 5, generator=chance, dtype=torch.float64)
        windows.append({"x": x[:, :4], "z": x[:, 4:, None]})

    def loss(o, b):
        kept = b["z"][:, 0, 0] < 0
        return (o.square().mean(1) * kept).sum() / kept.sum().clamp(min=least)

    found = outcome(Form(loss, model=Net, cut=cut, lr=1e-3, tolerance=1e-8), by_runner, windows)

    assert found in ("exact", "warned", "refused", "stopped")


def test_clamp_of_what_another_mask_of_the_batch_counts_by_accident_is_warned_of():
    """In both parts of the samples that are tried, the mask keeps as many as the loss does by itself."""
    chance, windows = torch.Generator().manual_seed(36), []
    for _ in range(3):
        x = torch.randn(N, 5, generator=chance, dtype=torch.float64)
        other = (torch.rand(N, generator=chance) < 0.5).double()
        windows.append({"x": x[:, :4], "z": x[:, 4:, None] + 0.3, "other": other})

    def loss(o, b):
        kept = b["z"][:, 0, 0] < 0
        return (o.square().mean(1) * kept).sum() / kept.sum().clamp(min=1)

    form = Form(loss, model=Net, cut=(1,) * N, lr=1e-3, tolerance=1e-8)

    assert outcome(form, by_runner, windows) == "warned"


def test_pair_of_which_the_weight_is_clamped_where_nothing_counts_in_a_part_is_refused():
    def loss(o, b):
        return (o.square().mean(1) * b["kept"]).sum(), b["kept"].sum().clamp(min=1)

    window = {"x": torch.randn(N, 4, dtype=torch.float64), "kept": torch.eye(N, dtype=torch.float64)[2]}

    assert outcome(Form(loss, model=Net, cut=(2,) * 4), by_runner, [window]) == "refused"


def test_mean_over_half_of_the_samples_is_exact_where_it_is_0_for_a_pair():
    """Its divisor is 1 for two samples, though nothing is clamped."""

    def hinge(o, b):
        return torch.relu(1.0 - o[:, 0] * b["x"][:, 0].sign()).sum() / (len(o) * 0.5)

    chance = torch.Generator().manual_seed(3)
    windows = [{"x": torch.randn(16, 4, generator=chance, dtype=torch.float64) * 2} for _ in range(4)]
    form = Form(hinge, model=Net, cut=(2,) * 8, lr=0.3, tolerance=1e-9)

    assert outcome(form, by_runner, windows) == "exact"


@pytest.mark.parametrize("cut", [(1,) * N, (2, 2, 1, 3)])
def test_label_of_class_0_is_no_clamp_of_the_labels_above_0(cut):
    def loss(o, b):
        return functional.cross_entropy(o, b["y"], ignore_index=-1) + 0.1 * o.square().mean()

    for seed in range(8):
        chance, windows = torch.Generator().manual_seed(seed), []
        for _ in range(5):
            x = torch.randn(N, 4, generator=chance, dtype=torch.float64)
            y = torch.randint(-1, 3, (N,), generator=chance)
            windows.append({"x": x, "y": y.index_fill(0, torch.tensor([0]), 1)})
        form = Form(loss, model=Net, cut=cut, lr=0.1, tolerance=1e-9, mixes=True)

        assert outcome(form, by_runner, windows) in ("exact", "warned"), seed


@pytest.mark.filterwarnings("ignore:autoaccum. loss 'loss' divides by more in a micro-batch")  # of the last window
def test_number_beside_a_mean_over_positives_adds_what_negatives_give():
    """As of RetinaNet: micro-batches without a positive have a loss."""

    def loss(o, b):
        value = o.square().sum() / b["positive"].sum().clamp(min=1)
        return {"loss": value, "same": value.detach()}

    model = Net().double()
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        autoaccum.plan(N, 2),
        forward=lambda model, batch: model(batch["x"]),
        loss=loss,
        device="cpu",
    )
    positives = torch.tensor([[1, 0, 1, 1, 0, 0, 0, 1], [0, 0, 0, 0, 1, 1, 0, 0], [0] * N]).double()
    for positive in positives:
        batch = {"x": torch.randn(N, 4, dtype=torch.float64), "positive": positive}
        expected = loss(model(batch["x"]), batch)["same"].item()

        assert runner.step(batch).losses["same"] == pytest.approx(expected, rel=1e-9)


def test_clamp_of_real_weights_below_1_that_the_batch_does_not_count_is_warned_of():
    def loss(o, b):
        weights = b["z"][:, 0, 0].abs()
        return (o.square().mean(1) * weights).sum() / weights.sum().clamp(min=1)

    for seed in range(6):
        chance, windows = torch.Generator().manual_seed(seed), []
        for _ in range(3):
            x = torch.randn(N, 5, generator=chance, dtype=torch.float64)
            windows.append({"x": x[:, :4], "z": x[:, 4:, None]})
        form = Form(loss, model=Net, cut=(1, 2, 1, 1, 1, 2), lr=1e-3, tolerance=1e-8)

        assert outcome(form, by_runner, windows) in ("warned", "refused"), seed


@pytest.mark.filterwarnings("ignore:autoaccum. loss 'loss' divides by more in a micro-batch")  # a k that is new
@pytest.mark.parametrize("least", [2, 3, 4])
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 3))])
def test_later_check_of_few_makes_no_sum_of_a_mean_over_at_least_so_many(least, size, seed):
    """The 8 samples of a check have no more of them than max(k, n) has at least, and the window has more."""
    chance = torch.Generator().manual_seed(seed)
    model, plain = Net().double(), Net().double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def loss(o, b):
        return (o.square().mean(1) * b["kept"]).sum() / b["kept"].sum().clamp(min=least)

    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        autoaccum.plan(32, size),
        forward=lambda model, batch: model(batch["x"]),
        loss=loss,
        device="cpu",
    )
    for part in (0.8, 0.2, 0.1, 0.2):
        kept = torch.rand(32, generator=chance) < part
        batch = {"x": torch.randn(32, 4, generator=chance, dtype=torch.float64), "kept": kept.double()}
        runner.step(batch)
        optimizer.zero_grad()
        loss(plain(batch["x"]), batch).backward()
        optimizer.step()

    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-9, atol=1e-12)


# --- clamps that no window has shown before ---------------------------------------------------------------------------


def kept_windows(*parts):
    """Return windows of samples of which a mask keeps these parts."""
    chance, windows = torch.Generator().manual_seed(5), []
    for part in parts:
        x = torch.randn(N, 5, generator=chance, dtype=torch.float64)
        kept = (torch.rand(N, generator=chance) < part).double()
        windows.append({"x": x[:, :4], "w": x[:, 4].abs() * 1e-3, "kept": kept})
    return windows


def pair_of(clamp):
    return lambda o, b: ((o.square().mean(1) * b["kept"]).sum(), clamp(b["kept"].sum()))


@pytest.mark.parametrize(
    "clamp",
    [lambda n: n.clamp(min=2), lambda n: torch.clamp_min(n, 2), lambda n: torch.maximum(n, torch.tensor(2.0).double())],
)
def test_pair_of_which_the_weight_is_clamped_is_refused_where_everything_counts(clamp):
    found = outcome(Form(pair_of(clamp), model=Net, cut=(2,) * 4), by_runner, kept_windows(1.0, 0.3))

    assert found == "refused"


def test_pair_whose_weight_is_kept_from_0_is_exact():
    def loss(o, b):
        return (o.square().mean(1) * b["w"]).sum(), b["w"].sum().clamp(min=1e-9)

    assert outcome(Form(loss, model=Net, cut=(2,) * 4, tolerance=1e-8), by_runner, kept_windows(1.0, 0.3)) == "exact"


@pytest.mark.parametrize("least", [1e-3, 4.0])
@pytest.mark.parametrize("cut", [(2,) * 4, (1,) * N, (5, 1, 2)])
def test_clamp_that_was_not_met_in_the_samples_that_were_tried_is_not_silent(cut, least):
    """Neither does the batch count what it clamps. A later check may meet it."""

    def loss(o, b):
        n = (b["w"] * b["kept"]).sum() * (1 if least < 1 else 4000)
        return (o.square().mean(1) * b["w"] * b["kept"]).sum() / n.clamp(min=least)

    form = Form(loss, model=Net, cut=cut, tolerance=1e-8)

    assert outcome(form, by_runner, kept_windows(1.0, 1.0, 0.4, 0.4)) in ("exact", "warned", "stopped")


@pytest.mark.parametrize("seed", [62, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(40))])
def test_mean_over_samples_in_which_something_counts_is_not_silent(seed):
    """What micro-batches are divided by may add up to what the batch counts by accident."""
    windows = []
    for number in range(5):
        chance = torch.Generator().manual_seed(100 * seed + number)
        kept = torch.rand(12, 5, generator=chance) < (1.0 if number < 2 else 0.15)
        kept[0, 0] = True
        windows.append({"x": torch.randn(12, 4, generator=chance, dtype=torch.float64), "kept": kept.double()})

    def loss(o, b):
        each = (o.square().sum(1, keepdim=True) * b["kept"]).sum(1) / b["kept"].sum(1).clamp(min=1)
        has = (b["kept"].sum(1) > 0).double()
        return (each * has).sum() / has.sum().clamp(min=1)

    found = outcome(Form(loss, model=Net, cut=(5, 1, 4, 2), tolerance=1e-8), by_runner, windows)

    assert found in ("exact", "warned", "stopped", "refused")


@pytest.mark.parametrize(
    ("divisor", "expected"),
    [
        (lambda n: n.clamp(min=32), "exact"),
        (lambda n: torch.clamp(input=n, min=32), "exact"),
        (lambda n: max(32, n), "exact"),
        (lambda n: max(n, torch.tensor(32.0)), "exact"),
        (lambda n: 2 * n.clamp(min=32), "warned"),
        (lambda n: max(32, int(n)), "warned"),
    ],
)
def test_k_above_the_number_of_samples_that_are_tried_is_exact_where_torch_computes_it(divisor, expected):
    windows = []
    for number in range(4):
        chance = torch.Generator().manual_seed(number)
        kept = (torch.rand(64, generator=chance) < 0.7).double()
        windows.append({"x": torch.randn(64, 4, generator=chance, dtype=torch.float64), "kept": kept})

    def loss(o, b):
        return (o.square().mean(1) * b["kept"]).sum() / divisor(b["kept"].sum())

    assert outcome(Form(loss, model=Net, cut=(16,) * 4, tolerance=1e-8), by_runner, windows) == expected


@pytest.mark.parametrize("clamp", [lambda n: n.clamp(min=1), lambda n: n if n > 1 else n * 1.0])
def test_clamp_of_the_same_count_elsewhere_is_none_of_a_loss_that_does_not_exist_where_nothing_counts(clamp):
    def loss(o, b):
        n = b["kept"].sum()
        return {
            "mean": (o.square().mean(1) * b["kept"]).sum() / n,
            "other": (o[:, 0] * b["kept"]).sum() / clamp(n) * 0.5,
        }

    windows = kept_windows(1.0, 0.7, 0.0)

    assert outcome(Form(loss, model=Net, cut=(3, 2, 3), tolerance=1e-8), by_runner, windows) == "stopped"


def test_sum_over_a_constant_beside_a_clamped_count_that_has_nothing_to_do_with_it_is_exact():
    def loss(o, b):
        hits.append(100.0 / ((o[:, 0] > 0) * b["kept"]).sum().clamp(min=1))
        return o.square().sum() / 64

    hits = []
    windows = [{"x": one["x"], "kept": one["kept"]} for one in kept_windows(0.9, 0.9, 0.9)]

    assert outcome(Form(loss, model=Net, cut=(2,) * 4, tolerance=1e-8), by_runner, windows) == "exact"
