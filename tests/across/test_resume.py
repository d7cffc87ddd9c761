"""A run that is interrupted and started again ends where the undisturbed run ends, to the last bit."""

import functools
import itertools
import json
import multiprocessing
import os
import subprocess
import threading

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import autoaccum
from support.faults.places import Fault
from support.models.small import a_few_of, fit_quietly
from support.processes import fork_server
from support.processes.folders import SUPPORT, TESTS
from support.training.long_runs import (
    EPOCHS,
    SAMPLES,
    STEPS_PER_EPOCH,
    Model,
    Noisy,
    Run,
    StopAt,
    StoppedError,
    checkpoints,
    loader_of,
    stopped_at,
)
from support.training.resumes import OF_TOKENS, RESUMES, UNEVEN, Stateful, changes_of

STEPS = EPOCHS * STEPS_PER_EPOCH


# torchdata 0.11 calls a function that torch 2.15 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


# --- stopped at a given moment ----------------------------------------------------------------------------------------


@functools.cache
def whole_run(name):
    """A run from start to end without any checkpoint; made once for all that are to end like it."""
    run = Run(**changes_of(name))
    run.fit()
    run.loader = None  # else its worker processes would stay
    return run


def stops():
    """Each run of the table at its first stop, the slow tests have the others, and the sweeps more."""
    for name, (_, places) in RESUMES.items():
        for number, place in enumerate(places):
            is_slow = number and name != "plain"
            yield pytest.param(name, place, id=f"{name}-{place}", marks=pytest.mark.slow if is_slow else ())
        if "loader" in changes_of(name) and "once" not in name:
            for place in {2, STEPS_PER_EPOCH, 8}.difference(one for one in places if isinstance(one, int)):
                yield pytest.param(name, place, id=f"{name}-{place}", marks=pytest.mark.sweep)


@pytest.mark.parametrize(("name", "stop"), list(stops()))
def test_run_that_was_stopped_goes_on_as_if_nothing_had_happened(tmp_path, name, stop):
    whole = whole_run(name)
    parts = []
    for place in stop if isinstance(stop, tuple) else (stop,):
        parts.append(stopped_at(place, tmp_path, **changes_of(name)))
        parts[-1].loader = None
    done = max(parts[-1].samples.windows)
    last = Run(checkpoint=tmp_path, **changes_of(name))

    result = last.fit()

    assert last.end == whole.end
    assert result.resumed_from == done
    assert (result.steps, result.samples) == (whole.result.steps, whole.result.samples)
    assert (result.noise_scale, result.stopped) == (whole.result.noise_scale, None)
    assert result.checkpoint == tmp_path / f"step-{result.steps:08d}"
    # Step by step: what was used, what a gradient scaler skipped, and what was evaluated.
    runs = [*parts, last]
    assert windows_of(*runs) == windows_of(whole)
    assert [(one.step, one.skipped) for one in result.history] == [
        (one.step, one.skipped) for one in whole.result.history[done:]
    ]
    if not isinstance(stop, dict):  # a call that ends makes an evaluation of its own
        assert list(itertools.chain(*(run.samples.evaluations for run in runs))) == whole.samples.evaluations


def windows_of(*runs):
    """The samples of each window; their order may differ where the loss is checked."""
    return {step: set(samples) for run in runs for step, samples in run.samples.windows.items()}


# --- killed at any moment ---------------------------------------------------------------------------------------------


KILLS, TERMINATIONS = 6, 2


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """Runs whose processes were ended at random moments; `python scripts/attack.py kills` makes many more."""
    folder = tmp_path_factory.mktemp("lives")
    script = SUPPORT / "faults" / "kills.py"
    arguments = [str(KILLS), str(TERMINATIONS), "0"]
    command = [*fork_server.python(), "-W", "error", script, folder, *arguments]
    subprocess.run(command, check=True, timeout=250, env=os.environ | {"PYTHONPATH": str(TESTS)})
    return folder


def seen_in(lives, name):
    return json.loads((lives / "seen.json").read_text())[name]


def entries(run):
    """What a run noted, without the line that a kill cut short."""
    lines = (run / "log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("]")]


def windows_used(run):
    """The samples of each window that the run's end was made from: those beyond a resumed step are void."""
    windows = {}
    for kind, step, *samples in entries(run):
        if kind == "resume":
            windows = {earlier: used for earlier, used in windows.items() if earlier <= step}
        else:
            if step == 1:
                windows = {}  # a life before was killed without any checkpoint
            assert step not in windows
            windows[step] = samples[0]
    return windows


