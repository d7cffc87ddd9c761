"""Random state within a window: kept before each micro-batch where they draw, and once a window where none does."""

import copy

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._snapshot import RandomState

CUT = 2


class Noisy(nn.Module):
    """Adds noise to its inputs while `is_noisy`, and lacks memory in pass number `fails_in`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)
        self.is_noisy = False
        self.fails_in = 0

    def forward(self, inputs):
        self.fails_in -= 1
        if self.is_noisy:
            inputs = inputs + torch.randn_like(inputs)
        if self.fails_in == 0:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return self.layer(inputs)


def samples(seed):
    torch.manual_seed(seed)
    return torch.randn(8, 6), torch.randint(0, 3, (8,))


def runner_of(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return autoaccum.Runner(model, optimizer, autoaccum.plan(8, CUT), loss=nn.CrossEntropyLoss(), device="cpu")


def by_hand(model, window, sizes):
    """Step a copy of a model with the same cut; return it."""
    model = copy.deepcopy(model)
    for inputs, targets in zip(window[0].split(sizes), window[1].split(sizes), strict=True):
        (nn.functional.cross_entropy(model(inputs), targets) * len(inputs) / 8).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
    return model


@pytest.mark.parametrize("drew_before", [False, True])
@pytest.mark.parametrize("draws", [False, True])
def test_failed_micro_batch_meets_the_random_numbers_that_it_met(drew_before, draws):
    model = Noisy()
    runner = runner_of(model)
    model.is_noisy = drew_before
    runner.step(samples(1))
    model.is_noisy, model.fails_in = draws, 3
    before, window = copy.deepcopy(model), samples(2)

    report = runner.step(window)
    after = torch.rand(1)

    samples(2)
    before.fails_in = 0
    expected = by_hand(before, window, report.micro_batches)
    began_again = draws and not drew_before
    assert report.micro_batches == ((1,) * 8 if began_again else (2, 2, 1, 1, 1, 1))
    assert torch.equal(after, torch.rand(1))
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    # Where drawing began after the first window, the window begins again; else the failed micro-batch alone.
    assert report.recomputed_samples == (6 if began_again else CUT)


def test_random_state_is_kept_once_a_window_where_nothing_draws(monkeypatch):
    taken = []
    take = RandomState.take
    monkeypatch.setattr(RandomState, "take", lambda state: (taken.append(state), take(state))[1])
    counts = []
    for is_noisy in (False, True):
        model = Noisy()
        model.is_noisy = is_noisy
        runner = runner_of(model)
        runner.step(samples(1))
        taken.clear()
        runner.step(samples(2))
        counts.append(len(taken))

    assert counts == [1, 4]


def test_without_memory_to_compare_random_state_the_window_begins_again(monkeypatch):
    model = Noisy()
    runner = runner_of(model)
    runner.step(samples(1))
    before = copy.deepcopy(model)
    window = samples(2)

    def fail(_):
        raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    monkeypatch.setattr(RandomState, "has_moved", fail)
    model.fails_in = 3
    report = runner.step(window)

    assert (report.oom_events, report.recomputed_samples) == (1, 6)
    for mine, theirs in zip(
        model.parameters(), by_hand(before, window, report.micro_batches).parameters(), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_window_that_began_to_draw_is_kept_by_micro_batches_from_then_on():
    model = Noisy()
    runner = runner_of(model)
    runner.step(samples(1))
    redone = []
    for number in (2, 3):
        runner.plan = autoaccum.plan(8, CUT)
        model.is_noisy, model.fails_in = True, 3
        redone.append(runner.step(samples(number)).recomputed_samples)

    assert redone == [6, CUT]
