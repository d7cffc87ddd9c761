"""Recurrent layers on fake tensors of a card: shapes as PyTorch's, and what cuDNN keeps for the backward pass."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoaccum._estimate.cuda_dispatch import CudaCalls, without_driver
from autoaccum._estimate.cudnn_recurrent import NOTE
from autoaccum._estimate.estimate import trace_step
from autoaccum._estimate.fake import Stage
from autoaccum._estimate.gpus import Card
from autoaccum._estimate.tracer import Ledger

pytestmark = pytest.mark.card_fakes

MIB = 2**20
CARD = Card("some-24gb", 24 * 2**30, 400 * MIB, bf16=True, source="made up for tests")
CUDA = torch.device("cuda", 0)
LAYERS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {"batch_first": True}),
    "rnn": (nn.RNN, {"nonlinearity": "relu"}),
    "two directions": (nn.LSTM, {"bidirectional": True, "batch_first": True}),
    "projected": (nn.LSTM, {"proj_size": 5}),
    "without bias": (nn.GRU, {"bias": False, "bidirectional": True}),
}


def called(layer, *shape):
    """Return the output and the storages of a call on a fake card."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = Stage(CUDA).copied(layer)
        ledger = Ledger(1, "cuda")
        with without_driver(), CudaCalls(), ledger:
            made = fake(torch.empty(shape, device=CUDA))
    return made, ledger.timeline


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
def test_results_are_those_of_the_real_layer(name):
    kind, options = LAYERS[name]
    layer = kind(8, 16, 2, **options)

    (output, states), _ = called(layer, 7, 3, 8)

    real_output, real_states = layer(torch.zeros(7, 3, 8))
    several = isinstance(states, tuple)
    for fake, real in zip(
        (output, *(states if several else (states,))),
        (real_output, *(real_states if several else (real_states,))),
        strict=True,
    ):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
        assert fake.requires_grad


@pytest.mark.parametrize(("kind", "reserve_bytes"), [(nn.LSTM, 736_000_000), (nn.GRU, 864_000_000)])
def test_what_is_kept_for_the_backward_pass_is_as_published(kind, reserve_bytes):
    """The sizes are published; that they are of 25,000 time steps is not, and their ratio does not depend on it."""
    _, timeline = called(kind(123, 320, 4), 500, 50, 123)

    assert reserve_bytes in [storage.size_bytes for storage in timeline.storages]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", LAYERS)
def test_no_real_step_is_needed_and_every_weight_gets_its_gradient(name, precision):
    kind, options = LAYERS[name]

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(8, 16, 2, **options)

        def forward(self, x):
            return self.layer(x)[0].sum((1, 2))

    # Samples run along the first dimension, whatever the layer takes it for.
    model, batch = Last(), torch.zeros(6, 4, 8)
    traced = trace_step(model, batch, loss=lambda outputs, _: outputs.mean(), kind="cuda", precision=precision)

    footprint = traced.estimate(CARD).footprints[-1]
    assert not traced.real_step
    assert NOTE in traced.notes
    assert footprint.gradients_bytes == footprint.parameters_bytes
    assert footprint.optimizer_bytes == 2 * footprint.parameters_bytes


def test_a_further_sample_takes_what_its_time_steps_keep():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.LSTM(64, 256, batch_first=True), nn.Linear(256, 10)

        def forward(self, x):
            return self.head(self.layer(x)[0][:, -1])

    batch = (torch.zeros(4, 100, 64), torch.zeros(4, dtype=torch.long))

    estimate = trace_step(Last(), batch, kind="cuda", most=2048).estimate(CARD)

    # Four gates, the cell and the output.
    assert estimate.bytes_per_sample > 100 * 256 * 6 * 4
    assert estimate.largest(2**30, 2**20) == pytest.approx(2**30 / estimate.bytes_per_sample, rel=0.05)