def runs_in(lives, name):
    return sorted(lives.glob(f"{name}-*"))


@pytest.mark.slow  # its processes are killed
def test_kills_fell_while_the_run_was_at_work(lives):
    assert sum(done for done, _ in seen_in(lives, "SIGKILL")) == KILLS
    assert sum(kind == "resume" for run in runs_in(lives, "SIGKILL") for kind, *_ in entries(run)) >= KILLS // 2


@pytest.mark.slow  # its processes are killed
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_run_ended_again_and_again_ends_bitwise_where_the_undisturbed_run_ends(lives, name):
    undisturbed = torch.load(lives / "undisturbed" / "end", weights_only=True)

    for run in runs_in(lives, name):
        assert torch.load(run / "end", weights_only=True) == undisturbed


@pytest.mark.slow  # its processes are killed
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_run_ended_again_and_again_uses_each_sample_once_an_epoch_and_in_the_same_order(lives, name):
    undisturbed = windows_used(lives / "undisturbed")
    used = [sample for step in sorted(undisturbed) for sample in undisturbed[step]]
    assert all(sorted(used[start : start + SAMPLES]) == list(range(SAMPLES)) for start in range(0, len(used), SAMPLES))

    for run in runs_in(lives, name):
        windows = windows_used(run)
        # SIGTERM may come when a window is done, and before it could be noted; then a checkpoint of it is there.
        unnoted = set() if name == "SIGKILL" else {step for kind, step, *_ in entries(run) if kind == "resume"}
        assert undisturbed.keys() - windows.keys() <= unnoted
        assert all(windows[step] == undisturbed[step] for step in windows)


@pytest.mark.slow  # its processes are killed
def test_sigterm_ends_the_process_as_it_would_have_with_a_checkpoint_of_the_last_whole_window(lives):
    # Each of them by the signal, which the script has looked at.
    assert sum(done for done, _ in seen_in(lives, "SIGTERM")) == TERMINATIONS

    resumed = 0
    for run in runs_in(lives, "SIGTERM"):
        noted = entries(run)
        for before, entry in itertools.pairwise(noted):
            if entry[0] == "resume":
                assert entry[1] - before[1] in (0, 1)  # 1: it came before the window could be noted
                resumed += 1
    assert resumed > 0


# --- errors -----------------------------------------------------------------------------------------------------------


class FailingData(Noisy):
    def __init__(self, fail):
        super().__init__()
        self.fail = fail

    def __getitem__(self, index):
        self.fail()
        return super().__getitem__(index)


