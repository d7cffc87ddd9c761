"""Modules whose forward is another for a while: copies made meanwhile have their own."""

import copy
import pickle

import pytest
import torch

from autoaccum import Simulated
from autoaccum._saving.checkpointing import checkpointed
from autoaccum._saving.savings import offloaded
from support.models.memory_heavy import Stack, a_step


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_that_are_made_meanwhile_are_plain(how):
    model = Stack()

    with checkpointed([model]), offloaded([model], Simulated("1GiB")):
        copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))  # noqa: S301 - ours

    assert all(not {"forward", "__getstate__"} & set(vars(part)) for part in copied.modules())
    for expected, found in zip(a_step(model), a_step(copied), strict=True):
        assert torch.equal(expected, found)
