"""Losses with buffers that they reuse, with settings that change, and with memory that runs out while they are new."""

import copy
import subprocess
import textwrap

import pytest
import torch
from torch import nn

import autoaccum
from support.models.small import fit_quietly
from support.processes import fork_server

SAMPLES, MICRO_BATCH = 15, 4


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return torch.randn(SAMPLES, 3, dtype=torch.float64), torch.randn(SAMPLES, 1, dtype=torch.float64)


def model_with(outputs):
    torch.manual_seed(0)
    return nn.Linear(3, outputs, dtype=torch.float64)


def runner_of(model, loss, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    plan = autoaccum.plan(SAMPLES, MICRO_BATCH)
    return autoaccum.Runner(model, optimizer, plan, **{"loss": loss, "device": "cpu", "precision": "fp32", **options})


def step(runner, model, batch, whole):
    before = copy.deepcopy(model)
    report = runner.step(batch)
    loss = whole(before)
    loss.backward()
    gradient = before.weight.detach() - model.weight.detach()
    return (report.loss, gradient), (loss.item(), before.weight.grad)


def assert_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-12)
    assert torch.allclose(found[1], wanted[1], rtol=1e-12, atol=1e-14)


class Reuses(nn.Module):
    """Returns its buffers, which the next micro-batch overwrites."""

    def __init__(self):
        super().__init__()
        for name in ("weight", "near", "count"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def forward(self, outputs, targets):
        targets, mask = targets
        self.weight.copy_(mask.sum())
        return ((outputs - targets) ** 2 * mask).sum(), self.weight


def test_weight_in_a_buffer_counts_as_it_was_in_its_micro_batch(batch):
    inputs, targets = batch
    mask = (torch.arange(SAMPLES)[:, None] % 3 > 0).double()
    model = model_with(1)

    found, wanted = step(
        runner_of(model, Reuses()),
        model,
        (inputs, (targets, mask)),
        lambda model: ((model(inputs) - targets) ** 2 * mask).sum() / mask.sum(),
    )

    assert_same(found, wanted)


def test_reported_values_in_buffers_count_as_they_were_in_their_micro_batch(batch):
    inputs, targets = batch
    kept = Reuses()

    def loss(outputs, targets):
        errors = (outputs - targets).detach().abs()
        return {
            "loss": ((outputs - targets) ** 2).mean(),
            "near": (kept.near.copy_((errors < 0.9).sum()), kept.count.fill_(len(targets))),
        }

    model = model_with(1)
    wanted = ((model(inputs) - targets).abs() < 0.9).double().mean().item()

    assert runner_of(model, loss).step(batch).losses["near"] == pytest.approx(wanted)


def test_sum_that_is_overwritten_is_reported_as_it_was(batch):
    made = []

    def loss(outputs, targets):
        for earlier in made:
            earlier.data.zero_()
        made.append(((outputs - targets) ** 2).sum())
        return made[-1]

    inputs, targets = batch
    model = model_with(1)
    wanted = ((model(inputs) - targets) ** 2).sum().item()

    assert runner_of(model, loss, loss_reduction="sum").step(batch).loss == pytest.approx(wanted)


@pytest.mark.parametrize(
    "change",
    [
        lambda loss: setattr(loss, "weight", torch.tensor([5.0, 1.0, 0.1], dtype=torch.float64)),
        lambda loss: loss.weight.mul_(torch.tensor([5.0, 1.0, 0.1], dtype=torch.float64)),
        lambda loss: setattr(loss, "ignore_index", 1),
        lambda loss: setattr(loss, "reduction", "sum"),
        lambda loss: setattr(loss, "reduction", "none"),
    ],
    ids=["other weights", "weights in place", "another ignored value", "a sum", "a vector"],
)
def test_settings_of_a_loss_that_change_between_windows_are_followed(batch, change):
    inputs, labels = batch[0], torch.arange(SAMPLES) % 7 % 3
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64))
    model = model_with(3)
    runner = runner_of(model, loss)
    runner.step((inputs, labels))
    change(loss)

    found, wanted = step(runner, model, (inputs, labels), lambda model: loss(model(inputs), labels).mean())

    assert_same(found, wanted)


