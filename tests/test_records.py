"""Records check what users write into them, and wait for the device only when they are read."""

import pickle

import pytest
import torch

import autoaccum
from autoaccum._records import DeviceScalar
from support.data.records import CountingScalar, fit_result, step_report


def test_report_waits_for_the_device_only_when_it_is_read():
    loss, norm = CountingScalar(torch.tensor(1.0)), CountingScalar(2.0)
    report = step_report(loss=loss, device_grad_norm=norm)
    repr(report)
    assert (loss.reads, norm.reads, repr(loss)) == (0, 0, "<on the device>")

    assert (report.loss, report.grad_norm, repr(loss)) == (1.0, 2.0, "1.0")


def test_losses_are_reported_by_name_and_added():
    report = step_report(device_losses={"tokens": DeviceScalar(1.0), "energy": DeviceScalar(0.5)})

    assert report.loss == 1.5
    assert dict(report.losses) == {"tokens": 1.0, "energy": 0.5}


@pytest.mark.parametrize("loss", [0.25, torch.tensor(0.25)])
def test_result_can_be_pickled(loss):
    result = pickle.loads(pickle.dumps(fit_result((step_report(1, loss=loss),))))  # noqa: S301 - made here

    assert result.last_loss == 0.25
    assert str(result) == str(fit_result((step_report(1, loss=loss),)))


def test_result_says_that_shorter_samples_ran_in_larger_micro_batches():
    batches = [(torch.ones(8, width, 2), torch.zeros(8, dtype=torch.long)) for width in (200, 200, 200, 200, 20)]
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.AdaptiveAvgPool2d((1, 3)), torch.nn.Flatten())
    result = autoaccum.fit(model, batches, 8, device=autoaccum.Simulated("32KiB"), progress=False)

    assert max(result.history[-1].micro_batches) > result.plan.micro_batch
    assert "; of shorter samples, more at once" in str(result)


def test_result_prints_as_a_dozen_lines():
    torch.manual_seed(0)
    batches = [(torch.randn(4, 3), torch.randint(0, 2, (4,))) for _ in range(30)]
    result = autoaccum.fit(
        torch.nn.Linear(3, 2),
        batches,
        4,
        micro_batch=2,
        device="cpu",
        progress=False,
        val_loader=batches[:1],
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()},
    )

    lines = str(result).splitlines()
    assert not any("out of memory" in line for line in lines)  # which never happened

    assert lines[0].startswith("30 optimizer steps, 120 samples in ")
    assert any(line.startswith("last of 1 evaluations: loss ") and "accuracy" in line for line in lines)
    assert "micro-batches: 2 of at most 2 samples" in lines
    assert 4 <= len(lines) <= 12
