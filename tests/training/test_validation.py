"""Evaluations every so many windows, and one batch before training: the same training, resumed or not."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import autoaccum
from support.bad_input.calls import fit_arguments
from support.bad_input.engine import World
from support.training.long_runs import EPOCHS, STEPS_PER_EPOCH, Noisy, Run, StopAt, StoppedError, bits, stopped_at

STEPS = EPOCHS * STEPS_PER_EPOCH


class Evaluated(autoaccum.Callback):
    """Notes after which windows there was an evaluation, and draws a random number there."""

    def __init__(self):
        self.steps = []
        self.epochs = []

    def on_evaluation(self, evaluation, *, epoch, step):
        torch.rand(1)
        self.steps.append(step)
        self.epochs.append(epoch)


def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)  # nothing is ever good enough


def shuffled():
    return DataLoader(Noisy(9), batch_size=4, shuffle=True)


@pytest.mark.parametrize(("every", "steps"), [(2, [2, 4, 6, 8, 10, 12, 14, 15]), (5, [5, 10, 15]), (100, [15])])
def test_evaluations_come_every_so_many_windows_and_at_the_end(every, steps):
    told = Evaluated()

    result = Run(val_every=every).fit(told)

    assert told.steps == steps
    assert told.epochs == [(step - 1) // STEPS_PER_EPOCH + 1 for step in steps]
    assert len(result.evaluations) == len(steps)


def test_evaluations_leave_the_training_as_it_is():
    run = Run(val_every=2)
    run.fit(val_loader=shuffled())
    without = Run()
    without.fit(val_loader=None)

    assert run.end == without.end


def test_loader_that_shares_a_generator_with_the_training_is_left_as_it_is():
    def trained(**options):
        generator = torch.Generator().manual_seed(5)
        run = Run(loader=lambda: DataLoader(Noisy(), batch_size=7, shuffle=True, generator=generator))
        run.fit(val_loader=DataLoader(Noisy(9), batch_size=4, shuffle=True, generator=generator), **options)
        return [run.samples.windows[step] for step in range(1, STEPS_PER_EPOCH + 1)]

    assert trained(val_every=2) == trained(val_every=100)


class Averaging(nn.Module):
    """Follows its first layer, in each pass, with a target network: frozen parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.target = nn.Linear(6, 8).requires_grad_(requires_grad=False)
        self.passes = nn.Parameter(torch.zeros(()), requires_grad=False)

    @torch.no_grad()
    def follow(self):
        self.passes += 1
        for own, followed in zip(self.target.parameters(), self.first.parameters(), strict=True):
            own.lerp_(followed, 0.1)

    def forward(self, inputs):
        self.follow()
        return self.last(torch.relu(self.first(inputs))) + self.target(inputs).mean(1, keepdim=True)


LOSSES = {"of torch": functional.mse_loss, "own": lambda outputs, targets: (outputs - targets).square().mean()}


@pytest.mark.parametrize("loss", LOSSES)
def test_frozen_parameters_move_in_an_evaluation_as_often_as_in_a_plain_loop(loss):
    model, data = Averaging(), [(torch.randn(6, 6), torch.randn(6, 3))] * 4

    autoaccum.fit(model, data, 6, loss=LOSSES[loss], micro_batch=6, val_loader=data[:2], device="cpu", progress=False)

    assert model.passes == 4 + 2


@pytest.mark.parametrize("stop", [2, 6, 10])
def test_resumed_run_ends_alike_where_passes_move_frozen_parameters(tmp_path, stop):
    options = {"model": Averaging, "loss_reduction": None}
    undisturbed = Run(**options)
    undisturbed.fit()

    stopped_at(stop, tmp_path, **options)
    run = Run(checkpoint=tmp_path, **options)
    run.fit()

    assert run.end == undisturbed.end


@pytest.fixture(scope="module")
def evaluated_run():
    run, told = Run(val_every=4, scheduler=plateau), Evaluated()
    run.fit(told)
    return run, told