class Counting(Model):
    """Counts its passes, in evaluations too, so that each leaves a trace."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs):
        self.passes += 1
        return super().forward(inputs) * (1 + 0.01 * self.passes)


class Draws(autoaccum.Callback):
    """Draws random numbers between windows."""

    def on_step(self, report, *, epoch):
        torch.rand(report.step)

    def on_evaluation(self, evaluation, *, epoch, step):
        torch.rand(1)


# At which call of the place an error comes, in the second epoch.
PLACES = {"loader": SAMPLES + 25, "forward": 23, "metric": 2, "on_step": 7, "on_epoch_end": 2, "on_evaluation": 2}


def fit_that_fails(run, place, fail):
    """Train with one part that may raise an error."""
    callbacks, options = [Draws()], {}
    if place.startswith("on_"):
        callbacks.append(autoaccum.Callback())
        setattr(callbacks[-1], place, lambda *_, **__: fail())
    elif place == "metric":
        options["metrics"] = lambda outputs, batch: fail() or 0.0
    elif place == "forward":
        own = run.model.last.weight  # and no copy, by which gradients are compared
        run.model.last.register_forward_pre_hook(
            lambda module, _: fail() if module.training and module.weight is own else None
        )
    return run.fit(*callbacks, **options)


@functools.cache
def undisturbed():
    run = Run(model=Counting)
    run.fit(Draws())
    return run.end


@pytest.mark.parametrize(("place", "kind"), a_few_of(PLACES, [ValueError, KeyboardInterrupt, SystemExit]))
def test_error_anywhere_arrives_unchanged_and_leaves_a_checkpoint_to_go_on_from(tmp_path, place, kind):
    error = kind(3)  # made here: with its traceback it would keep a model alive for the tests to come
    fail = Fault(PLACES[place] - 1, error=error)
    data = FailingData(fail) if place == "loader" else Noisy()
    run = Run(model=Counting, checkpoint=tmp_path, loader=lambda: loader_of(data))

    with pytest.raises(kind) as caught:
        fit_that_fails(run, place, fail)

    assert caught.value is error
    assert any(entry.name == "__call__" for entry in caught.traceback)  # the line of the user's that raised it
    notes = getattr(error, "__notes__", [])  # one on sizes, which a model may refuse
    assert all("it came in a micro-batch of" in note and place == "forward" for note in notes)
    again = Run(model=Counting, checkpoint=tmp_path)
    assert again.fit(Draws()).resumed_from is not None
    assert again.end == undisturbed()


def test_error_leaves_no_worker_processes_behind(tmp_path):
    loader = loader_of(Noisy(), num_workers=2)

    with pytest.raises(StoppedError):
        Run(checkpoint=tmp_path, loader=lambda: loader).fit(StopAt(2))

    assert multiprocessing.active_children() == []


def test_error_that_leaves_parameters_changed_leaves_no_checkpoint_of_them(tmp_path):
    class WritesItself(Model):
        def forward(self, inputs):
            with torch.no_grad():
                self.first.weight.clamp_(-0.2, 0.2)
            return super().forward(inputs)

    stopped_at(2, tmp_path, model=WritesItself)
    before = checkpoints(tmp_path)
    run = Run(model=WritesItself, checkpoint=tmp_path)

    with pytest.raises(ValueError, match="mine") as caught:
        fit_that_fails(run, "forward", Fault(1, error=ValueError("mine")))

    assert any("had written first.weight" in note for note in caught.value.__notes__)
    assert checkpoints(tmp_path) == before


def test_error_before_the_first_window_leaves_no_checkpoint(tmp_path):
    data = FailingData(Fault(2, error=ValueError("mine")))

    with pytest.raises(ValueError, match="mine"):
        Run(checkpoint=tmp_path, loader=lambda: loader_of(data)).fit()

    assert checkpoints(tmp_path) == []


def test_error_of_the_loader_while_it_is_wound_arrives_unchanged(tmp_path):
    stopped_at(4, tmp_path)
    mine = ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        Run(checkpoint=tmp_path, loader=lambda: loader_of(FailingData(Fault(8, error=mine)))).fit()

    assert caught.value is mine


# --- loaders with a state ---------------------------------------------------------------------------------------------


class CountedData(Noisy):
    drawn = 0

    def __getitem__(self, index):
        CountedData.drawn += 1
        return super().__getitem__(index)


def test_stateful_loader_is_not_wound(tmp_path):
    options = {"loader": lambda: loader_of(CountedData(), StatefulDataLoader), "epochs": 1, "val_loader": None}
    stopped_at(4, tmp_path, **options)
    CountedData.drawn = 0

    Run(checkpoint=tmp_path, **options).fit()

    assert CountedData.drawn == SAMPLES - 4 * 12 + 6  # the rest, and the used part of the batch that window 4 began


@pytest.mark.parametrize(
    ("sizes", "options"),
    [((1,) * SAMPLES, {}), ((7,) * 7 + (1,), {"drop_last": True}), (UNEVEN, {}), (UNEVEN, OF_TOKENS)],
    ids=["one by one", "all but the last alike", "uneven", "uneven, tokens"],
)
def test_state_of_a_loader_is_asked_for_once_a_window_at_most(tmp_path, sizes, options):
    run = Run(checkpoint=tmp_path, loader=lambda: Stateful(sizes), epochs=1, val_loader=None, **options)

    result = run.fit()

    # Beside that at the beginning and the end, and one of a last batch that was shorter than those before.
    assert run.loader.asked <= result.steps + 4


def test_another_loader_may_begin_an_epoch(tmp_path):
    Run(checkpoint=tmp_path).fit(epochs=1)

    result = Run(checkpoint=tmp_path, loader=lambda: loader_of(Noisy(), batch_size=6)).fit()

    assert result.resumed_from == STEPS_PER_EPOCH


# --- ends -------------------------------------------------------------------------------------------------------------


def test_finished_run_is_loaded_and_nothing_more_is_done(tmp_path, capsys):
    first, again = Run(checkpoint=tmp_path), Run(checkpoint=tmp_path)
    first.fit()
    files = checkpoints(tmp_path)

    result = again.fit(progress="lines")

    assert again.end == first.end
    assert (result.steps, result.history, result.resumed_from) == (STEPS, (), STEPS)
    assert checkpoints(tmp_path) == files
    said = capsys.readouterr().err
    assert "is finished: 15 steps are done" in said
    assert "before this call" in said
    assert "plan from step" not in said


def test_run_killed_before_its_last_evaluation_makes_it(tmp_path):
    options = {"checkpoint": tmp_path, "max_steps": 3}
    with pytest.raises(StoppedError):
        Run(**options).fit(StopAt(3))

    result = Run(**options).fit()

    assert (result.resumed_from, result.steps, len(result.evaluations)) == (3, 3, 1)
    assert Run(**options).fit().evaluations == ()


# --- sizes of micro-batches -------------------------------------------------------------------------------------------


def test_cut_is_taken_from_the_checkpoint_and_no_size_is_tried_again(tmp_path):
    class Trials(autoaccum.Callback):
        def __init__(self):
            self.sizes = []
            self.plans = []

        def on_trial(self, trial):
            self.sizes.append(trial.size)

        def on_plan(self, plan, *, step, probe):
            self.plans.append((step, plan.micro_batches))

    first, second = Trials(), Trials()
    with pytest.raises(StoppedError):
        Run(checkpoint=tmp_path, micro_batch="auto").fit(first, StopAt(6))

    result = Run(checkpoint=tmp_path, micro_batch="auto").fit(second)

    assert first.sizes
    assert second.sizes == []
    assert second.plans == [(7, first.plans[-1][1])]
    assert [step for step, _ in result.plans] == [step for step, _ in first.plans]


@pytest.mark.parametrize(("asked", "sizes"), [(3, [4, 3]), ("auto", [4, 12])])
def test_another_cut_that_is_asked_for_is_used_from_the_next_step(tmp_path, asked, sizes):
    stopped_at(2, tmp_path)

    result = Run(checkpoint=tmp_path, micro_batch=asked).fit()

    assert [result.plans[0][1].micro_batch, result.plan.micro_batch] == sizes
    assert [step for step, _ in result.plans[:2]] == [1, 3]


def test_smaller_cut_after_memory_ran_out_is_kept_and_counted(tmp_path):
    class RunOut(Model):
        def forward(self, inputs):
            if self.training and len(inputs) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
            return super().forward(inputs)

    stopped_at(2, tmp_path, model=RunOut)

    result = Run(checkpoint=tmp_path, model=RunOut).fit()

    assert result.oom_events == 1
    assert {report.micro_batches for report in result.history if report.samples == 12} == {(3, 3, 3, 3)}
    assert [plan.micro_batch for _, plan in result.plans] == [4, 3]


# --- threads, and the best checkpoint ---------------------------------------------------------------------------------


def test_call_outside_of_the_main_thread_says_that_signals_write_no_checkpoint(tmp_path, capfd):
    def train(folder):
        model = torch.nn.Linear(3, 2)
        autoaccum.fit(model, [(torch.randn(4, 3), torch.randn(4, 2))], 4, checkpoint=folder, device="cpu")

    train(tmp_path / "main")
    in_main = capfd.readouterr().err
    thread = threading.Thread(target=train, args=(tmp_path / "other",))
    thread.start()
    thread.join()

    assert "SIGTERM" not in in_main
    assert "SIGTERM and SIGUSR1 write none, since fit was called outside of the main thread" in capfd.readouterr().err


def train(folder, **options):
    torch.manual_seed(0)
    loader = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(2)]
    return fit_quietly(nn.Linear(4, 2), loader, 4, checkpoint=folder, checkpoint_every=1, **options)


def test_equal_losses_leave_the_best_checkpoint_where_it_was_after_a_resume(tmp_path):
    options = {"val_loader": [(torch.zeros(4, 4), torch.tensor([0, 1, 0, 1]))], "metrics": None, "val_every": 1}
    optimizer = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0)}
    first = train(tmp_path, max_steps=4, **options, **optimizer)

    second = train(tmp_path, max_steps=6, **options, **optimizer)

    assert second.best_checkpoint == first.best_checkpoint


def test_best_checkpoint_that_is_damaged_is_not_the_best(tmp_path):
    options = {"val_loader": [(torch.randn(4, 4), torch.tensor([0, 1, 0, 1]))], "val_every": 1}
    options["optimizer"] = lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, maximize=True
    )  # the first is the best
    first = train(tmp_path, max_steps=6, **options)
    (first.best_checkpoint / "state.pt").write_bytes(b"")

    second = train(tmp_path, max_steps=7, **options)

    assert second.best_checkpoint != first.best_checkpoint
