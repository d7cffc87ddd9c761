"""One steady window on fake tensors of a card: nothing waits for the device, and no more is launched than by hand."""

from collections import Counter

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._data.batches import as_window
from autoaccum._engine.forward_backward import TrainingStep
from autoaccum._engine.options import Options
from autoaccum._estimate.fake import Stage, ValuesAssumed
from autoaccum._estimate.fake_step import FakePrecision
from autoaccum._loss.objective import Objective
from autoaccum._system.notices import Notices
from launches import CARD, Launches, fake_card
from put_together import runner_of

pytestmark = [
    pytest.mark.card_fakes,
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),  # always 0, and so never changed
]

SAMPLES, SIZES, WIDTH = 16, (4, 4, 4, 4), 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.mix, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        weights = (self.mix(self.norm(hidden)) @ hidden.transpose(1, 2)).softmax(-1)
        return hidden + self.drop(self.out(nn.functional.gelu(weights @ hidden)))


def plain():
    return nn.Sequential(Block(), Block(), nn.Flatten(), nn.Linear(8 * WIDTH, 4))


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def by_hand(model, optimizer, precision, window, clip):
    """Make the update of a window as one writes it: the loss is added up on the device, nothing is read."""
    inputs, targets = window
    total = torch.zeros((), device=CARD)
    start = 0
    for size in SIZES:
        with precision.autocast():
            outputs = model(inputs[start : start + size])
            loss = nn.functional.mse_loss(outputs, targets[start : start + size]) * (size / SAMPLES)
        loss.backward()
        total += loss.detach()
        start += size
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return total


class BuffersAssumed(ValuesAssumed):
    """Also takes two buffers for equal, whose values cannot be compared."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return True if func is torch.equal else super().__torch_function__(func, types, args, kwargs)


class Reentered(FakePrecision):
    """Enters its context anew for each micro-batch, as torch's own can be."""

    def autocast(self):
        return self

    def __enter__(self):
        self.entered = super().autocast()
        self.entered.__enter__()

    def __exit__(self, *error):
        return self.entered.__exit__(*error)


def steady(monkeypatch, model_of, *, clip=None, precision="fp32", runs=None):
    """Go through three windows, and return what the third one launched."""
    made = model_of()
    with fake_card(monkeypatch):
        model = Stage(CARD).copied(made)
        optimizer = optimizer_of(model)
        how = Reentered(precision)
        window = torch.empty(SAMPLES, 8, WIDTH, device=CARD), torch.empty(SAMPLES, 4, device=CARD)
        if runs is None:
            runs = _runner(model, optimizer, how, clip)
        # The first two are checked: they read, and compare what may have moved.
        with BuffersAssumed():
            for _ in range(2):
                runs(model, optimizer, how, window, clip)
        with Launches() as launches:
            runs(model, optimizer, how, window, clip)
    return launches.names


def _runner(model, optimizer, precision, clip):
    notices = Notices(silent=True)
    objective = Objective(model, nn.MSELoss(), forward=None, loss_reduction=None, notices=notices)
    memory = autoaccum.Simulated(2**40, CARD)
    step = TrainingStep(objective, optimizer, precision, memory, Options(clip_grad_norm=clip))
    runner = runner_of(step, autoaccum.Plan(SAMPLES, SIZES), notices=notices)

    def run(model, optimizer, precision, window, clip):
        report = runner.step(as_window(window))
        assert report.micro_batches == SIZES
        assert report.oom_events == 0

    return run


@pytest.mark.parametrize(("clip", "precision"), [(None, "fp32"), (1.0, "bf16")])
def test_steady_window_waits_for_nothing_and_launches_no_more_than_by_hand(monkeypatch, clip, precision):
    options = {"clip": clip, "precision": precision}

    ours = Counter(steady(monkeypatch, plain, **options))
    theirs = Counter(steady(monkeypatch, plain, runs=by_hand, **options))

    assert ours - theirs == {}
    assert theirs - ours == {"zeros": 1, "add_": len(SIZES)}  # losses are added up when they are read