@pytest.mark.slow  # it really fills its memory
def test_checksums_of_frozen_parameters_take_no_memory_from_a_window_that_failed():
    """They are in double precision, and the failed micro-batch's graph lives as long as its error is handled."""
    script = textwrap.dedent(
        """
        import torch, autoaccum
        from torch import nn
        torch.set_num_threads(1)
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.frozen = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(4)]).requires_grad_(False)
                self.scale = nn.Parameter(torch.ones(1024))
            def forward(self, inputs):
                inputs = inputs * self.scale
                for _ in range(3000):
                    inputs = torch.tanh(inputs)
                return self.frozen[0](inputs).mean(1, keepdim=True)
        result = autoaccum.fit(
            Model(), [(torch.randn(64, 1024), torch.randn(64, 1))], 64, micro_batch=64, memory_limit="64MiB",
            loss=nn.MSELoss(), max_steps=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), progress=False,
            precision="fp32", device="cpu",
        )
        print(result.oom_events)
        """
    )
    ended = subprocess.run(
        [*fork_server.python(), "-c", script], capture_output=True, text=True, timeout=300, check=False
    )

    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0


@pytest.mark.parametrize("seed", range(12))
def test_pair_with_a_mean_in_place_of_the_sum_is_refused_before_it_makes_a_difference(seed):
    torch.manual_seed(seed)
    labels = torch.where(torch.rand(160) < 0.35, torch.randint(3, (160,)), -1)  # some parts of windows have none
    data = torch.utils.data.TensorDataset(torch.randn(160, 3), labels)
    counted = []

    def loss(outputs, labels):
        mask = (labels >= 0).float()
        each = nn.functional.mse_loss(outputs[:, 0], labels.clamp(min=0).float(), reduction="none")
        return (each * mask).sum() / mask.sum().clamp(min=1), mask.sum()

    class Counting(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            counted.append(int((labels[8 * (report.step - 1) : 8 * report.step] >= 0).sum()))

    with pytest.raises(autoaccum.InvalidInputError, match="sum"):
        fit_quietly(
            nn.Linear(3, 1),
            torch.utils.data.DataLoader(data, batch_size=8),
            8,
            loss=loss,
            micro_batch=2,
            callbacks=[Counting()],
        )
    assert max(counted, default=1) == 1  # of a single one, mean and sum are the same


def test_loss_that_takes_only_even_numbers_of_samples_is_checked_on_such_parts():
    torch.manual_seed(0)
    labels = torch.tensor([1] * 3 + [-1] * 21)  # the first samples that are looked at count nothing

    def loss(outputs, labels):
        if len(labels) % 2:
            raise ValueError("pairs of samples")
        mask = labels >= 0
        return ((outputs[:, 0] - 1) ** 2 * mask).sum(), mask.sum()

    options = {"loss": loss, "micro_batch": 4, "epochs": 1, "progress": False, "device": "cpu"}
    result = autoaccum.fit(nn.Linear(3, 1), [(torch.randn(24, 3), labels)] * 2, 24, **options)

    assert result.steps == 2


def of_another_function(outputs, targets):
    """A sum where a rare target occurs, and a mean elsewhere."""
    errors = (outputs - targets) ** 2
    return errors.sum() if (targets > 2).any() else errors.sum() / len(outputs)


def sum_of_one(outputs, targets):
    """A mean that is not divided where there is one sample."""
    errors = ((outputs - targets) ** 2).sum()
    return errors if len(outputs) == 1 else errors / len(outputs)


@pytest.mark.parametrize("micro_batch", [2, 3])
def test_loss_that_is_a_sum_in_some_micro_batches_is_refused(micro_batch):
    for place in range(24):
        with pytest.raises(autoaccum.InvalidInputError, match="loss 'loss'"):
            weight_after(of_another_function, micro_batch, rare=place)


def test_mean_of_one_sample_that_is_not_divided_is_a_mean():
    assert torch.allclose(weight_after(sum_of_one, 5), weight_after(sum_of_one, 24), rtol=1e-12)


def weight_after(loss, micro_batch, rare=None):
    torch.manual_seed(1)
    inputs, targets = torch.randn(24, 3, dtype=torch.float64), torch.rand(24, 1, dtype=torch.float64)
    if rare is not None:
        targets[rare] = 3.0
    model = model_with(1)
    autoaccum.fit(
        model,
        [(inputs, targets)],
        24,
        loss=loss,
        micro_batch=micro_batch,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        progress=False,
    )
    return model.weight.detach().clone()
