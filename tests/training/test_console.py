"""Progress: what is drawn, where, and how rarely the device is waited for.

By the callbacks themselves, with records and a clock of the test's: lines to the letter, and times left.
"""

import dataclasses
import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from autoaccum._records import DeviceScalar  # an argument
from autoaccum._training import console as progress_module
from autoaccum._training.console import LineProgress, RichProgress, progress_for
from support.data.records import EVALUATION, MIB, OOM, PLAN, PROBE, TRIALS, CountingScalar, fit_result, step_report


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress_module.time, "monotonic", clock)
    return clock


def in_lines(every_s=0.0, epochs=1, max_steps=None, steps_per_epoch=None, **options):
    """A LineProgress at the start of a run, and what it wrote."""
    file = io.StringIO()
    shown = LineProgress(every_s=every_s, **options)
    shown._say = lambda text, _: file.write(f"autoaccum: {text}\n")
    shown.on_fit_start(epochs=epochs, max_steps=max_steps, steps_per_epoch=steps_per_epoch)
    return shown, file


@pytest.fixture
def bar():
    """A RichProgress in a run of 3 epochs of 15 steps on a wide terminal, and what it drew."""
    file = io.StringIO()
    shown = RichProgress(Console(file=file, force_terminal=True, width=300), capacity_bytes=1024 * MIB)
    shown.on_fit_start(epochs=3, max_steps=None, steps_per_epoch=15)
    yield shown, file
    shown.on_fit_end(None)


SUMMARY = [
    "done: 2 optimizer steps, 200 samples in 12.5 s",
    "loss of the last step: 0.25",
    "last of 1 evaluations: loss 0.5, accuracy 0.9375 (360 samples)",
    "micro-batches: 3 of at most 34 samples",
    "ran out of memory: 1 time",
    "time besides steps: search 0.5 s, waiting for data 5.0 s",
]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def plain(file):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


@pytest.mark.parametrize("asked", ["auto", True])
def test_auto_draws_a_bar_where_stderr_is_a_terminal(monkeypatch, asked):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")

    assert isinstance(progress_for(asked), RichProgress)


