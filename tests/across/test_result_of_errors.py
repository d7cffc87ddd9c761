"""What ends a call of `fit` early has the result so far: Ctrl-C in a notebook loses nothing."""

import os
import signal
import sys

import pytest
import torch

import autoaccum
from support.training.long_runs import Run, StopAt, StoppedError


class InterruptsAfter(autoaccum.Callback):
    """SIGINT arrives in the middle of the window after so many."""

    def __init__(self, steps):
        self.steps = steps

    def on_step(self, report, *, epoch):
        self.steps -= 1

    def loss(self, outputs, batch):
        if self.steps == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return torch.nn.functional.cross_entropy(outputs, batch[1])


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("is_interactive", [False, True])
def test_interrupt_in_a_window_leaves_the_result_of_the_windows_before(tmp_path, capsys, monkeypatch, is_interactive):
    if is_interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    run, interrupts = Run(checkpoint=tmp_path, progress="lines"), InterruptsAfter(2)

    with pytest.raises(KeyboardInterrupt) as caught:
        run.fit(interrupts, loss=interrupts.loss)

    result = caught.value.result
    assert (result.steps, len(result.history), result.stopped) == (2, 2, "KeyboardInterrupt")
    assert result.last_loss == result.history[-1].loss
    assert result.checkpoint == tmp_path / "step-00000002"
    said = capsys.readouterr().err
    assert "interrupted after step 2" in said
    assert ("sys.last_value.result is the result so far" in said) == is_interactive
    expected = Run(max_steps=2)
    expected.fit(val_loader=None)
    assert run.end["model"] == expected.end["model"]


def test_every_error_has_the_result():
    with pytest.raises(StoppedError) as caught:
        Run().fit(StopAt(4))

    assert (caught.value.result.steps, caught.value.result.stopped) == (4, "StoppedError")
    assert not hasattr(caught.value, "__notes__")


def test_callbacks_are_told_that_there_was_an_error_as_before():
    ended = []

    class Ends(autoaccum.Callback):
        def on_fit_end(self, result):
            ended.append(result)

    with pytest.raises(StoppedError):
        Run().fit(StopAt(4), Ends())

    assert ended == [None]


def test_error_that_takes_no_attribute_or_has_one_arrives_unchanged():
    class Own(Exception):  # noqa: N818
        result = "the user's own"

    class Refuses(Exception):  # noqa: N818
        def __setattr__(self, name, value):
            if name == "result":
                raise TypeError
            super().__setattr__(name, value)

    for kind in (Own, Refuses):

        class Raises(autoaccum.Callback):
            def on_step(self, report, *, epoch):
                raise kind  # noqa: B023 - called at once

        with pytest.raises(kind) as caught:
            Run().fit(Raises())
        assert getattr(caught.value, "result", None) in ("the user's own", None)


class RaisesAt(autoaccum.Callback):
    def __init__(self, event, error):
        self.event, self.error = event, error

    def __getattribute__(self, name):
        if name in ("event", "error") or name != self.event:
            return object.__getattribute__(self, name)
        return self.fail

    def fail(self, *_, **__):
        raise self.error


def test_instance_that_is_raised_again_has_the_result_of_the_call_that_it_ended():
    error = StoppedError()
    for steps in (2, 1):

        class Raises(StopAt):
            def on_step(self, report, *, epoch):
                if report.step == self.step:
                    raise error

        with pytest.raises(StoppedError):
            Run().fit(Raises(steps))

        assert error.result.steps == len(error.result.history) == steps


def test_error_in_on_fit_end_has_the_result_of_the_finished_training(tmp_path):
    ended, told = [], autoaccum.Callback()
    told.on_fit_end = ended.append

    with pytest.raises(StoppedError) as caught:
        Run(checkpoint=tmp_path).fit(RaisesAt("on_fit_end", StoppedError()), told)

    result = caught.value.result
    assert (result.steps, result.stopped) == (15, "StoppedError")
    assert [one.steps for one in ended] == [15]


def test_error_in_on_fit_end_is_a_note_on_the_error_that_ended_the_training():
    with pytest.raises(StoppedError) as caught:
        Run().fit(StopAt(4), RaisesAt("on_fit_end", ValueError("no such table")))

    assert caught.value.result.steps == 4
    assert any("another error followed (ValueError: no such table)" in note for note in caught.value.__notes__)


def test_interrupt_in_on_fit_end_comes_before_the_error_that_ended_the_training():
    with pytest.raises(KeyboardInterrupt) as caught:
        Run().fit(StopAt(4), RaisesAt("on_fit_end", KeyboardInterrupt()))

    assert caught.value.result.steps == 4
    assert isinstance(caught.value.__context__, StoppedError)


@pytest.mark.parametrize(("micro_batch", "plan"), [(5, (4, 4, 4)), ("auto", (12,))])
def test_error_before_the_first_window_has_a_result_of_no_steps(micro_batch, plan):
    with pytest.raises(KeyboardInterrupt) as caught:
        Run(micro_batch=micro_batch).fit(RaisesAt("on_fit_start", KeyboardInterrupt()))

    result = caught.value.result
    assert (result.steps, result.samples, result.history, result.stopped) == (0, 0, (), "KeyboardInterrupt")
    assert result.plan.micro_batches == plan
    assert result.plans == ((1, result.plan),)


def test_error_in_an_argument_has_none():
    with pytest.raises(autoaccum.InvalidInputError) as caught:
        Run(epochs=0).fit()

    assert not hasattr(caught.value, "result")
