"""Layers whose buffers move in every forward pass are named once; the remedies of docs/moving-layers.md are exact."""

import copy
import re
from collections import deque

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

import autoaccum
from autoaccum._system.notices import Notices
from folders import ROOT

WIDTH = 4


def a_batch(samples=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, WIDTH, generator=generator).double(), torch.zeros(samples, WIDTH).double()


def said_of(model, sizes=3, windows=1, batchnorm="keep", **options):
    """What was said of layers that move, by the docs that a notice names."""
    notices = Notices(silent=True)
    plan = autoaccum.plan(12, 12 // sizes)
    runner = autoaccum.Runner(
        model.double(), None, plan, device="cpu", precision="fp32", batchnorm=batchnorm, notices=notices, **options
    )
    for _ in range(windows):
        runner.step(a_batch())
    return [text for text in notices.texts if "docs/moving-layers.md" in text or "docs/batchnorm.md" in text]


class Moco(nn.Module):
    """An encoder, its momentum copy, and a queue of keys."""

    def __init__(self):
        super().__init__()
        self.encoder, self.slow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("queue", torch.randn(24, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, inputs):
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.encoder.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            keys, at = self.slow(inputs), int(self.pointer)
            self.queue[at : at + len(keys)] = keys
            self.pointer[0] = (at + len(keys)) % len(self.queue)
        return self.encoder(inputs)


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("embed_avg", torch.ones(WIDTH))

    def forward(self, inputs):
        self.embed_avg.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
        return inputs + self.embed_avg


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("seen", torch.tensor(0.0))

    def forward(self, inputs):
        self.calls += 1
        self.seen += len(inputs)
        return inputs


class KeepsNothing(nn.Module):
    """Its buffers are written and stay what they are, or stay NaN."""

    def __init__(self):
        super().__init__()
        self.register_buffer("same", torch.ones(3))
        self.register_buffer("undefined", torch.full((3,), torch.nan))

    def forward(self, inputs):
        self.same.mul_(1.0)
        self.undefined.mul_(2.0)
        return inputs


@pytest.mark.parametrize("norm", [spectral_norm, parametrizations.spectral_norm])
def test_spectral_norm_is_named_with_how_often_it_moved_and_what_to_do(norm):
    (text,) = said_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(nn.Linear(WIDTH, WIDTH))), windows=3)

    assert text.startswith("spectral norm: 1")  # the path of the layer, or of its parametrization
    assert "3 times in this update instead of once" in text
    assert "eval mode" in text


def test_queue_and_the_momentum_encoder_beside_it_are_named():
    said = said_of(nn.Sequential(Moco()))

    assert len(said) == 2
    assert any(text.startswith("queue: 0 (queue, pointer)") for text in said)
    assert any("momentum encoder): 0.slow (weight, bias)" in text for text in said)


def test_codebook_is_a_moving_average():
    (text,) = said_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Codebook()))

    assert text.startswith("moving average or codebook: 1 (embed_avg)")
    assert "d ** (1 / number of micro-batches)" in text


def test_loss_over_the_window_is_looked_at_too():
    (text,) = said_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Codebook()), loss=nn.MSELoss(), loss_scope="window")

    assert text.startswith("moving average or codebook")


def test_modules_of_a_loss_are_named_too():
    class Loss(Codebook):
        def forward(self, outputs, targets):
            return (super().forward(outputs) - targets).square().mean()

    (text,) = said_of(nn.Linear(WIDTH, WIDTH), loss=Loss())

    assert text.startswith("moving average or codebook: Loss (embed_avg)")


@pytest.mark.parametrize("layer", [KeepsNothing(), nn.BatchNorm1d(WIDTH).eval(), nn.Dropout()])
def test_what_stays_the_same_is_not_spoken_of(layer):
    assert said_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer)) == []


def test_counters_are_named_as_such():
    (text,) = said_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Counts()))

    assert text.startswith("counters: 1 (")
    assert "annealing" in text


class Keeps(nn.Module):
    """Keeps something in a plain attribute, and something that is made once."""

    def __init__(self, name, start, move):
        super().__init__()
        self.name, self.move = name, move
        setattr(self, name, start)
        self.cached = None

    def forward(self, inputs):
        if self.cached is None:
            self.cached = inputs.detach()
        setattr(self, self.name, self.move(getattr(self, self.name), inputs.detach()))
        return inputs


