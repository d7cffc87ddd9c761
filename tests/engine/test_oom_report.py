"""A report of memory running out tells what was alive, and the training is the same as without one."""

from pathlib import Path

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.errors import DoesNotFitError
from support.models.small import assert_bitwise

SAMPLES, WIDE = 200, 128
WIDE_BYTES = SAMPLES * WIDE * 4  # of the largest activation with all samples at once


class Model(nn.Module):
    """Asks for more than there is in each forward pass of more than `most` samples, from call number `since` on."""

    def __init__(self, device, most=SAMPLES // 2, since=1):
        super().__init__()
        self.up, self.down = nn.Linear(4, WIDE), nn.Linear(WIDE, 3)
        self.register_buffer("scale", torch.ones(WIDE))
        self.device, self.most, self.since, self.calls = [device], most, since, 0

    def forward(self, inputs):
        self.calls += 1
        wide = self.up(inputs) * self.scale
        if len(inputs) > self.most and self.calls >= self.since:
            self.device[0].ensure(2**40)
        return self.down(wide)


def batch():
    return torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 3


def train(folder=None, *, steps=3, most=SAMPLES // 2, since=1, **options):
    torch.manual_seed(0)
    device = autoaccum.Simulated(2**22)
    model = Model(device, most, since)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"micro_batch": SAMPLES, "progress": False, "loss": nn.CrossEntropyLoss()} | options
    loader = [batch() for _ in range(steps)]
    result = autoaccum.fit(model, loader, SAMPLES, device=device, optimizer=optimizer, oom_report=folder, **settings)
    return model, result


def texts(folder):
    return [path.read_text() for path in Path(folder).iterdir()]


def test_report_names_the_largest_tensors_by_shape_type_bytes_and_owner(tmp_path):
    train(tmp_path, since=2)

    (text,) = texts(tmp_path)
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    assert text.startswith("forward, 200 samples, step 2: ")
    assert [f"{WIDE_BYTES:,}", f"({SAMPLES}, {WIDE}) torch.float32 other"] in lines  # the activation
    assert [f"{WIDE * 4 * 4:,}", f"({WIDE}, 4) torch.float32 up.weight"] in lines
    assert [f"{WIDE * 4 * 4:,}", f"({WIDE}, 4) torch.float32 momentum_buffer of up.weight"] in lines
    assert [f"{WIDE * 4:,}", f"({WIDE},) torch.float32 scale"] in lines


def test_training_with_a_report_ends_as_without_to_the_last_bit(tmp_path):
    model, result = train(tmp_path)
    plain, expected = train()

    assert_bitwise(model.state_dict(), plain.state_dict())
    assert [report.loss for report in result.history] == [report.loss for report in expected.history]
    assert result.oom_events == expected.oom_events


def test_one_sample_that_does_not_fit_leaves_a_report(tmp_path):
    with pytest.raises(DoesNotFitError):
        train(tmp_path, micro_batch="auto", most=0)

    assert len(texts(tmp_path)) == 1