@pytest.mark.parametrize("stop", [1, 4, 5, 6, 10, 14])
def test_resumed_run_evaluates_at_the_same_windows_and_ends_bit_for_bit_alike(tmp_path, stop, evaluated_run):
    options = {"val_every": 4, "scheduler": plateau}
    undisturbed, told = evaluated_run

    first, second = Evaluated(), Evaluated()
    with pytest.raises(StoppedError):
        Run(checkpoint=tmp_path, **options).fit(first, StopAt(stop))
    run = Run(checkpoint=tmp_path, **options)
    run.fit(second)

    assert first.steps + second.steps == told.steps == [4, 8, 12, 15]
    assert run.end == undisturbed.end
    assert undisturbed.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**4)


def test_run_that_failed_in_an_evaluation_repeats_it(tmp_path):
    class Fails(autoaccum.Callback):
        def on_evaluation(self, evaluation, *, epoch, step):
            if step == 8:
                raise StoppedError

    options = {"val_every": 4, "scheduler": plateau}
    undisturbed = Run(**options)
    undisturbed.fit()

    with pytest.raises(StoppedError):
        Run(checkpoint=tmp_path, **options).fit(Fails())
    run, told = Run(checkpoint=tmp_path, **options), Evaluated()
    result = run.fit(told, val_every=4)

    assert result.resumed_from == 8
    assert told.steps == [8, 12, 15]
    assert bits(run.optimizer.state_dict()["param_groups"]) == bits(undisturbed.optimizer.state_dict()["param_groups"])


def test_ranks_evaluate_at_the_same_windows(rank_pool):
    found = rank_pool.run("training:evaluated_every", size=2, every=3)

    assert found[0]["evaluations"] == found[1]["evaluations"]
    assert len(found[0]["evaluations"]) == 3  # of eight windows: after 3, 6 and 8
    assert all(map(torch.equal, found[0]["parameters"], found[1]["parameters"]))


# --- what is tried before the first update ----------------------------------------------------------------------------


def train(tmp_path, *, val_loader, **arguments):
    world = World(tmp_path)
    asked = fit_arguments(world) | arguments
    return world, autoaccum.fit(**asked, val_loader=val_loader(world))


def raising(outputs, targets):
    raise KeyError("label")


def test_metric_that_raises_is_found_before_the_first_update(tmp_path):
    world = World(tmp_path)
    before = world.state()

    with pytest.raises(KeyError) as caught:
        autoaccum.fit(**fit_arguments(world), val_loader=[world.batch], metrics=raising)

    assert world.counted.windows == 0
    assert world.state() == before
    assert "before training" in caught.value.__notes__[0]


def test_generator_of_validation_data_is_not_touched_before_the_epoch_is_done(tmp_path):
    drawn = []

    def batches(world):
        for batch in [world.batch] * 2:
            drawn.append(world.counted.windows)
            yield batch

    _, result = train(tmp_path, val_loader=batches)

    assert drawn == [1, 1]
    assert result.evaluations[0].samples == 8


class Drawing(torch.utils.data.Dataset):
    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return 4

    def __getitem__(self, index):
        noise = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002, S311
        return (self.batch[0][index] + noise).float(), self.batch[1][index]


def that_draws(world):
    return torch.utils.data.DataLoader(Drawing(world.batch), batch_size=2, shuffle=True)


def that_trains_too(world):
    """The training's own loader, which shuffles by a generator of its own."""
    return world.loader


@pytest.mark.parametrize("val_loader", [that_trains_too, that_draws])
def test_trial_of_validation_data_does_not_touch_the_training(val_loader, tmp_path):
    def untried(world):
        yield from val_loader(world)  # a generator, which is not touched before

    world, result = train(tmp_path, val_loader=val_loader)
    other, expected = train(tmp_path, val_loader=untried)
    states = [one.state() for one in (world, other)]
    for state in states:
        state.pop("loader's generator")  # put back after the evaluation, unless it is behind a generator

    assert states[0] == states[1]
    assert result.evaluations[0].loss == expected.evaluations[0].loss


def test_count_of_a_metric_begins_from_none_after_the_trial(tmp_path):
    class Seen:
        def reset(self):
            self.samples = 0

        def update(self, outputs, targets):
            self.samples += len(targets)

        def compute(self):
            return self.samples

    _, result = train(tmp_path, val_loader=lambda world: [world.batch] * 3, metrics={"seen": Seen()})

    assert result.evaluations[0].metrics == {"seen": 12.0}