def test_auto_writes_lines_where_stderr_is_a_file_even_if_colour_is_forced(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")

    assert isinstance(progress_for("auto"), LineProgress)


def test_lines_tell_a_run_in_order_and_what_is_not_said_twice(clock):
    shown, file = in_lines(epochs=3, steps_per_epoch=15, capacity_bytes=1024 * MIB)
    for trial in TRIALS:
        shown.on_trial(trial)
    clock.now += 1.0
    shown.on_step(step_report(1), epoch=1)  # no time left while sizes are searched for
    shown.on_plan(PLAN, step=1, probe=PROBE)
    for step in (2, 3):
        clock.now += 1.0
        if step == 3:
            shown.on_oom(OOM, step=3)
        shown.on_step(step_report(step), epoch=1)
    shown.on_epoch_end(1)
    shown.on_evaluation(EVALUATION, epoch=1, step=15)
    shown.on_fit_end(dataclasses.replace(fit_result(), time_spent={"search": 0.5, "waiting for data": 5.0}))

    said = [line.removeprefix("autoaccum: ") for line in file.getvalue().splitlines()]
    assert said == [
        "trial of 100: does not fit, 0.5 s",
        "trial of 37: fits, peak 500.0 MiB, 0.25 s",
        "epoch 1/3, step 1/45: loss 0.25, 100 samples/s, micro-batches 34+33+33, peak 512.0 MiB of 1.0 GiB",
        "plan from step 1: target batch 100; micro-batches 34+33+33",
        "epoch 1/3, step 2/45: loss 0.25, 100 samples/s, 43 s left",
        "out of memory in step 3, backward of 34 samples: CUDA out of memory.",
        "epoch 1/3, step 3/45: loss 0.25, 100 samples/s, 42 s left, 1 oom",
        "epoch 1 done, step 3/45: loss 0.25, 100 samples/s, 42 s left",
        "evaluation after epoch 1: loss 0.5, accuracy 0.9375 (360 samples, 1.5 s)",
        *SUMMARY,
    ]


def test_time_left_is_of_the_samples_of_all_ranks(clock):
    shown, file = in_lines(max_steps=10)
    for step in (1, 2):
        clock.now += 1.0
        shown.on_step(step_report(step, samples=400, micro_batches=(34, 33, 33)), epoch=1)

    assert "step 2/10: loss 0.25, 400 samples/s, 8 s left" in file.getvalue()


def test_lines_tell_a_step_and_wait_for_the_device_only_when_the_last_line_is_long_enough_ago(clock):
    shown, file = in_lines(every_s=10.0, epochs=3, steps_per_epoch=15)
    losses = [CountingScalar(0.5) for _ in range(30)]

    for step, loss in enumerate(losses, start=1):
        clock.now += 1.0
        shown.on_step(step_report(step, loss=loss), epoch=1 + (step - 1) // 15)

    assert [line.split(":")[1] for line in file.getvalue().splitlines()] == [
        " epoch 1/3, step 10/45",
        " epoch 2/3, step 20/45",
        " epoch 2/3, step 30/45",
    ]
    assert [step for step, loss in enumerate(losses, start=1) if loss.reads] == [10, 20, 30]


def test_a_step_line_of_a_target_in_tokens_tells_updates_and_micro_batches_of_the_last_window(clock):
    shown, file = in_lines(max_steps=4, counts="tokens")

    for step, sizes in enumerate([(1, 2, 2, 9), (2, 3)], 1):
        clock.now += 2.0
        shown.on_step(step_report(step, samples=sum(sizes), micro_batches=sizes), epoch=1)

    first, second = file.getvalue().splitlines()
    assert "0.5 steps/s, 6 s left, in 4 micro-batches of 1 to 9 samples" in first
    assert "0.5 steps/s, 4 s left, in 2 micro-batches of 2 to 3 samples" in second


def test_a_step_line_tells_the_learning_rate_once_it_has_changed(clock):
    shown, file = in_lines(steps_per_epoch=2)
    for step, rate in enumerate((0.5, 0.25, 0.5), 1):
        shown.on_step(step_report(step, device_learning_rates=(DeviceScalar(rate),)), epoch=1)

    first, second, third = file.getvalue().splitlines()
    assert "lr" not in first
    assert "lr 0.25," in second
    assert "lr 0.5," in third


@pytest.mark.parametrize("shown", [LineProgress(), RichProgress(Console(stderr=True, force_terminal=True))])
def test_after_an_error_no_summary_is_written_and_no_loss_is_read(shown, capsys):
    loss = CountingScalar(0.5)
    shown.on_fit_start(epochs=1, max_steps=None, steps_per_epoch=None)
    shown._last_shown = float("inf")  # no picture for the step, so that only the end could read it
    shown.on_step(step_report(1, loss=loss), epoch=1)

    shown.on_fit_end(None)

    assert "done" not in capsys.readouterr().err
    assert loss.reads == 0


def test_the_bar_shows_figures_below_trials_plan_and_memory_and_ends_with_a_summary(bar):
    shown, file = bar

    shown.on_trial(TRIALS[1])
    shown.on_plan(PLAN, step=1, probe=PROBE)
    shown.on_oom(OOM, step=3)
    shown.on_evaluation(EVALUATION, epoch=1, step=15)
    shown.on_step(step_report(16), epoch=2)
    shown.on_fit_end(dataclasses.replace(fit_result(), time_spent={"search": 0.5, "waiting for data": 5.0}))

    text = plain(file)
    for part in (
        "trial of 37: fits",
        "plan from step 1",
        "34+33+33",
        "out of memory in step 3, backward of 34 samples",
        "accuracy 0.9375",
        "epoch 2/3",
        "16/45",
        "loss 0.25",
        "micro-batches 34+33+33, peak 512.0 MiB of 1.0 GiB, 1 oom",
        *SUMMARY,
    ):
        assert part in text


def test_the_bar_is_drawn_and_the_device_waited_for_at_most_five_times_a_second(clock):
    shown = RichProgress(Console(file=io.StringIO(), force_terminal=True, width=120))
    shown.on_fit_start(epochs=1, max_steps=None, steps_per_epoch=None)
    losses = [CountingScalar(0.5) for _ in range(100)]

    for step, loss in enumerate(losses, start=1):
        clock.now += 0.0101
        shown.on_step(step_report(step, loss=loss), epoch=1)
    shown.on_fit_end(None)

    assert 1 <= sum(bool(loss.reads) for loss in losses) <= 6


def test_the_bar_leaves_stdout_alone_where_stdout_is_no_terminal(capsys):
    shown = RichProgress(Console(stderr=True, force_terminal=True))
    shown.on_fit_start(epochs=1, max_steps=None, steps_per_epoch=None)

    print("a result")  # noqa: T201 - what a user's script does
    shown.on_fit_end(None)

    assert capsys.readouterr().out == "a result\n"


def test_the_bar_gives_stderr_and_the_cursor_back_after_an_error():
    file = io.StringIO()
    before = sys.stderr
    shown = RichProgress(Console(file=file, force_terminal=True))
    shown.on_fit_start(epochs=1, max_steps=None, steps_per_epoch=None)

    shown.on_fit_end(None)

    assert sys.stderr is before
    assert file.getvalue().rfind("\x1b[?25h") > file.getvalue().rfind("\x1b[?25l")


@pytest.mark.parametrize(("steps", "text"), [(2, "1 s"), (121, "2 min"), (7201, "2.0 h")])
def test_lines_tell_the_time_left(clock, steps, text):
    shown, file = in_lines(max_steps=steps)
    clock.now += 1.0

    shown.on_step(step_report(1), epoch=1)

    assert f"100 samples/s, {text} left, micro-batches" in file.getvalue()


def test_lines_count_on_from_a_checkpoint():
    shown, file = in_lines(every_s=60.0, epochs=3, steps_per_epoch=15)

    shown.on_resume(Path("run/step-00000020"), step=20, epoch=2)
    shown.on_epoch_end(2)
    shown._every_s = 0.0
    shown.on_step(step_report(21), epoch=2)

    (line,) = file.getvalue().splitlines()
    assert line.startswith("autoaccum: epoch 2/3, step 21/45: loss 0.25")
    assert line.endswith(", saved at step 20")
