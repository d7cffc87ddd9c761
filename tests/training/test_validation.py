"""Evaluations every so many windows, and one batch before training: the same training, resumed or not."""

import random

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from support.bad_input.calls import fit_arguments
from support.bad_input.engine import World
from support.training.long_runs import STEPS_PER_EPOCH, Noisy, Run, StoppedError, bits
from support.training.resumes import Following, plateau


class Evaluated(autoaccum.Callback):
    """Notes after which windows there was an evaluation, and draws a random number there."""

    def __init__(self):
        self.steps = []
        self.epochs = []

    def on_evaluation(self, evaluation, *, epoch, step):
        torch.rand(1)
        self.steps.append(step)
        self.epochs.append(epoch)


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


LOSSES = {"of torch": functional.mse_loss, "own": lambda outputs, targets: (outputs - targets).square().mean()}


@pytest.mark.parametrize("loss", LOSSES)
def test_frozen_parameters_move_in_an_evaluation_as_often_as_in_a_plain_loop(loss):
    model, data = Following(), [(torch.randn(6, 6), torch.randn(6, 3))] * 4

    autoaccum.fit(model, data, 6, loss=LOSSES[loss], micro_batch=6, val_loader=data[:2], device="cpu", progress=False)

    assert model.passes == 4 + 2


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
