import pytest
import torch

from allocations import changes, highest
from autoaccum._estimate.cpu_kernels import cpu_workspace
from autoaccum._estimate.tracer import Ledger

aten = torch.ops.aten

CONVOLUTIONS = {
    "first": (3, 64, 7, 2, 1, 64),
    "3x3": (64, 64, 3, 1, 1, 32),
    "strided": (64, 128, 3, 2, 1, 32),
    "pointwise": (64, 256, 1, 1, 1, 32),
    "pointwise, strided": (128, 256, 1, 2, 1, 32),
    "depthwise": (64, 64, 3, 1, 64, 32),
    "depthwise, odd channels": (24, 24, 3, 1, 24, 32),
    "groups": (64, 64, 3, 1, 4, 32),
    "odd channels": (24, 56, 3, 1, 1, 32),
    "many channels": (512, 512, 3, 1, 1, 7),
}
# The blocks of oneDNN that were measured; those of other processors differ in what is rounded up.
wide = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason=f"oneDNN's layouts were read off on AVX512, not {torch.backends.cpu.get_cpu_capability()}",
)


pytestmark = pytest.mark.usefixtures("two_threads")


def told(function):
    """The peak that the ledger writes down with the rules."""
    with Ledger(1, "cpu", cpu_workspace) as ledger:
        kept = function()
    del kept
    return ledger.timeline.peak().live_bytes


def convolution(inputs, outputs, kernel, stride, groups, pixels, dtype, layout=torch.contiguous_format):
    source = torch.randn(8, inputs, pixels, pixels, dtype=dtype).to(memory_format=layout)
    weight = torch.randn(outputs, inputs // groups, kernel, kernel, dtype=dtype)
    return source, weight, [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups


def forward_of(source, weight, *options):
    return lambda: aten.convolution(source, weight, None, *options)


def backward_of(source, weight, *options):
    gradient = torch.randn_like(aten.convolution(source, weight, None, *options))
    # A network's first layer is not asked for the gradient of its input.
    mask = [source.shape[1] > 3, True, False]
    return lambda: aten.convolution_backward(gradient, source, weight, None, *options, mask)


@wide
@pytest.mark.parametrize("direction", [forward_of, backward_of])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_takes_what_its_rule_says(name, dtype, direction):
    run = direction(*convolution(*CONVOLUTIONS[name], dtype))
    run()  # what is made once and kept is not the step's

    real = highest(changes(run)[0])

    # Buffers of each thread are not all told apart: a few hundred KiB.
    assert told(run) == pytest.approx(real, rel=0.03, abs=512 * 1024)


# With one sample, or filters of 1 x 1 x 1, PyTorch does not ask oneDNN.
@pytest.mark.parametrize("direction", [forward_of, backward_of])
@pytest.mark.parametrize(("samples", "kernel"), [(1, 1), (1, 3), (2, 1), pytest.param(2, 3, marks=wide)])
def test_convolution_over_time_takes_what_its_rule_says(kernel, samples, direction):
    source, weight = torch.randn(samples, 64, 8, 14, 14), torch.randn(64, 64, kernel, kernel, kernel)
    run = direction(source, weight, [1] * 3, [kernel // 2] * 3, [1] * 3, False, [0] * 3, 1)
    run()

    assert told(run) == pytest.approx(highest(changes(run)[0]), rel=0.03, abs=512 * 1024)


@pytest.mark.skipif(torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN convolves in bf16 on this processor")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("direction", [forward_of, backward_of])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_that_onednn_does_not_take_is_unfolded(name, direction, layout):
    run = direction(*convolution(*CONVOLUTIONS[name], torch.bfloat16, layout))

    assert told(run) == pytest.approx(highest(changes(run)[0]), rel=0.03, abs=4096)


@wide
@pytest.mark.parametrize("direction", [forward_of, backward_of])
@pytest.mark.parametrize("name", ["3x3", "depthwise"])
def test_channels_last_is_read_as_it_is(name, direction):
    run = direction(*convolution(*CONVOLUTIONS[name], torch.float32, torch.channels_last))
    run()

    real = highest(changes(run)[0])

    assert told(run) == pytest.approx(real, rel=0.03, abs=512 * 1024)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5),
        lambda x: aten._softmax(x, -1, False),
        lambda x: aten.native_layer_norm(x, [32, 32], None, None, 1e-5),
        lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2]),
        lambda x: aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[:2],
    ],
    ids=["batch norm", "softmax", "layer norm", "max pool", "attention"],
)
def test_other_operators_take_next_to_nothing(run):
    x = torch.randn(8, 16, 32, 32)
    run(x)

    real = highest(changes(lambda: run(x))[0])

    assert told(lambda: run(x)) == pytest.approx(real, rel=0.02, abs=256 * 1024)
