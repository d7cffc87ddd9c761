"""Several optimizers over disjoint parameters make one update together, or none."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from autoaccum._engine.optimizers import OptimizerList
from autoaccum.errors import InvalidInputError
from support.models.small import batches_of, fit_quietly, labelled
from support.training.long_runs import Run, stopped_at

DATA = labelled(32)


def a_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def parts_of(model):
    return [
        torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(model[2].parameters(), lr=0.05),
    ]


def fit(model, optimizer, micro_batch=8, windows=4, **options):
    return fit_quietly(
        model,
        batches_of(DATA, *[8] * windows),
        8,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        micro_batch=micro_batch,
        **options,
    )


# --- checkpoints ------------------------------------------------------------------------------------------------------


def several(parameters):
    return OptimizerList([torch.optim.SGD(parameters[:2], lr=0.01, momentum=0.9), torch.optim.Adam(parameters[2:])])


@pytest.mark.parametrize("stop", [1, 7])
def test_resumed_run_ends_bit_for_bit_alike(tmp_path, stop):
    scheduler = {"scheduler": lambda optimizer: StepLR(optimizer, 4, gamma=0.5), "optimizer": several}
    undisturbed = Run(**scheduler)
    undisturbed.fit()

    stopped_at(stop, tmp_path, **scheduler)
    run = Run(checkpoint=tmp_path, **scheduler)
    parts = list(run.optimizer.parts)
    run.fit()

    assert run.end == undisturbed.end
    assert run.optimizer.parts == parts
    assert all(part.state is run.optimizer.state for part in parts)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_group_and_closure_for_all_together_are_refused():
    both = OptimizerList(parts_of(a_model()))

    with pytest.raises(InvalidInputError, match="call add_param_group of the one"):
        both.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(InvalidInputError, match="closure="):
        both.step(lambda: None)
