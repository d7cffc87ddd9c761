"""Several optimizers over disjoint parameters make one update together, or none."""

import pytest
import torch
from torch import nn

from autoaccum._engine.optimizers import OptimizerList
from autoaccum.errors import InvalidInputError
from support.models.small import batches_of, fit_quietly, labelled

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


# --- what is refused --------------------------------------------------------------------------------------------------


def test_group_and_closure_for_all_together_are_refused():
    both = OptimizerList(parts_of(a_model()))

    with pytest.raises(InvalidInputError, match="call add_param_group of the one"):
        both.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(InvalidInputError, match="closure="):
        both.step(lambda: None)
