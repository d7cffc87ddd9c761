"""The logs: every event kept, in order, without holding training up for a loss."""

import json
import math
from pathlib import Path

import pytest

from autoaccum._records import DeviceScalar  # an argument
from autoaccum._training.loggers import JSONLinesLog
from autoaccum.errors import InvalidInputError
from support.data.records import (
    EVALUATION,
    MIB,
    OOM,
    PLAN,
    PROBE,
    TRIALS,
    CountingScalar,
    LostScalar,
    fit_result,
    step_report,
)


def started(log):
    log.on_fit_start(epochs=2, max_steps=None, steps_per_epoch=15)
    return log


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_time(event):
    return {key: value for key, value in event.items() if key != "time"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.jsonl"


@pytest.fixture
def log(path):
    """A log of a run that has begun, and that ends with the test."""
    log = started(JSONLinesLog(path))
    yield log
    log.on_fit_end(None)


# As the docstring of JSONLinesLog says.
KEYS = {
    "fit_start": "epochs max_steps steps_per_epoch",
    "trial": "size fits peak_bytes elapsed_s",
    "plan": "step target_batch micro_batches micro_batch accum_steps probe",
    "step": "step epoch samples loss losses micro_batches oom_events elapsed_s peak_bytes grad_norm skipped "
    "learning_rates noise_scale repeats",
    "oom": "step phase size message",
    "epoch_end": "epoch",
    "evaluation": "epoch step loss metrics samples elapsed_s losses",
    "checkpoint": "step path",
    "resume": "step epoch path",
    "fit_end": "completed steps samples oom_events elapsed_s stopped noise_scale",
}


def test_the_keys_of_each_event_are_the_documented_ones(path, log):
    log.on_trial(TRIALS[1])
    log.on_plan(PLAN, step=1, probe=PROBE)
    log.on_step(step_report(1, loss=0.25), epoch=1)
    log.on_oom(OOM, step=2)
    log.on_epoch_end(1)
    log.on_evaluation(EVALUATION, epoch=1, step=1)
    log.on_checkpoint(Path("run/step-00000002"), step=2)
    log.on_resume(Path("run/step-00000002"), step=2, epoch=1)

    log.on_fit_end(fit_result())

    found = {event["event"]: event for event in events(path)}
    assert {name: event.keys() - {"event", "time"} for name, event in found.items()} == {
        name: set(keys.split()) for name, keys in KEYS.items()
    }
    probe = {"micro_batch": 37, "limit_bytes": 600 * MIB, "fixed_bytes": 120 * MIB, "bytes_per_sample": 10 * MIB}
    assert (found["plan"]["micro_batches"], found["plan"]["probe"]) == ([34, 33, 33], probe)
    assert (found["step"]["losses"], found["step"]["learning_rates"]) == ({"loss": 0.25}, [0.5])
    assert found["evaluation"]["metrics"] == {"accuracy": 0.9375}
    assert found["resume"]["path"] == "run/step-00000002"


def test_a_steps_loss_is_read_when_the_next_step_is_done_and_not_before(log):
    losses = [CountingScalar(0.5), CountingScalar(0.25)]

    reads = []
    for step, loss in enumerate(losses, start=1):
        log.on_step(step_report(step, loss=loss), epoch=1)
        reads.append([bool(loss.reads) for loss in losses])

    assert reads == [[False, False], [True, False]]


@pytest.mark.parametrize(("loss", "kept"), [(0.25, ["step"]), (LostScalar(0.0), [])], ids=["known", "device lost"])
def test_a_run_that_raised_keeps_its_last_step_if_it_can_and_says_that_it_did_not_complete(path, log, loss, kept):
    log.on_step(step_report(1, loss=loss), epoch=1)

    log.on_fit_end(None)

    assert [event["event"] for event in events(path)] == ["fit_start", *kept, "fit_end"]
    assert without_time(events(path)[-1]) == {"event": "fit_end", "completed": False}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_null_and_the_line_stays_json(path, log, number):
    log.on_step(step_report(1, loss=number, device_grad_norm=DeviceScalar(number)), epoch=1)

    log.on_epoch_end(1)

    step = events(path)[1]
    assert (step["loss"], step["losses"], step["grad_norm"]) == (None, {"loss": None}, None)


def test_a_log_that_cannot_be_opened_is_refused_by_its_path(tmp_path):
    with pytest.raises(InvalidInputError, match=r"cannot be opened for writing \(Is a directory\)"):
        started(JSONLinesLog(tmp_path))


def test_line_that_a_killed_process_left_cut_short_spoils_no_other(path):
    path.write_text('{"event": "fit_start"}\n{"event": "st')

    started(JSONLinesLog(path)).on_fit_end(None)

    lines = path.read_text().splitlines()
    assert lines[1] == '{"event": "st'
    assert [json.loads(line)["event"] for line in lines[2:]] == ["fit_start", "fit_end"]
