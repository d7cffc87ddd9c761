"""A callback ends a training early: the run is complete, says why, and goes on only if another length is asked for."""

import json

import pytest
import torch

import autoaccum
from autoaccum.errors import InvalidInputError
from support.training.long_runs import EPOCHS, STEPS_PER_EPOCH, Run


class Asks(autoaccum.Callback):
    """Asks to stop at one event, and notes what it is told."""

    def __init__(self, event, answer, at=1):
        self.told = []
        self.result = None
        for name in [name for name in vars(autoaccum.Callback) if name.startswith("on_")]:
            setattr(self, name, self.hears(name, answer if name == event else lambda: None, at))

    def hears(self, name, answer, at):
        def heard(*arguments, **keywords):
            self.told.append(name)
            self.result = arguments[0] if name == "on_fit_end" else None
            return answer() if self.told.count(name) == at else None

        return heard


def raised():
    raise autoaccum.StopTraining("good enough")


def test_stop_after_a_window_ends_like_max_steps_there_and_says_why():
    asks, other = Asks("on_step", raised, at=7), Asks(None, None)
    run = Run()

    result = run.fit(asks, other)
    expected = Run(max_steps=7)  # which seeds the generators anew
    expected.fit()

    assert result.steps == len(result.history) == 7
    assert result.stopped == "good enough"
    assert run.end == expected.end
    assert len(result.evaluations) == len(expected.result.evaluations) == 2
    assert other.told == asks.told
    assert other.told[-3:] == ["on_epoch_end", "on_evaluation", "on_fit_end"]
    assert other.result is result


@pytest.mark.parametrize(
    ("event", "steps"),
    [("on_fit_start", 0), ("on_plan", 0), ("on_epoch_end", STEPS_PER_EPOCH), ("on_evaluation", STEPS_PER_EPOCH)],
)
def test_stop_at_other_events_takes_effect_after_what_is_under_way(event, steps):
    result = Run().fit(Asks(event, raised))

    assert result.steps == steps
    assert result.stopped == "good enough"
    assert len(result.evaluations) == (1 if steps else 0)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_stopped_run_is_complete_for_the_same_call(tmp_path, capsys):
    Run(checkpoint=tmp_path).fit(Asks("on_step", raised, at=7))

    result = Run(checkpoint=tmp_path, progress="lines").fit()

    assert (result.steps, result.history, result.stopped) == (7, (), "good enough")
    assert "7 steps are done and it was stopped (good enough), so there is nothing to do" in capsys.readouterr().err


@pytest.mark.parametrize("event", ["on_epoch_end", "on_step"])
def test_call_of_another_length_goes_on_where_the_run_was_stopped(tmp_path, event):
    undisturbed = Run(scheduler=lambda it: torch.optim.lr_scheduler.StepLR(it, 4, gamma=0.5))
    undisturbed.fit()
    at = 1 if event == "on_epoch_end" else STEPS_PER_EPOCH + 2
    Run(checkpoint=tmp_path, epochs=2).fit(Asks(event, raised, at=at))

    run = Run(checkpoint=tmp_path, epochs=EPOCHS)
    result = run.fit()

    assert result.resumed_from == (STEPS_PER_EPOCH if event == "on_epoch_end" else at)
    assert (result.steps, result.stopped) == (EPOCHS * STEPS_PER_EPOCH, None)
    assert run.end == undisturbed.end


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_progress_and_logs_say_why(tmp_path, capsys):
    log = tmp_path / "log.jsonl"

    Run(progress="lines").fit(Asks("on_step", raised, at=2), autoaccum.JSONLinesLog(log))

    assert "stopped early: good enough\n" in capsys.readouterr().err
    assert json.loads(log.read_text().splitlines()[-1])["stopped"] == "good enough"


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "at", "steps"), [("on_step", 2, 3), ("on_epoch_end", 1, 4), ("on_step", 4, 4), ("on_evaluation", 1, 3)]
)
def test_one_rank_that_asks_stops_all_after_the_same_window(rank_pool, event, at, steps):
    found = rank_pool.run("training:stopping", size=2, who=1, event=event, at=at)

    assert [(one["steps"], one["stopped"]) for one in found] == [(steps, "good enough")] * 2
    for one, other in zip(*(one["parameters"] for one in found), strict=True):
        assert torch.equal(one, other)


class Improving:
    def __init__(self, *values):
        self.left = list(values)

    def __call__(self, outputs, batch):
        return self.left[0]


class Next(autoaccum.Callback):
    def __init__(self, metric):
        self.metric = metric

    def on_evaluation(self, evaluation, *, epoch, step):
        self.metric.left.pop(0)


def evaluated(*values, **stopping):
    metric = Improving(*values)
    early = autoaccum.EarlyStopping(monitor="mine", **stopping)
    return Run(epochs=len(values)).fit(early, Next(metric), metrics={"mine": metric})


def test_early_stopping_ends_where_nothing_has_improved_for_a_while():
    result = evaluated(3.0, 2.0, 2.0, 2.5, 1.0, patience=2)

    assert len(result.evaluations) == 4
    assert result.stopped == "mine has not improved in 2 evaluations"


def test_early_stopping_without_what_it_waits_for_is_refused():
    with pytest.raises(InvalidInputError, match="monitor='loos' is not among what is evaluated: 'loss'"):
        Run().fit(autoaccum.EarlyStopping(monitor="loos"))


def test_early_stop_at_the_lowest_loss_so_far_is_kept_too(tmp_path):
    def stopped():
        metric = Improving(1.0, 2.0, 3.0)
        early = autoaccum.EarlyStopping(patience=1, monitor="mine")
        return Run(checkpoint=tmp_path).fit(early, Next(metric), metrics={"mine": metric})

    first, again = stopped(), stopped()

    assert first.checkpoint == first.best_checkpoint
    assert (again.resumed_from, again.steps, again.stopped) == (first.steps, first.steps, first.stopped)
