"""What ends a call of `fit` early has the result so far: Ctrl-C in a notebook loses nothing."""

import os
import signal

import pytest
import torch

import autoaccum
from long_runs import Run, StopAt, StoppedError


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
def test_interrupt_in_a_window_leaves_the_result_of_the_windows_before(tmp_path, capsys):
    run, interrupts = Run(checkpoint=tmp_path, progress="lines"), InterruptsAfter(2)

    with pytest.raises(KeyboardInterrupt) as caught:
        run.fit(interrupts, loss=interrupts.loss)

    result = caught.value.result
    assert (result.steps, len(result.history), result.stopped) == (2, 2, "KeyboardInterrupt")
    assert result.last_loss == result.history[-1].loss
    assert result.checkpoint == tmp_path / "step-00000002.pt"
    assert "interrupted after step 2; the result so far is the attribute 'result'" in capsys.readouterr().err
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


def test_error_before_the_first_window_is_prepared_has_none():
    with pytest.raises(autoaccum.InvalidInputError) as caught:
        Run(loader=list).fit()

    assert not hasattr(caught.value, "result")
