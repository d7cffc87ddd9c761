"""memory="auto" in an accumulator: batches that are added anyway are compared, and the fastest way is kept."""

import re

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum import Simulated
from fallback_models import Wide, seed
from rung_training import assert_same, data, is_plain

BATCHES = 52


def accumulated(capacity, *, batches=BATCHES, memory="auto", twice=False, loss=nn.functional.cross_entropy, **options):
    """Train with SGD; return the model, the accumulator and its reports."""
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    made = {"cache": False} | options
    accumulator = autoaccum.Accumulator(model, loss=loss, device=Simulated(capacity), memory=memory, **made)
    seed()
    reports = []
    for batch in data(batches):
        reports.append(accumulator.backward(batch))
        assert is_plain(model)
        if not twice or len(reports) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model, accumulator, reports


def replayed(reports, *, twice=False):
    """Train with the same cuts where memory is plenty and nothing saves any."""
    model = Wide()
    seed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for number, (report, (inputs, targets)) in enumerate(zip(reports, data(len(reports)), strict=True), start=1):
        first = 0
        earlier = [parameter.grad for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        for size in report.micro_batches:
            part = slice(first, first + size)
            loss = nn.functional.cross_entropy(model(inputs[part]), targets[part])
            (loss * (size / len(inputs))).backward()
            first += size
        for parameter, before in zip(model.parameters(), earlier, strict=True):
            if before is not None:
                parameter.grad += before
        if not twice or number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def tried():
    return accumulated("3MiB")


def test_all_that_was_tried_is_recorded_and_the_fastest_is_in_force(tried):
    _, accumulator, _ = tried

    first, *others = accumulator.memory_trials
    assert (first.memory, first.micro_batch, first.seconds) == ((), None, None)
    assert [trial.memory for trial in others[:3]] == [("checkpoint:1",), ("checkpoint:2",), ("checkpoint:3",)]
    timed = {trial.memory: trial.seconds for trial in others if trial.seconds is not None}
    assert timed[accumulator.memory] <= min(timed.values()) * 1.02


@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_gradients_are_those_of_the_same_cuts_where_memory_is_plenty(tried, twice):
    model, _, reports = accumulated("3MiB", twice=True) if twice else tried

    other = replayed(reports, twice=twice)

    assert len({report.micro_batches for report in reports}) > 1
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_batches_that_fit_at_once_are_not_compared():
    model, accumulator, reports = accumulated("1GiB", batches=6)

    assert (accumulator.memory, accumulator.memory_trials) == ((), ())
    assert reports[-1].micro_batches == (8,)
    assert_same(model, accumulated("1GiB", batches=6, memory=None)[0])


@pytest.mark.slow
def test_next_run_begins_with_what_was_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path))
    _, first, _ = accumulated("3MiB", cache=True)
    said = capsys.readouterr().err

    _, second, reports = accumulated("3MiB", cache=True, batches=3)

    assert "as an earlier run has measured" not in said
    (tried,) = re.findall(r"; tried: (.+)", said)
    assert f"as an earlier run has measured: {tried}" in capsys.readouterr().err
    assert second.memory == first.memory
    assert second.memory_trials == ()
    assert all(report.oom_events == 0 for report in reports)


def test_fixed_size_is_not_compared_and_saves_memory_only_where_it_has_to():
    _, plenty, _ = accumulated("8MiB", micro_batch=2, batches=3)
    _, scarce, _ = accumulated("2MiB", micro_batch=2, batches=3)

    assert (plenty.memory, plenty.memory_trials) == ((), ())
    assert scarce.memory == ("checkpoint:3",)


class _Interrupting:
    def __init__(self, at):
        self.calls, self.at = 0, at

    def __call__(self, outputs, targets):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.slow
@pytest.mark.parametrize("at", [40, *(pytest.param(at, marks=pytest.mark.sweep) for at in (3, 17, 77))])
def test_interrupt_while_it_measures_leaves_model_and_choice_usable(at):
    model = Wide()
    loss = _Interrupting(at)
    accumulator = autoaccum.Accumulator(model, loss=loss, device=Simulated("3MiB"), memory="auto", cache=False)
    for batch in data(BATCHES):
        try:
            accumulator.backward(batch)
        except KeyboardInterrupt:
            assert is_plain(model)
        model.zero_grad()

    assert loss.calls > at
    assert accumulator.memory != ()
    assert is_plain(model)
