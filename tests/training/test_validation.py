"""Evaluations every so many windows: the same training, resumed or not, and schedulers that move with them."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import autoaccum
from autoaccum.errors import InvalidInputError
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


@pytest.mark.parametrize("length", [{"epochs": 1, "val_every": 2}, {"epochs": 2}, {"epochs": None, "max_steps": 20}])
def test_loader_that_can_be_read_once_is_refused_where_it_would_be_read_again(length):
    with pytest.raises(InvalidInputError, match="can be read only once, and would be read several times"):
        Run().fit(**length, val_loader=iter([]))


def test_loader_of_the_training_is_refused_in_the_middle_of_its_epoch():
    loader = DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4)

    with pytest.raises(InvalidInputError, match="val_loader= is the loader that the training is reading"):
        autoaccum.fit(nn.Linear(2, 1), loader, 4, val_loader=loader, val_every=1, device="cpu", progress=False)


def test_ranks_evaluate_at_the_same_windows(rank_pool):
    found = rank_pool.run("training:evaluated_every", size=2, every=3)

    assert found[0]["evaluations"] == found[1]["evaluations"]
    assert len(found[0]["evaluations"]) == 3  # of eight windows: after 3, 6 and 8
    assert all(map(torch.equal, found[0]["parameters"], found[1]["parameters"]))
