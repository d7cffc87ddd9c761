"""Signals of Slurm end a training once, behind its checkpoint."""

import signal

import pytest
import torch
from autoaccum._launch.recipe_exit_guard import Stopped
from autoaccum._launch.slurm.stop import Stop

import autoaccum

WARNING = signal.SIGUSR2


@pytest.fixture(autouse=True)
def handlers():
    """Handlers as submitit sets them, which do nothing here; put back as they were."""
    numbers = (signal.SIGTERM, WARNING)
    before = [signal.signal(number, nothing) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def nothing(number, frame):
    pass


@pytest.mark.parametrize("number", [signal.SIGTERM, WARNING])
def test_either_signal_stops_and_it_is_known_which(number):
    with pytest.raises(Stopped), Stop(WARNING) as stop:
        signal.raise_signal(number)

    assert stop.warned == (number == WARNING)
    assert stop.former is nothing


def test_signals_after_the_first_do_nothing():
    stop = Stop(WARNING)

    with pytest.raises(Stopped), stop:  # noqa: PT012 - where in the block it is raised is the claim
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(WARNING)
            signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(WARNING)

    assert not stop.warned


def test_handlers_are_put_back_where_nothing_came():
    with Stop(WARNING):
        pass

    assert signal.getsignal(signal.SIGTERM) is nothing
    assert signal.getsignal(WARNING) is nothing


def test_training_leaves_its_checkpoint_before_it_stops(tmp_path):
    class Warn(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            if report.step == 2:
                signal.raise_signal(WARNING)

    data = [(torch.randn(4, 2), torch.randn(4, 1))] * 4

    with pytest.raises(Stopped), Stop(WARNING) as stop:
        autoaccum.fit(
            torch.nn.Linear(2, 1), data, 4, device="cpu", progress=False, checkpoint=tmp_path, callbacks=[Warn()]
        )

    assert stop.warned
    assert [path.name for path in tmp_path.glob("*.pt")] == ["step-00000002.pt"]
