import pytest
import torch

from allocations import changes, highest
from autoaccum._estimate.cpu_kernels import cpu_workspace
from autoaccum._estimate.tracer import Ledger

aten = torch.ops.aten
pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() != "AVX512",
        reason=f"oneDNN's choices were read off on AVX512, not {torch.backends.cpu.get_cpu_capability()}",
    ),
]

# Samples, channels in and out, pixels, dilation. By ONEDNN_VERBOSE=1, columns are multiplied for the source's gradient,
# the weight's, both or neither.
CONVOLUTIONS = {
    "neither": (4, 64, 64, 32, 4),
    "neither, few channels": (4, 16, 16, 32, 12),
    "source": (4, 64, 64, 32, 12),
    "source, more channels out": (2, 64, 128, 32, 12),
    "weight": (2, 128, 64, 16, 12),
    "weight, few pixels": (2, 512, 64, 14, 12),
    "both": (4, 64, 64, 32, 24),
    "one sample": (1, 64, 64, 16, 12),
}


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, False], [True, True, False]], ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_dilated_convolution_takes_what_its_rule_says(name, mask):
    samples, inputs, outputs, pixels, dilation = CONVOLUTIONS[name]
    source, weight = torch.randn(samples, inputs, pixels, pixels), torch.randn(outputs, inputs, 3, 3)

    check(source, weight, mask, ([1, 1], [dilation] * 2, [dilation] * 2, False, [0, 0], 1))


# Steps, pixels and filter of a convolution over time. The weight's gradient is made of columns in the first three.
OVER_TIME = {
    "one step": ((1, 4, 4), (3, 3, 3)),
    "two steps": ((2, 8, 8), (3, 3, 3)),
    "steps alone": ((2, 8, 8), (3, 1, 1)),
    "many steps": ((4, 8, 8), (3, 3, 3)),
    "pixels alone": ((1, 8, 8), (1, 3, 3)),
}


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, False]], ids=str)
@pytest.mark.parametrize("name", OVER_TIME)
def test_convolution_over_few_steps_takes_what_its_rule_says(name, mask):
    form, kernel = OVER_TIME[name]
    source, weight = torch.randn(2, 64, *form), torch.randn(64, 64, *kernel)

    check(source, weight, mask, ([1] * 3, [size // 2 for size in kernel], [1] * 3, False, [0] * 3, 1))


def check(source, weight, mask, options):
    gradient = torch.randn_like(aten.convolution(source, weight, None, *options))

    def run():
        return aten.convolution_backward(gradient, source, weight, None, *options, mask)

    run()  # what is made once and kept is not the step's
    with Ledger(1, "cpu", cpu_workspace) as ledger:
        kept = run()
    del kept

    # Buffers of each thread are not all told apart: a few hundred KiB.
    real = highest(changes(run)[0])
    assert ledger.timeline.peak().live_bytes == pytest.approx(real, rel=0.03, abs=256 * 1024)
