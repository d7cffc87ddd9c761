import pytest
import torch
from torch import nn

from allocations import changes, highest, real_peak
from autoaccum._estimate import cpu_recurrent
from autoaccum._estimate.cpu_kernels import cpu_workspace
from autoaccum._estimate.cpu_recurrent import kept_bytes
from autoaccum._estimate.estimate import estimate_step
from autoaccum._estimate.tracer import Ledger

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("two_threads")
of_known_formulas = pytest.mark.skipif(
    cpu_recurrent._spaces_here() != cpu_recurrent._SPACES, reason="the formulas are those of a later oneDNN"
)

# Steps, samples, inputs, hidden states.
LAYERS = {
    "small": (8, 4, 24, 20),
    "wide inputs": (16, 8, 520, 64),
    "wide states": (65, 16, 32, 64),
    "rows that would fall on the same lines": (32, 16, 256, 256),
    "odd": (16, 8, 65, 65),
}
of_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="oneDNN's layouts in bf16 were read off on AVX512, and older processors run no LSTM in bf16",
)
TYPES = [torch.float32, pytest.param(torch.bfloat16, marks=of_avx512)]


def layer_of(steps, samples, inputs, hidden, dtype):
    source = torch.randn(steps, samples, inputs, dtype=dtype)
    weights = [torch.randn(4 * hidden, columns, dtype=dtype) for columns in (inputs, hidden)]
    biases = [torch.randn(4 * hidden, dtype=dtype) for _ in range(2)]
    states = [torch.zeros(samples, hidden, dtype=dtype) for _ in range(2)]
    return (source, *weights, *biases, *states, False, [], 2, hidden, 1, True, False, False, True)


def told(function):
    with Ledger(1, "cpu", cpu_workspace) as ledger:
        kept = function()
    del kept
    return ledger.timeline.peak().live_bytes


@of_known_formulas
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_lstm_keeps_what_its_formula_says(name, dtype):
    layer = layer_of(*LAYERS[name], dtype)

    workspace = aten.mkldnn_rnn_layer(*layer)[3]

    # To the page in float32; rows of bf16 are a fit to measurements.
    off = 0 if dtype is torch.float32 else 0.01
    assert kept_bytes(layer[0], layer[1]) == pytest.approx(workspace.nbytes, rel=off, abs=0)


@of_known_formulas
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_lstm_takes_what_its_rules_say(name, dtype):
    layer = layer_of(*LAYERS[name], dtype)
    hidden = layer[10]
    results = aten.mkldnn_rnn_layer(*layer)
    above = torch.randn(*layer[0].shape[:2], hidden, dtype=dtype)
    none = torch.zeros_like(results[1])
    options = (False, 2, hidden, 1, True, True, False, [], False)

    def forward():
        return aten.mkldnn_rnn_layer(*layer)

    def backward():
        return aten.mkldnn_rnn_layer_backward(*layer[:7], *results[:3], above, none, none, *options, results[3].clone())

    for run in (forward, backward):
        run()  # what is made once and kept is not the step's

        # Small buffers of each thread are not counted.
        assert told(run) == pytest.approx(highest(changes(run)[0]), rel=0.02, abs=64 * 1024)


class Tagger(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layer = nn.LSTM(128, 128, batch_first=True, **options)
        self.head = nn.LazyLinear(10)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


@of_known_formulas
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=of_avx512)])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_estimate_of_an_lstm_is_what_a_real_step_allocates(options, precision):
    batch = torch.randn(8, 64, 128), torch.randint(10, (8,))
    model = Tagger(**options)
    model(batch[0])

    predicted = estimate_step(model, batch, precision=precision)
    real = real_peak(model, batch, precision=precision)

    assert not predicted.real_step
    assert predicted.footprints[-1].peak_bytes == pytest.approx(real, rel=0.02)


def test_an_lstm_of_another_onednn_is_predicted_by_a_real_step(monkeypatch):
    monkeypatch.setattr(cpu_recurrent, "_spaces_here", lambda: 9)
    batch = torch.randn(4, 16, 128), torch.randint(10, (4,))

    model = Tagger()
    model(batch[0])

    predicted = estimate_step(model, batch)

    assert predicted.real_step
    assert "keeps more for an LSTM" in str(predicted.notes)
