"""`fit` measures the gradient noise scale, tells it everywhere, and goes on with it after a resume."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoaccum


def made(*, shuffle=True):
    torch.manual_seed(0)
    inputs = torch.randn(96, 10)
    # Most samples are of one class, so that a few windows already tell the gradient from its noise.
    data = TensorDataset(inputs, (inputs[:, 0] + torch.randn(96) > -2).long())
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
    return model, DataLoader(data, 12, shuffle=shuffle, generator=generator)


def fit(model, loader, **options):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"optimizer": optimizer, "micro_batch": 4, "epochs": 3, "noise_scale": 2} | options
    return autoaccum.fit(model, loader, 24, **settings)


def test_it_is_in_reports_result_log_and_progress(tmp_path, capsys):
    log = tmp_path / "log.jsonl"

    result = fit(*made(), callbacks=[autoaccum.JSONLinesLog(log)])

    measured = [report.noise_scale for report in result.history]
    assert [one is not None for one in measured] == [False, True] * 6
    assert result.noise_scale == measured[-1]
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["noise_scale"] for event in events if event["event"] == "step"] == measured
    assert events[-1]["noise_scale"] == measured[-1]
    said = capsys.readouterr().err
    assert f"gradient noise scale about {measured[-1]:.2g} samples" in said
    assert f", noise scale {measured[-1]:.2g}" in said


def test_short_run_says_that_nothing_was_measured(capsys):
    result = fit(*made(), noise_scale=True)

    assert result.noise_scale is None
    assert "gradient noise scale not measured: one window in 50 is" in capsys.readouterr().err


@pytest.mark.parametrize("shuffle", [False, True])
def test_loader_that_does_not_shuffle_is_told_of(shuffle, capsys):
    fit(*made(shuffle=shuffle))

    assert ("the loader does not shuffle" in capsys.readouterr().err) is not shuffle
