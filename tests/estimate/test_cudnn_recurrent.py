"""Recurrent layers on fake tensors of a GPU: shapes as PyTorch's, and what cuDNN keeps for the backward pass."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoaccum._estimate.cuda_dispatch import CudaCalls, without_driver
from autoaccum._estimate.cudnn_recurrent import NOTE
from autoaccum._estimate.estimate import trace_step
from autoaccum._estimate.fake import FakeCopies
from autoaccum._estimate.gpus import GPU
from autoaccum._estimate.tracer import Ledger
from support.models.small import a_few_of

pytestmark = pytest.mark.gpu_fakes

MIB = 2**20
SMALL_GPU = GPU("some-24gb", 24 * 2**30, 400 * MIB, (8, 0), source="made up for tests")
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
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = FakeCopies(CUDA).copied(layer)
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


def test_an_lstm_takes_what_it_took_on_an_h200():
    """4 layers of 1024, 64 samples of 256 time steps, in float32; sizes are those of its allocator."""
    _, timeline = called(nn.LSTM(1024, 1024, 4), 256, 64, 1024)

    reserve, workspace = 1_543_504_128, 580_911_872
    sizes = [storage.size_bytes for storage in timeline.storages]
    assert min(abs(size - reserve) for size in sizes) <= 256
    assert min(abs(size - workspace) for size in sizes) < workspace / 1000


@pytest.mark.parametrize(("name", "precision"), a_few_of(LAYERS, ["fp32", "bf16"]))
def test_every_weight_gets_its_gradient(name, precision):
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

    footprint = traced.estimate(SMALL_GPU).footprints[-1]
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

    estimate = trace_step(Last(), batch, kind="cuda", most=2048).estimate(SMALL_GPU)

    # Four gates, the cell and the output.
    assert estimate.bytes_per_sample > 100 * 256 * 6 * 4
    assert estimate.largest(2**30, 2**20) == pytest.approx(2**30 / estimate.bytes_per_sample, rel=0.15)
