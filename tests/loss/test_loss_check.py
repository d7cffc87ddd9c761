"""A loss that micro-batches put together is confirmed by a few samples, however it is computed."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from autoaccum import Accumulator, Simulated
from autoaccum._system.notices import Notices
from small_samples import BATCH, CLASSES, vectors


@pytest.mark.parametrize("seed", [1, 2, 7, 9])
def test_rounding_of_a_closure_that_casts_is_not_taken_for_the_losss(seed):
    inputs, targets = (tensor[:BATCH] for tensor in vectors().tensors)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, CLASSES))
    with torch.no_grad():
        [parameter.mul_(3) for parameter in model.parameters()]

    def closure(batch):
        with torch.autocast("cpu", torch.bfloat16):
            return functional.cross_entropy(model(batch[0]), batch[1])

    silent = Notices(silent=True)
    accumulator = Accumulator(
        model, closure=closure, device=Simulated("1GiB"), micro_batch=4, precision="fp32", notices=silent
    )
    accumulator.backward((inputs.float(), targets))
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    closure((inputs.float(), targets)).backward()

    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert (gradient - parameter.grad).norm() <= 2e-2 * parameter.grad.norm()
