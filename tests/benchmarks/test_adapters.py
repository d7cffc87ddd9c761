"""benchmarks/adapters.py compares like with like: with an adapter and without, the same steps in the same cut."""

import importlib.util
import sys

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from support.models.small import WITHOUT_WARNINGS
from support.processes.folders import ROOT

BENCHMARKS = ROOT / "benchmarks"
pytestmark = WITHOUT_WARNINGS


@pytest.fixture
def adapters(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    spec = importlib.util.spec_from_file_location("adapters", BENCHMARKS / "adapters.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "adapters", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


@pytest.mark.parametrize("name", ["loop", "transformers", "lightning", "accelerate"])
def test_adapter_and_framework_make_the_same_updates_in_micro_batches_of_the_same_size(adapters, name, monkeypatch):
    made, sizes, parameters = [], [], {}
    monkeypatch.setattr(adapters, "STEPS", 2)
    monkeypatch.setattr(adapters, "SAMPLES", (adapters.WARM_UP + 2) * adapters.BATCH)

    class Watched(adapters.Network):
        def __init__(self):
            super().__init__()
            made.append(self)

        def forward(self, inputs, labels):
            if torch.is_grad_enabled():
                sizes.append(len(inputs))
            return super().forward(inputs, labels)

    monkeypatch.setattr(adapters, "Network", Watched)
    for is_ours in (False, True):
        ended = []
        adapters.TRAININGS[name][1](is_ours, lambda: ended.append(None))  # noqa: B023
        assert len(ended) == adapters.WARM_UP + 2
        # Updates after the first ones, in which the adapter checks the loss.
        assert sizes[-2 * adapters.MICRO_BATCHES :] == [adapters.MICRO_BATCH] * 2 * adapters.MICRO_BATCHES
        parameters[is_ours] = torch.cat([one.detach().flatten() for one in made[-1].parameters()])

    torch.testing.assert_close(parameters[True], parameters[False], rtol=0.0, atol=1e-6)