@pytest.mark.parametrize(
    ("name", "start", "move", "kind"),
    [
        ("norm", 10.0, lambda norm, inputs: 0.9 * norm + 0.1 * len(inputs), "layers with state"),
        ("queue", torch.zeros(4, WIDTH), lambda queue, inputs: torch.cat([queue, inputs])[-4:], "queue"),
        ("bank", deque(maxlen=3), lambda bank, inputs: bank.append(inputs) or bank, "queue"),
        ("step", 0, lambda step, inputs: step + 1, "counters"),
        ("seen", [], lambda seen, inputs: [*seen, inputs], "layers with state"),
    ],
)
def test_what_moves_in_plain_attributes_is_named(name, start, move, kind):
    (text,) = said_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Keeps(name, start, move)))

    assert text.startswith(f"{kind}: 1 ({name})")


def test_plain_attributes_that_stay_or_are_made_once_are_not_spoken_of():
    assert said_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Keeps("scale", 2.0, lambda scale, inputs: scale))) == []


def test_weight_that_a_hook_makes_anew_and_kept_auxiliary_losses_are_not_spoken_of():
    class Auxiliary(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            self.aux_loss = outputs.square().mean()
            return outputs

    with pytest.warns(FutureWarning):
        normed = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
    eigen = spectral_norm(nn.Linear(WIDTH, WIDTH)).eval()

    assert said_of(nn.Sequential(normed, Auxiliary(WIDTH, WIDTH), eigen)) == []


def test_whole_window_moves_once_and_nothing_is_said():
    assert said_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Codebook()), sizes=1) == []


def test_batchnorm_is_told_by_its_own_notice_alone():
    (text,) = said_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))

    assert text.startswith("BatchNorm: 1 layer")
    assert "momentum=None" not in text


@pytest.mark.parametrize("mode", ["keep", "rescale"])
def test_batchnorm_that_averages_over_micro_batches_is_told(mode):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None), nn.BatchNorm1d(WIDTH))
    (text,) = said_of(model, batchnorm=mode)

    assert "Running statistics of 1 with momentum=None are the mean over micro-batches" in text


def test_buffers_are_compared_once_and_never_again(monkeypatch):
    compared = []
    changes = Savepoint.changes
    monkeypatch.setattr(Savepoint, "changes", lambda self: compared.append(1) or changes(self))

    said_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Codebook()), windows=5)

    assert compared == [1]


def test_lack_of_memory_while_looking_costs_nothing_and_the_next_window_is_looked_at(monkeypatch):
    tries = []
    changes = Savepoint.changes

    def lacking(self):
        tries.append(1)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return changes(self)

    monkeypatch.setattr(Savepoint, "changes", lacking)

    assert len(said_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Codebook()), windows=3)) == 1
    assert len(tries) == 2


class Counted(nn.Module):
    """Counts in a metric, which is meant to move and is put back."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)

    def forward(self, inputs):
        self.accuracy(inputs[:, :2], torch.zeros(len(inputs), dtype=torch.long))
        return inputs


def test_metrics_are_not_named():
    assert said_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Counted())) == []


# --- the remedies of the page -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page():
    names = {"autoaccum": autoaccum, "torch": torch}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "moving-layers.md").read_text(), re.DOTALL):
        exec(block, names)  # noqa: S102 - the documentation's own
    return names


def trained(model, callback, micro_batch):
    autoaccum.fit(
        model,
        [tuple(part + number for part in a_batch()) for number in range(4)],
        12,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        micro_batch=micro_batch,
        device="cpu",
        progress=False,
        callbacks=[] if callback is None else [callback],
    )
    return list(model.parameters())


def test_spectral_norm_that_moves_once_an_update_is_the_whole_batchs(page):
    torch.manual_seed(0)
    cut = nn.Sequential(nn.Linear(WIDTH, 8), parametrizations.spectral_norm(nn.Linear(8, WIDTH))).double()
    whole, without = copy.deepcopy(cut), copy.deepcopy(cut)
    callback = page["SpectralNormOnceAnUpdate"]([cut[1]])
    cut[1].parametrizations.weight[0].eval()

    expected = trained(whole, None, 12)

    for one, other in zip(trained(cut, callback, 4), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert not all(map(torch.allclose, trained(without, None, 4), expected))


def test_queue_that_moves_once_an_update_is_the_whole_batchs(page, capsys):
    torch.manual_seed(0)
    cut = page["Queued"](nn.Linear(WIDTH, WIDTH), WIDTH, WIDTH).double()
    whole = copy.deepcopy(cut)

    expected = trained(whole, page["QueueOnceAnUpdate"](whole), 12)

    for one, other in zip(trained(cut, page["QueueOnceAnUpdate"](cut), 4), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(cut.queue, whole.queue, rtol=1e-12, atol=1e-12)


def test_buffer_that_is_empty_before_each_window_is_not_spoken_of(page):
    assert said_of(page["Queued"](nn.Linear(WIDTH, WIDTH), WIDTH, WIDTH).double()) == []
