"""benchmarks/adapters.py compares like with like: with an adapter and without, the same updates in the same cut."""

import importlib.util
import sys

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from folders import ROOT

BENCHMARKS = ROOT / "benchmarks"

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


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


@pytest.mark.parametrize("name", ["transformers", "lightning", "accelerate"])
def test_adapter_and_framework_make_the_same_updates_in_micro_batches_of_the_same_size(adapters, name, monkeypatch):
    sizes = []
    forward = adapters.Network.forward

    def watched(network, inputs, labels):
        if torch.is_grad_enabled():
            sizes.append(len(inputs))
        return forward(network, inputs, labels)

    monkeypatch.setattr(adapters.Network, "forward", watched)
    found = {}
    for by_adapter in (False, True):
        network, ended = adapters.FRAMEWORKS[name](adapters.Job(2, 8, updates=3, by_adapter=by_adapter))
        found[by_adapter] = (torch.cat([one.detach().flatten() for one in network.parameters()]), len(ended))
        # Updates after the first one, in which the adapter infers what the loss runs over.
        assert sizes[-2 * adapters.MICRO_BATCHES :] == [adapters.MICRO_BATCH] * 2 * adapters.MICRO_BATCHES
        sizes.clear()

    torch.testing.assert_close(found[True][0], found[False][0], rtol=0.0, atol=1e-6)
    assert found[True][1] == found[False][1] == 3


def test_summary_is_of_the_pairs_of_blocks(adapters):
    found = adapters.summary([(1.0, 1.1), (2.0, 2.4), (1.0, 1.3)])

    assert found["ratio"]["median"] == pytest.approx(1.2)
    assert found["added_us_per_micro_step"]["median"] == pytest.approx(0.3e6 / adapters.MICRO_BATCHES)
