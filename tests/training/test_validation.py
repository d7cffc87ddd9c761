"""Evaluations every so many windows: the same training, resumed or not, and schedulers that move with them."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from autoaccum.errors import InvalidInputError
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
