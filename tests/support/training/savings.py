"""A training with save_memory="auto" on a small device, and the same updates where memory is plenty."""

import os
from unittest import mock

import torch

import autoaccum
from autoaccum import Simulated
from support.models.memory_heavy import Wide, seed

STEPS = 16


def data(windows=STEPS):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, 32, generator=generator), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(windows)
    ]


def trained(capacity, *, save_memory="auto", model=None, remembers=False, **options):
    model = model or Wide()
    seed()
    made = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False)}
    made |= {"loss": torch.nn.CrossEntropyLoss()}  # which needs no check: two samples may not fit
    made |= {"progress": "lines", "loader": data()} | options
    with mock.patch.dict(os.environ, {} if remembers else {"AUTOACCUM_CACHE_DIR": ""}):
        return model, autoaccum.fit(
            model, made.pop("loader"), 8, device=Simulated(capacity), save_memory=save_memory, **made
        )


def replayed(*results, loss=torch.nn.functional.cross_entropy):
    """Train with the same cuts where memory is plenty and nothing saves any."""
    history = [report for result in results for report in result.history]
    model = Wide()
    seed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(8, 8), loss=loss, device="cpu", precision="fp32")
    for window, report in zip(autoaccum.windows(data(len(history)), 8), history, strict=True):
        runner.plan = autoaccum.Plan(8, report.micro_batches)
        runner.step(window)
    return model


def assert_same(model, other):
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def is_plain(model):
    return all("forward" not in vars(module) for module in model.modules())
