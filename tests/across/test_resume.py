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
from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

import autoaccum
from autoaccum.errors import CheckpointError
from support.models.small import a_few_of, fit_quietly
from support.processes import fork_server
from support.processes.folders import SUPPORT, TESTS
from support.training.long_runs import (
    BATCH,
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

STEPS = EPOCHS * STEPS_PER_EPOCH


# torchdata 0.11 calls a function that torch 2.15 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@functools.cache
def whole_run(**options):
    """A run from start to end without any checkpoint; made once for those that are to end like it."""
    run = Run(**options)
    run.fit()
    run.loader = None  # else its worker processes would stay
    return run


def assert_goes_on_as_if_nothing_had_happened(folder, *steps, **options):
    """Stop a run after each of these steps, go on to the end, and compare with a run without any checkpoint."""
    whole = whole_run(**options)
    parts = [stopped_at(step, folder, **options) for step in steps]
    last = Run(checkpoint=folder, **options)

    result = last.fit()

    assert last.end == whole.end
    windows = {}
    for part in [*parts, last]:
        windows |= part.samples.windows
    # The window after which a part was stopped was made whole, though the stop came before it was noted.
    assert {step: windows[step] for step in windows} == {step: whole.samples.windows[step] for step in windows}
    assert result.resumed_from == steps[-1]
    return whole, last, result


# --- killed at any moment ---------------------------------------------------------------------------------------------


KILLS, TERMINATIONS = 10, 3


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


def test_kills_fell_while_the_run_was_at_work(lives):
    assert sum(done for done, _ in seen_in(lives, "SIGKILL")) == KILLS
    assert sum(kind == "resume" for run in runs_in(lives, "SIGKILL") for kind, *_ in entries(run)) >= KILLS // 2


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_run_ended_again_and_again_ends_bitwise_where_the_undisturbed_run_ends(lives, name):
    undisturbed = torch.load(lives / "undisturbed" / "end", weights_only=True)

    for run in runs_in(lives, name):
        assert torch.load(run / "end", weights_only=True) == undisturbed


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


# --- stopped at a given moment ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1, STEPS])
def test_run_stopped_after_any_window_goes_on_as_if_nothing_had_happened(tmp_path, step):
    _, _, result = assert_goes_on_as_if_nothing_had_happened(tmp_path, step)

    assert result.steps == STEPS
    assert result.samples == EPOCHS * SAMPLES
    assert [report.step for report in result.history] == list(range(step + 1, STEPS + 1))
    assert result.checkpoint == tmp_path / f"step-{STEPS:08d}"


class FailOnce:
    def __init__(self, call, error):
        self.left = call
        self.error = error

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            raise self.error


class FailingData(Noisy):
    def __init__(self, fail):
        super().__init__()
        self.fail = fail

    def __getitem__(self, index):
        self.fail()
        return super().__getitem__(index)


class FailingEvents(autoaccum.Callback):
    def __init__(self, event, fail):
        setattr(self, event, lambda *_, **__: fail())


def failing_run(place, error, folder):
    """A run of which one part raises an error in the second epoch."""
    fail = {"loader": FailOnce(SAMPLES + 25, error), "forward": FailOnce(23, error), "metric": FailOnce(2, error)}.get(
        place, FailOnce(2 if place.startswith(("on_epoch", "on_eval")) else 7, error)
    )
    run = Run(
        checkpoint=folder, loader=lambda: loader_of(FailingData(fail)) if place == "loader" else loader_of(Noisy())
    )
    options = {}
    if place == "forward":
        own = run.model.last.weight  # and no copy, by which gradients are compared
        run.model.last.register_forward_pre_hook(
            lambda module, _: fail() if module.training and module.weight is own else None
        )
    if place == "metric":
        options["metrics"] = lambda outputs, batch: fail() or 0.0
    return run, [FailingEvents(place, fail)] if place.startswith("on_") else [], options


PLACES = ["loader", "forward", "metric", "on_step", "on_epoch_end", "on_evaluation"]


@pytest.mark.parametrize(("place", "kind"), a_few_of(PLACES, [ValueError, KeyboardInterrupt, SystemExit]))
def test_error_anywhere_arrives_unchanged_and_leaves_a_checkpoint_to_go_on_from(tmp_path, undisturbed, place, kind):
    error = kind(3)  # made here: with its traceback it would keep a model alive for the tests to come
    run, callbacks, options = failing_run(place, error, tmp_path)

    with pytest.raises(kind) as caught:
        run.fit(*callbacks, **options)

    assert caught.value is error
    assert any(entry.name == "__call__" for entry in caught.traceback)  # the line of the user's that raised it
    notes = getattr(error, "__notes__", [])  # one on sizes, which a model may refuse
    assert all("it came in a micro-batch of" in note and place == "forward" for note in notes)
    again = Run(checkpoint=tmp_path)
    result = again.fit()
    assert result.resumed_from is not None
    assert again.end == undisturbed


@pytest.fixture(scope="module")
def undisturbed():
    return whole_run().end


class Counting(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs):
        self.passes += 1
        return super().forward(inputs) * (1 + 0.01 * self.passes)


def test_evaluation_that_is_interrupted_leaves_no_trace(tmp_path):
    whole = Run(model=Counting)
    whole.fit()
    run = Run(model=Counting, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="mine"):
        run.fit(metrics=lambda outputs, batch: FailOnce(1, ValueError("mine"))())
    again = Run(model=Counting, checkpoint=tmp_path)

    again.fit()

    assert again.end == whole.end


def test_error_leaves_no_worker_processes_behind(tmp_path):
    loader = loader_of(Noisy(), num_workers=2)

    with pytest.raises(StoppedError):
        Run(checkpoint=tmp_path, loader=lambda: loader).fit(StopAt(2))

    assert multiprocessing.active_children() == []


def test_learning_rates_are_scaled_once_in_all(tmp_path):
    assert_goes_on_as_if_nothing_had_happened(tmp_path, 4, 8, lr_scaling="linear", base_batch=4)


def test_error_that_leaves_parameters_changed_leaves_no_checkpoint_of_them(tmp_path):
    class WritesItself(Model):
        def forward(self, inputs):
            with torch.no_grad():
                self.first.weight.clamp_(-0.2, 0.2)
            return super().forward(inputs)

    stopped_at(2, tmp_path, model=WritesItself)
    before = checkpoints(tmp_path)
    fail = FailOnce(2, ValueError("mine"))

    def loss(outputs, batch):
        if outputs.requires_grad and outputs.dtype == torch.float32:  # not where gradients are compared, in float64
            fail()
        return nn.functional.cross_entropy(outputs, batch[1])

    with pytest.raises(ValueError, match="mine") as caught:
        Run(model=WritesItself, checkpoint=tmp_path).fit(loss=loss)

    assert any("had written first.weight" in note for note in caught.value.__notes__)
    assert checkpoints(tmp_path) == before


def test_error_before_the_first_window_leaves_no_checkpoint(tmp_path):
    run, _, _ = failing_run("loader", ValueError("mine"), tmp_path)
    run.loader.dataset.fail.left = 3

    with pytest.raises(ValueError, match="mine"):
        run.fit()

    assert checkpoints(tmp_path) == []


def test_random_numbers_that_callbacks_drew_are_kept_where_an_error_in_a_later_window_leaves_the_checkpoint(tmp_path):
    class Draws(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            torch.rand(report.step)

    class Failing(Model):
        calls = 0

        def forward(self, inputs):
            self.calls += self.training
            if self.calls == 20:
                raise StoppedError
            return super().forward(inputs)

    whole, last = Run(), Run(checkpoint=tmp_path)
    whole.fit(Draws())
    with pytest.raises(StoppedError):
        Run(checkpoint=tmp_path, model=Failing).fit(Draws())

    last.fit(Draws())

    assert last.end == whole.end


# --- what a run can be made of ----------------------------------------------------------------------------------------

LR = torch.optim.lr_scheduler


class WiderMoments(torch.optim.Optimizer):
    """Keeps its state in a wider type than its parameters, which torch's own load_state_dict narrows."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter, dtype=torch.float64))
                mean.mul_(0.9).add_(parameter.grad.double(), alpha=0.1)
                parameter.sub_(mean, alpha=group["lr"])


class Changing(Model):
    """Makes a buffer that was None, and lets one that no state_dict holds grow."""

    def __init__(self):
        super().__init__()
        self.register_buffer("later", None)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, inputs):
        outputs = super().forward(inputs)
        self.later = outputs.detach().mean(0) + (0.0 if self.later is None else self.later)
        self.cache = torch.cat([self.cache, outputs.detach().sum().reshape(1)])
        return outputs + 0.1 * self.later.sum() + 0.1 * self.cache.sum()


class Quiet(Noisy):
    def __getitem__(self, index):
        return self.inputs[index], index % 3, index


def lists():
    return list(loader_of(Noisy(), shuffle=False))


RUNS = {
    "OneCycleLR": {"scheduler": lambda it: LR.OneCycleLR(it, 0.05, total_steps=STEPS)},
    "SequentialLR": {"scheduler": lambda it: LR.SequentialLR(it, [LR.ConstantLR(it), LR.ExponentialLR(it, 0.9)], [4])},
    "ReduceLROnPlateau": {"scheduler": lambda it: LR.ReduceLROnPlateau(it, patience=0, factor=0.5, threshold=1.0)},
    "scheduler of epochs": {"scheduler_interval": "epoch"},
    "SGD with momentum": {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
    },
    "AdamW in two groups": {
        "optimizer": lambda parameters: torch.optim.AdamW(
            [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}], amsgrad=True
        )
    },
    "optimizer with wider state": {"optimizer": WiderMoments},
    "buffers that come and grow": {"model": Changing, "val_loader": None},
    "workers": {"loader": lambda: loader_of(Noisy(), num_workers=2)},
    # Without noise: the generators of such workers are nobody's to set.
    "workers that stay": {"loader": lambda: loader_of(Quiet(), num_workers=2, persistent_workers=True)},
    "generator that can be read once": {"loader": lambda: iter(lists())},
}


@pytest.mark.parametrize(
    ("name", "steps"),
    [*((name, (2,) if "once" in name else (8,)) for name in RUNS), ("scheduler of epochs", (STEPS_PER_EPOCH,))],
)
def test_whatever_a_run_is_made_of_goes_on(tmp_path, name, steps):
    assert_goes_on_as_if_nothing_had_happened(tmp_path, *steps, **RUNS[name])


def test_gradient_scaler_goes_on_with_its_scale(tmp_path):
    def large(outputs, batch):
        return 30 * nn.functional.cross_entropy(outputs.float(), batch[1])

    whole, _, result = assert_goes_on_as_if_nothing_had_happened(tmp_path, 8, precision="fp16", loss=large)

    # The first scale is too large and is halved, window by window; a scaler that began anew would do so again.
    skipped = [report.step for report in whole.result.history if report.skipped]
    assert skipped[:3] == [1, 2, 3]
    assert [report.step for report in result.history if report.skipped] == [step for step in skipped if step > 8]


def seeded():
    return torch.Generator().manual_seed(11)


class Numbers(IterableDataset):
    def __iter__(self):
        data = Noisy()
        for index in torch.randperm(SAMPLES).tolist():
            yield data[index]


LOADERS = {
    "generator of the loader": lambda: loader_of(Noisy(), generator=seeded()),
    "generator of the sampler": lambda: loader_of(
        Noisy(), shuffle=False, sampler=RandomSampler(range(SAMPLES), generator=seeded())
    ),
    "generator behind a batch sampler": lambda: DataLoader(
        Noisy(), batch_sampler=TorchBatchSampler(RandomSampler(range(SAMPLES), generator=seeded()), BATCH, False)
    ),
    "replacement": lambda: loader_of(
        Noisy(), shuffle=False, sampler=RandomSampler(range(SAMPLES), replacement=True, generator=seeded())
    ),
    "iterable dataset": lambda: loader_of(Numbers(), shuffle=False),
    "list of batches": lists,
    "batches larger than a window": lambda: loader_of(Noisy(), batch_size=30),
    "batches as large as a window": lambda: loader_of(Noisy(), batch_size=12),
}


@pytest.mark.parametrize(("name", "step"), a_few_of(LOADERS, [2, STEPS_PER_EPOCH, 8]))
def test_loaders_are_wound_to_where_they_were(tmp_path, name, step):
    assert_goes_on_as_if_nothing_had_happened(tmp_path, step, loader=LOADERS[name])


def test_last_window_that_is_left_out_stays_left_out(tmp_path):
    _, last, _ = assert_goes_on_as_if_nothing_had_happened(tmp_path, 6, drop_last=True)

    assert max(last.samples.windows) == 4 * EPOCHS


class CountedData(Noisy):
    drawn = 0

    def __getitem__(self, index):
        CountedData.drawn += 1
        return super().__getitem__(index)


def stateful_loader():
    return loader_of(Noisy(), StatefulDataLoader)


@pytest.mark.parametrize("step", [3, STEPS_PER_EPOCH, 7])
def test_stateful_loader_is_set_to_its_state(tmp_path, step):
    assert_goes_on_as_if_nothing_had_happened(tmp_path, step, loader=stateful_loader)


def test_stateful_loader_begins_the_epoch_that_it_would_have_begun(tmp_path):
    options = {"loader": stateful_loader}
    whole = Run(**options)
    whole.fit()
    Run(checkpoint=tmp_path, **options).fit(epochs=1)
    last = Run(checkpoint=tmp_path, **options)

    result = last.fit()

    assert result.resumed_from == STEPS_PER_EPOCH
    assert last.end == whole.end


def test_stateful_loader_is_not_wound(tmp_path):
    options = {"loader": lambda: loader_of(CountedData(), StatefulDataLoader), "epochs": 1, "val_loader": None}
    stopped_at(4, tmp_path, **options)
    CountedData.drawn = 0

    Run(checkpoint=tmp_path, **options).fit()

    assert CountedData.drawn == SAMPLES - 4 * 12 + 6  # the rest, and the used part of the batch that window 4 began


class Stateful:
    """Counts how often it is asked for its state; its batches are of these sizes."""

    def __init__(self, sizes, data):
        self.sizes, self.data = sizes, data
        self.at = self.asked = 0

    def __iter__(self):
        at, self.at = self.at, 0
        for place, size in enumerate(self.sizes):
            if place < at:
                continue
            self.at = place + 1
            start = sum(self.sizes[:place])
            yield default_collate([self.data[index] for index in range(start, start + size)])
        self.at = 0

    def state_dict(self):
        self.asked += 1
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


UNEVEN = (1, 20, 1, 7, 2, 2, 1, 14, 2)
# A sample counts as many as its largest tensor has elements, 6.
OF_TOKENS = {"target_tokens": 12 * 6, "micro_batch": 30}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [((1,) * SAMPLES, {}), ((7,) * 7 + (1,), {"drop_last": True}), (UNEVEN, {}), (UNEVEN, OF_TOKENS)],
    ids=["one by one", "all but the last alike", "uneven", "uneven, tokens"],
)
def test_state_of_a_loader_is_asked_for_once_a_window_at_most(tmp_path, sizes, options):
    assert sum(sizes) == SAMPLES
    run = Run(checkpoint=tmp_path, loader=lambda: Stateful(sizes, Noisy()), epochs=1, val_loader=None, **options)

    result = run.fit()

    # Beside that at the beginning and the end, and one of a last batch that was shorter than those before.
    assert run.loader.asked <= result.steps + 4


@pytest.mark.parametrize(
    ("sizes", "options", "step"),
    [(UNEVEN, {}, 1), ((4,) * 12 + (2,), OF_TOKENS, 2), (UNEVEN, OF_TOKENS, 3), (UNEVEN, {}, STEPS_PER_EPOCH)],
    ids=["uneven", "tokens", "uneven, tokens", "epoch"],
)
def test_loader_with_a_state_and_batches_of_any_size_goes_on(tmp_path, sizes, options, step):
    assert_goes_on_as_if_nothing_had_happened(tmp_path, step, loader=lambda: Stateful(sizes, Noisy()), **options)


def test_stateful_loader_with_workers_gives_the_rest_of_the_epoch(tmp_path):
    options = {"loader": lambda: loader_of(Noisy(), StatefulDataLoader, num_workers=2)}
    whole = Run(**options)
    whole.fit()
    stopped_at(7, tmp_path, **options).loader._iterator = None  # else its workers live on beside the next ones
    last = Run(checkpoint=tmp_path, **options)

    last.fit()

    windows = range(8, STEPS + 1)
    assert [last.samples.windows[step] for step in windows] == [whole.samples.windows[step] for step in windows]


@pytest.mark.parametrize(
    ("steps", "other", "message"),
    [
        (4, lambda: iter(list(loader_of(Noisy(20)))), "after 7 batches of epoch 1, but the loader now yields only 3"),
        (
            2,
            lambda: iter(list(loader_of(Noisy(), batch_size=2))),
            "3 samples of batch 4 of epoch 1, but now that batch holds 2",
        ),
        (2, lambda: loader_of(Noisy(), batch_size=6), "a loader of 8 batches per epoch, and this one has 9"),
        (2, lambda: loader_of(Noisy(48)), "a loader of 50 samples in its dataset, and this one has 48"),
        (
            2,
            lambda: loader_of(Noisy(), batch_size=6, drop_last=True),
            "a loader of 7 samples per batch, and this one has 6",
        ),
        (2, lambda: lists()[1:], "a loader of 8 batches per epoch, and this one has 7"),
    ],
)
def test_loader_that_cannot_go_on_in_the_middle_of_an_epoch_is_refused_and_changes_nothing(
    tmp_path, steps, other, message
):
    stopped_at(steps, tmp_path)
    run = Run(checkpoint=tmp_path, loader=other)
    before = run.state()

    with pytest.raises(CheckpointError, match=message):
        run.fit()

    assert run.state() == before


def test_another_loader_may_begin_an_epoch(tmp_path):
    Run(checkpoint=tmp_path).fit(epochs=1)

    result = Run(checkpoint=tmp_path, loader=lambda: loader_of(Noisy(), batch_size=6)).fit()

    assert result.resumed_from == STEPS_PER_EPOCH


def test_error_of_the_loader_while_it_is_wound_arrives_unchanged(tmp_path):
    stopped_at(4, tmp_path)
    mine = ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        Run(checkpoint=tmp_path, loader=lambda: loader_of(FailingData(FailOnce(9, mine)))).fit()

    assert caught.value is mine


# --- ends -------------------------------------------------------------------------------------------------------------


def test_finished_run_is_loaded_and_nothing_more_is_done(tmp_path, capsys):
    first = Run(checkpoint=tmp_path)
    first.fit()
    files = checkpoints(tmp_path)
    again = Run(checkpoint=tmp_path)

    result = again.fit(progress="lines")

    assert again.end == first.end
    assert (result.steps, result.samples, result.history) == (STEPS, EPOCHS * SAMPLES, ())
    assert result.resumed_from == STEPS
    assert checkpoints(tmp_path) == files
    said = capsys.readouterr().err
    assert "is finished: 15 steps are done" in said
    assert "before this call" in said
    assert "plan from step" not in said


def test_finished_run_goes_on_when_more_epochs_are_asked_for(tmp_path):
    longer = Run(epochs=EPOCHS + 2)
    longer.fit()
    Run(checkpoint=tmp_path).fit()
    more = Run(checkpoint=tmp_path, epochs=EPOCHS + 2)

    result = more.fit()

    assert more.end == longer.end
    assert result.steps == (EPOCHS + 2) * STEPS_PER_EPOCH


@pytest.mark.parametrize("stop", [3, STEPS_PER_EPOCH])
def test_run_that_ended_at_max_steps_goes_on_within_its_epoch(tmp_path, stop):
    whole = Run(max_steps=8)
    whole.fit()
    Run(checkpoint=tmp_path, max_steps=stop).fit()
    more = Run(checkpoint=tmp_path, max_steps=8)

    result = more.fit()

    assert more.end == whole.end
    assert result.resumed_from == stop
    assert more.samples.windows == {step: whole.samples.windows[step] for step in range(stop + 1, 9)}


def test_run_killed_before_its_last_evaluation_makes_it(tmp_path):
    with pytest.raises(StoppedError):
        Run(checkpoint=tmp_path, max_steps=3).fit(StopAt(3))

    result = Run(checkpoint=tmp_path, max_steps=3).fit()

    assert (result.resumed_from, result.steps, len(result.evaluations)) == (3, 3, 1)
    assert Run(checkpoint=tmp_path, max_steps=3).fit().evaluations == ()


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


def test_cut_that_is_asked_for_anew_is_used(tmp_path):
    stopped_at(2, tmp_path)

    result = Run(checkpoint=tmp_path, micro_batch=3).fit()

    assert [(step, plan.micro_batch) for step, plan in result.plans] == [(1, 4), (3, 3)]


def test_size_is_searched_for_where_a_number_was_asked_for_before(tmp_path):
    stopped_at(2, tmp_path)

    result = Run(checkpoint=tmp_path, micro_batch="auto").fit()

    assert result.plans[0][1].micro_batch == 4
    assert result.plan.micro_batch == result.plan.target_batch


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
