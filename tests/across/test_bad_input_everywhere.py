"""Every public argument refuses what it cannot use, names itself, and leaves everything as it was."""

import random

import numpy as np
import pytest
import torch

import autoaccum
from support.bad_input import options
from support.bad_input.arguments import (
    CALLS,
    READ_ONLY,
    World,
    arguments_of,
    fit_arguments,
    judge,
    missing,
    of_one_argument,
    of_several,
)

LISTED = {
    f"{name}({argument})": [of_one_argument(name, argument, make) for make in call.listed(argument)]
    for name, call in CALLS.items()
    for argument in arguments_of(call)
} | {f"{name}, together": [of_several(name, make) for make in call.together] for name, call in CALLS.items()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_public_argument_has_bad_values():
    assert not missing(), "say in tests/support/bad_input/arguments.py (CALLS) what these may be"
    assert set(CALLS) - {"Runner.step", "Runner.evaluate"} | READ_ONLY == set(autoaccum.__all__)


@pytest.mark.parametrize("cases", LISTED.values(), ids=LISTED)
def test_listed_bad_input_is_refused_by_name_and_changes_nothing(cases, folder):
    assert [wrong for case in cases if (wrong := judge(case, folder, is_listed=True))] == []


def test_every_option_of_the_command_line_has_bad_values():
    assert not options.missing(), "say in tests/support/bad_input/options.py what these may not be"


@pytest.mark.parametrize("command", options.BAD)
def test_bad_option_is_refused_by_name_and_leaves_nothing(command, folder):
    cases = [case for case in options.cases() if case[0] == command]

    assert [wrong for case in cases if (wrong := options.judge(case, folder))] == []


# --- what is tried before the first update ----------------------------------------------------------------------------


def train(folder, *, val_loader, **arguments):
    world = World(folder)
    asked = fit_arguments(world) | arguments
    return world, autoaccum.fit(**asked, val_loader=val_loader(world))


def raising(outputs, targets):
    raise KeyError("label")


def test_metric_that_raises_is_found_before_the_first_update(folder):
    world = World(folder)
    before = world.state()

    with pytest.raises(KeyError) as caught:
        autoaccum.fit(**fit_arguments(world), val_loader=[world.batch], metrics=raising)

    assert world.counted.windows == 0
    assert world.state() == before
    assert "before training" in caught.value.__notes__[0]


def test_generator_of_validation_data_is_not_touched_before_the_epoch_is_done(folder):
    drawn = []

    def batches(world):
        for batch in [world.batch] * 2:
            drawn.append(world.counted.windows)
            yield batch

    _, result = train(folder, val_loader=batches)

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
def test_trial_of_validation_data_does_not_touch_the_training(val_loader, folder):
    def untried(world):
        yield from val_loader(world)  # a generator, which is not touched before

    world, result = train(folder, val_loader=val_loader)
    other, expected = train(folder, val_loader=untried)
    states = [one.state() for one in (world, other)]
    for state in states:
        state.pop("loader's generator")  # put back after the evaluation, unless it is behind a generator

    assert states[0] == states[1]
    assert result.evaluations[0].loss == expected.evaluations[0].loss


def test_count_of_a_metric_begins_from_none_after_the_trial(folder):
    class Seen:
        def reset(self):
            self.samples = 0

        def update(self, outputs, targets):
            self.samples += len(targets)

        def compute(self):
            return self.samples

    _, result = train(folder, val_loader=lambda world: [world.batch] * 3, metrics={"seen": Seen()})

    assert result.evaluations[0].metrics == {"seen": 12.0}
