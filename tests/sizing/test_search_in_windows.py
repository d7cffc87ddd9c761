"""`fit` finds the cut in its own first windows: no trial is thrown away, and nothing else is different."""

import dataclasses
import itertools
import os
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from torch import nn

import autoaccum
from support.faults.modes import FailAt, differences, state_of
from support.models.small import a_few_of
from support.processes.folders import TESTS

SAMPLES, WIDTH = 600, 4096


class Wide(nn.Module):
    """Takes 16 KiB a sample and layer, and notes the samples in the order in which it sees them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, 4))
        self.seen = []

    def forward(self, inputs):
        if self.training and torch.is_grad_enabled():
            self.seen += inputs[:, 0].int().tolist()
        return self.body(inputs)


def data(batch=50, samples=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 8, generator=generator)
    inputs[:, 0] = torch.arange(samples)
    targets = torch.randint(0, 4, (samples,), generator=generator)
    return list(zip(inputs.split(batch), targets.split(batch), strict=True))


class Told(autoaccum.Callback):
    def __init__(self):
        self.trials, self.plans, self.reports, self.probes, self.ooms = [], [], [], [], []

    def on_trial(self, trial):
        self.trials.append(trial)

    def on_plan(self, plan, *, step, probe):
        self.plans.append((step, plan))
        if probe is not None:
            self.probes.append(probe)

    def on_step(self, report, *, epoch):
        self.reports.append(report)

    def on_oom(self, event, *, step):
        self.ooms.append(event)


def fit(capacity, target=100, model=None, loader=None, *, cache=False, **options):
    model, told = model or Wide(), Told()
    model.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(7)
    with mock.patch.dict(os.environ, {} if cache else {"AUTOACCUM_CACHE_DIR": ""}):
        result = autoaccum.fit(
            model,
            loader or data(),
            target,
            optimizer=model.optimizer,
            device=autoaccum.Simulated(capacity) if isinstance(capacity, (str, int)) else capacity,
            callbacks=[told],
            **{"progress": False, "loss": nn.CrossEntropyLoss()} | options,
        )
    return model, told, result


CAPACITIES = ["2600KiB", "4MiB", "64MiB"]


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_first_windows_find_what_trials_without_training_find(capacity):
    _, told, result = fit(capacity)
    found = autoaccum.find_micro_batch(
        Wide(),
        next(iter(data())),
        max_micro_batch=100,
        loss=nn.CrossEntropyLoss(),
        device=autoaccum.Simulated(capacity),
    )

    assert result.plan.accum_steps <= autoaccum.plan(100, found.micro_batch).accum_steps
    (probe,) = told.probes
    assert probe.micro_batch >= result.plan.micro_batch
    assert probe.micro_batch in {trial.size for trial in probe.trials if trial.fits}
    assert list(probe.trials) == told.trials[: len(probe.trials)]
    assert sum(not trial.fits for trial in told.trials) <= 2
    assert told.ooms == []
    assert result.oom_events == 0


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_every_window_is_bitwise_what_its_cut_makes_of_it(capacity):
    model, told, result = fit(capacity)
    clean = Wide()
    optimizer = torch.optim.Adam(clean.parameters(), lr=0.01)
    runner = autoaccum.Runner(clean, optimizer, autoaccum.plan(100, 100), loss=nn.CrossEntropyLoss(), device="cpu")
    torch.manual_seed(7)
    windows = autoaccum.windows(data(), 100)

    for report, window in zip(told.reports, windows, strict=True):
        runner.plan = autoaccum.Plan(100, report.micro_batches)
        assert runner.step(window).loss == report.loss

    assert differences(state_of(model, model.optimizer), state_of(clean, optimizer)) == []
    assert result.steps == SAMPLES // 100


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_no_sample_is_computed_twice_unless_it_failed(capacity):
    model, told, _ = fit(capacity, loss_reduction="mean")  # without the check on a few samples

    failed = sum(trial.size for trial in told.trials if not trial.fits)
    assert sum(report.recomputed_samples for report in told.reports) <= failed
    if not failed:
        assert model.seen == list(range(SAMPLES))


def test_search_ends_in_the_second_window_and_grows_within_the_first():
    _, told, _ = fit("4MiB")

    first = told.reports[0].micro_batches
    assert first[0] == 3
    assert max(first) >= 8 * first[0]
    assert told.plans[0][0] == 2
    assert {report.micro_batches for report in told.reports[1:]} == {told.plans[-1][1].micro_batches}


def test_second_run_of_the_same_job_says_and_confirms_what_the_first_has_found_with_one_trial(capsys):
    _, _, first = fit("4MiB", cache=True, progress="lines")
    before = capsys.readouterr().err

    _, told, second = fit("4MiB", cache=True, progress="lines")

    said = "a search from "
    assert [before.count(said), capsys.readouterr().err.count(said)] == [0, 1]
    assert [(trial.size, trial.fits) for trial in told.trials] == [(first.plan.micro_batch, True)]
    assert second.plan == first.plan
    assert {report.micro_batches for report in told.reports} == {first.plan.micro_batches}


class Hungry(Wide):
    """Takes so many bytes more for each sample, of which nothing is seen from outside."""

    appetite_bytes = 0

    def forward(self, inputs):
        self.held = None
        self.held = torch.empty(len(inputs), self.appetite_bytes, dtype=torch.uint8)
        return super().forward(inputs)


def test_remembered_size_that_does_not_fit_any_more_is_found_anew(monkeypatch):
    _, _, first = fit("16MiB", model=Hungry(), cache=True)
    monkeypatch.setattr(Hungry, "appetite_bytes", 2**20)

    _, told, result = fit("16MiB", model=Hungry(), cache=True)

    assert result.plan.accum_steps > first.plan.accum_steps == 1
    assert told.ooms == []
    assert not told.trials[0].fits


def test_not_one_sample_that_fits_is_an_error_with_everything_as_before():
    model = Wide()
    torch.manual_seed(7)
    before = state_of(model, torch.optim.Adam(model.parameters(), lr=0.01))

    with pytest.raises(autoaccum.DoesNotFitError, match="a sample of shapes"):
        fit("16KiB", model=model)

    assert differences(state_of(model, model.optimizer), before) == []


def test_run_of_a_single_window_says_in_which_cut_it_went():
    _, told, result = fit("4MiB", max_steps=1)

    assert result.plans == ((2, result.plan),)
    assert sum(told.reports[0].micro_batches) == 100


# --- inputs of different length ---------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Takes memory in proportion to the padded length."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 256)
        self.head = nn.Linear(256, 4)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)).mean(1))


def texts(lengths, batch=16):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randint(0, 50, (batch, length), generator=generator), torch.randint(0, 4, (batch,), generator=generator))
        for length in lengths
    ]


def sizes_by_length(told, lengths, batch=16, target=64):
    """The micro-batches of each loader batch, by its length."""
    found = {}
    pieces = iter(lengths)
    for report in told.reports:
        sizes = iter(report.micro_batches)
        for _ in range(target // batch):
            length, left = next(pieces), batch
            while left:
                size = next(sizes)
                found.setdefault(length, []).append(size)
                left -= size
    return found


def test_short_samples_go_in_larger_micro_batches():
    lengths = [64, 8, 32, 16] * 10

    _, told, result = fit("800KiB", 64, Pooled(), texts(lengths))

    found = sizes_by_length(told, lengths)
    most = {length: max(sizes[len(sizes) // 2 :]) for length, sizes in found.items()}
    assert most[64] < most[32] < most[16] <= most[8] == 16
    assert most[64] <= result.plan.micro_batch
    assert result.oom_events == 0


class Crowded(autoaccum.Simulated):
    """Memory of which others take all that is free, once a trial has failed."""

    has_failed = False

    def reading(self):
        found = super().reading()
        return dataclasses.replace(found, free_bytes=0) if self.has_failed else found


class Keeps(nn.Module):
    """Keeps rows of activations, and lacks memory for more than ten samples, which nothing shows beforehand."""

    def __init__(self, device):
        super().__init__()
        self.layer, self.device = nn.Linear(8, 1000), device

    def forward(self, inputs):
        if len(inputs) > 10:
            self.device.has_failed = True
            raise torch.OutOfMemoryError(f"CUDA out of memory: {len(inputs)} samples")
        return self.layer(inputs).tanh().exp()


@pytest.mark.parametrize("memory", [None, "auto"])
def test_no_memory_left_when_the_search_ends_leaves_the_largest_that_fitted(memory):
    device = Crowded(160 * 4000)

    _, _, result = fit(device, model=Keeps(device), save_memory=memory)

    assert device.has_failed
    assert result.steps == SAMPLES // 100
    assert 1 <= result.plan.micro_batch < 100


# --- the clock --------------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def advance(self, seconds):
        self.now += seconds

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def test_cut_that_is_faster_by_the_clock_is_chosen_and_said(clock, capsys):
    """Large micro-batches sleep, as if they fell out of a cache."""

    class Slow(Wide):
        def forward(self, inputs):
            if len(inputs) > 25:
                clock.advance(0.01 * len(inputs))
            clock.advance(0.001 + 0.001 * len(inputs))
            return super().forward(inputs)

    loader = list(itertools.chain.from_iterable([data()] * 10))

    _, told, result = fit("64MiB", model=Slow(), loader=loader, progress="lines")

    assert result.plan.micro_batch <= 25
    assert result.plan.micro_batch >= 15
    assert told.plans[-1][1] == result.plan
    assert f"of {result.plan.micro_batch} samples are fastest by the clock" in capsys.readouterr().err


def test_short_training_is_not_spent_on_the_clock():
    _, told, result = fit("64MiB")

    assert {report.micro_batches for report in told.reports[2:]} == {(100,)}
    assert result.plan.accum_steps == 1


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs():
    """Counts what torch.compile has compiled."""
    import torch._dynamo as dynamo  # noqa: PLC0415 - takes seconds

    dynamo.reset()
    dynamo.utils.counters.clear()
    yield lambda: dynamo.utils.counters["stats"]["unique_graphs"]
    dynamo.reset()


class Plain(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

    def forward(self, inputs):  # PyTorch 2.8 does not compile that of Sequential
        return super().forward(inputs)


def compiled(model):
    model.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("way", [compiled, lambda model: torch.compile(model, backend="aot_eager")])
def test_compiled_model_is_cut_into_one_size(graphs, way):
    _, _, result = fit(torch.device("cpu"), model=way(Plain()), micro_batch=40)

    assert result.plan.micro_batches == (25, 25, 25, 25)  # and not 34, 33, 33
    assert graphs() == 1


# --- taken up again ---------------------------------------------------------------------------------------------------


def test_run_that_stopped_while_it_learned_learns_again_when_it_is_taken_up(tmp_path):
    fit("4MiB", max_steps=1, checkpoint=tmp_path)

    _, told, result = fit("4MiB", checkpoint=tmp_path)

    assert result.resumed_from == 1
    assert len(told.probes) == 1
    assert result.plan == told.plans[-1][1]


def test_run_that_stopped_when_it_had_learned_keeps_its_plan(tmp_path):
    _, _, first = fit("4MiB", max_steps=3, checkpoint=tmp_path)

    _, told, result = fit("4MiB", checkpoint=tmp_path)

    assert told.trials == []
    assert result.plan == first.plan
    assert {report.micro_batches for report in told.reports} == {first.plan.micro_batches}


def test_cut_that_the_clock_chose_for_samples_of_unlike_length_stays_when_it_is_taken_up(tmp_path, clock):
    class Slow(Pooled):
        def forward(self, tokens):
            clock.advance(0.001 * len(tokens) + (0.1 * len(tokens) if len(tokens) > 20 else 0.0))
            return super().forward(tokens)

    options = {"checkpoint": tmp_path, "loader": texts([8, 12] * 40, batch=64)}

    _, before, first = fit("64MiB", 64, Slow(), max_steps=40, **options)
    _, told, result = fit("64MiB", 64, Slow(), **options)

    assert first.plan.micro_batch < 64
    assert result.resumed_from == 40
    assert {report.micro_batches for report in told.reports} == {report.micro_batches for report in before.reports[-2:]}


# --- what made it run in circles --------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Takes memory for 256 positions a sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(inputs.unsqueeze(1).expand(-1, 256, -1)))).mean(1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("capacity", "target"), a_few_of([60_000, 100_000, 120_000, 140_000, 165_000, 200_000], [3, 5, 7, 9, 41])
)
def test_odd_windows_on_devices_that_hold_a_sample_or_two_end(target, capacity):
    try:
        _, told, _ = fit(capacity, target, Deep(), data(target, samples=2 * target))
    except autoaccum.DoesNotFitError:
        return
    assert [sum(report.micro_batches) for report in told.reports] == [target] * 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("whole", "capacity"), [(True, "64MiB"), (False, "2MiB")])
def test_pairs_beside_other_losses_are_learned_in_whole_windows(capacity, whole):
    weights = torch.arange(4.0) + (1.0 if whole else 0.3)

    def loss(outputs, targets):
        each = nn.functional.cross_entropy(outputs, targets, reduction="none") * weights[targets]
        return {"pair": (each.sum(), weights[targets].sum()), "size": outputs.square().mean()}

    _, told, result = fit(capacity, model=Plain(), loss=loss)

    assert result.steps == 6
    assert len(told.probes) == 1
    assert result.plan.accum_steps <= 4


@pytest.mark.parametrize("operator", [20, 60, 120])
def test_memory_that_lacks_for_a_moment_in_the_first_window_costs_nothing_for_long(operator):
    with FailAt(operator):  # in a run that is too short for the clock
        _, told, _ = fit("1GiB", 40, Deep(), data(40, samples=40 * 60), cache=True, max_steps=39)

    assert max(max(report.micro_batches) for report in told.reports) == 40
    assert told.reports[-1].micro_batches == (40,)

    _, told, _ = fit("1GiB", 40, Deep(), data(40, samples=40 * 6), cache=True)
    assert told.reports[-1].micro_batches == (40,)


def test_what_an_earlier_run_found_is_a_hint_and_no_law(monkeypatch):
    monkeypatch.setattr(Hungry, "appetite_bytes", 2**22)
    _, _, first = fit("16MiB", model=Hungry(), cache=True)
    monkeypatch.setattr(Hungry, "appetite_bytes", 0)

    _, told, _ = fit("16MiB", model=Hungry(), cache=True)

    assert first.plan.micro_batch <= 3
    assert max(told.reports[0].micro_batches[:2]) <= first.plan.micro_batch
    assert told.reports[-1].micro_batches == (100,)


def test_checkpoint_is_not_counted_against_a_simulated_device(tmp_path):
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    _, _, result = fit("20KiB", 10, model, data(10, samples=100), checkpoint=tmp_path)

    assert result.checkpoint is not None


def test_what_a_cut_does_to_batchnorm_is_said_of_the_cut_that_stays(capsys):
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

    _, _, result = fit("6MiB", model=model, progress="lines")

    assert result.plan.micro_batches == (50, 50)
    assert "(here of 50 samples)" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_long_sample_that_does_not_fit_alone_ends_the_run():
    with pytest.raises(autoaccum.DoesNotFitError, match="a sample of shapes"):
        fit("400KiB", 4, Pooled(), texts((4, 4, 400, 400), batch=2))


@pytest.mark.parametrize(("operator", "options"), [(30, {}), (150, {}), (90, {"micro_batch": 1})])
def test_single_sample_that_fails_for_a_moment_does_not_end_the_run(operator, options):
    loader = texts([3, 4, 5, 6] * 6, batch=1)

    with FailAt(operator) as fault:
        _, told, _ = fit("1GiB", 8, Pooled(), loader, **options)

    assert fault.hits == 1
    assert [report.samples for report in told.reports] == [8, 8, 8]


def test_widest_samples_that_always_run_first_do_not_end_the_search_at_one():
    def pairs(widths):
        return [(torch.randn(8, width), torch.randint(2, (8,))) for width in widths]

    model = nn.Sequential(
        nn.Unflatten(1, (-1, 1)), nn.Linear(1, 64), nn.Tanh(), nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten()
    )
    loader = pairs([400, 100] * 30 + [400, 400] * 6)

    result = autoaccum.fit(model, loader, 16, device=autoaccum.Simulated("64MiB"), progress=False, max_steps=36)

    assert result.history[-1].micro_batches == (8, 8)


# --- a real limit -----------------------------------------------------------------------------------------------------

IN_A_NEW_PROCESS = """
import autoaccum
from test_probing import job, nn, sgd

model, batch = job("resnet18", 64)
trials = []

class Told(autoaccum.Callback):
    def on_trial(self, trial):
        trials.append(trial.fits)

options = {"precision": "fp32", "optimizer": sgd, "progress": False, "callbacks": [Told()]}
result = autoaccum.fit(
    model, [batch] * 14, TARGET, loss=nn.CrossEntropyLoss(), device="cpu", memory_limit="700MiB", max_steps=3, **options
)
print(result.plan.accum_steps, result.oom_events, len(trials), trials.count(False))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("target", "steps"), [(149, 1), pytest.param(298, 2, marks=pytest.mark.sweep)])
def test_search_under_a_real_limit_finds_97_percent_of_what_fits_in_six_trials(target, steps):
    """Of ResNet-18 at 96 px 154 samples fit, as `find_micro_batch` finds; other heaps than a new process's differ."""
    paths = os.pathsep.join(map(str, (TESTS / "engine", TESTS)))
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS.replace("TARGET", str(target))],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": paths, "AUTOACCUM_CACHE_DIR": ""},
    )

    accum_steps, oom_events, trials, failed = map(int, done.stdout.split())
    assert accum_steps == steps
    assert trials <= 6
    assert failed + oom_events <= 3
