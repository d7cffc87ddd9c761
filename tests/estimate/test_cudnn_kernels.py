import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoaccum._estimate.cuda_dispatch import cuda_workspace
from autoaccum._estimate.cudnn_kernels import layouts_without_driver
from autoaccum._estimate.tracer import Ledger

pytestmark = pytest.mark.card_fakes

aten = torch.ops.aten
N, PIXELS = 8, 28


@pytest.fixture(autouse=True)
def fakes():
    with FakeTensorMode(allow_non_fake_inputs=True), layouts_without_driver():
        yield


def convolution(inputs=64, outputs=128, kernel=3, *, groups=1, dtype=torch.bfloat16, layout=torch.contiguous_format):
    """Arguments of a convolution on a card that is not there; both are in the same layout."""
    source = torch.empty(N, inputs, PIXELS, PIXELS, dtype=dtype, device="cuda:0").to(memory_format=layout)
    weight = torch.empty(outputs, inputs // groups, kernel, kernel, dtype=dtype, device="cuda:0")
    weight = weight.to(memory_format=layout)
    return source, weight, [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], groups


def forward(source, weight, *options, **card):
    """What a forward pass takes beside its arguments and its result."""
    result = aten.convolution(source, weight, None, *options)
    workspace = cuda_workspace(aten.convolution.default, (source, weight, None, *options), result, **card)
    return 0 if workspace is None else sum(workspace.beside)


def backward(source, weight, *options, mask=(True, True), **card):
    """What each half of a backward pass takes, its result included."""
    gradient = torch.empty_like(aten.convolution(source, weight, None, *options))
    args = (gradient, source, weight, None, *options, [*mask, False])
    workspace = cuda_workspace(aten.convolution_backward.default, args, aten.convolution_backward(*args), **card)
    return [] if workspace is None else [sum(step) for step in workspace.steps]


@pytest.mark.parametrize("kernel", [3, 1])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_tensor_cores_read_and_write_is_turned(dtype, groups, kernel):
    source, weight, *options = convolution(kernel=kernel, groups=groups, dtype=dtype)

    assert forward(source, weight, *options) == 3 * source.nbytes + weight.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_channels_last_is_not_turned(dtype):
    assert forward(*convolution(dtype=dtype, layout=torch.channels_last)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_channels_last_stays_so_without_a_driver(dtype):
    source, weight, *options = convolution(dtype=dtype, layout=torch.channels_last)
    for given in (source, source.contiguous()):
        result = aten.convolution(given, weight, None, *options)

        assert result.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_few_channels_are_padded_whatever_the_layout(layout):
    source, weight, *options = convolution(3, 64, layout=layout)
    turned_result = 0 if layout is torch.channels_last else N * 64 * PIXELS**2 * 2

    assert forward(source, weight, *options) == (source.nbytes + weight.nbytes) // 3 * 8 + turned_result


def test_float32_that_is_not_for_tensor_cores_is_not_turned(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    assert forward(*convolution(kernel=1, dtype=torch.float32)) == 0
    assert forward(*convolution(kernel=1, dtype=torch.bfloat16)) > 0


def test_depthwise_convolution_has_a_kernel_of_its_own():
    assert forward(*convolution(64, 64, groups=64)) == 0
    assert backward(*convolution(64, 64, groups=64)) == []


def test_source_in_another_layout_than_the_weight_is_copied():
    source, weight, *options = convolution(layout=torch.channels_last)
    source = source.contiguous()

    assert forward(source, weight, *options) == source.nbytes


def test_backward_pass_turns_what_each_half_reads_and_writes():
    source, weight, *options = convolution()
    gradient_bytes = 2 * source.nbytes
    turned = gradient_bytes + source.nbytes + weight.nbytes
    of_source, of_weight = backward(source, weight, *options)

    assert of_source == source.nbytes + turned
    assert source.nbytes + weight.nbytes + turned < of_weight <= source.nbytes + weight.nbytes + turned + (16 << 20)


def test_weights_gradient_is_summed_in_parts_even_where_nothing_is_turned():
    source, weight, *options = convolution(layout=torch.channels_last)
    tiles = 1 * 5  # 128 outputs, and 64 * 9 numbers for each, by tiles of 128

    assert backward(source, weight, *options, mask=(False, True)) == [
        weight.nbytes + 132 // tiles * weight.numel() * 4,
    ]


def test_large_weights_are_summed_in_one_part():
    source, weight, *options = convolution(2048, 2048, layout=torch.channels_last)

    assert backward(source, weight, *options, mask=(False, True)) == [weight.nbytes + weight.numel() * 4]


def test_first_layer_has_no_gradient_of_its_input():
    assert len(backward(*convolution(3, 64), mask=(False, True))) == 1


def test_workspace_is_limited_as_cudnn_is_told(monkeypatch):
    source, weight, *options = convolution()
    assert forward(source, weight, *options) > 1 << 20

    monkeypatch.setenv("CUDNN_CONV_WSCAP_DBG", "1")

    assert forward(source, weight, *options) == 1 << 20


def test_workspace_is_gone_after_the_call():
    source, weight, *options = convolution()

    with Ledger(N, "cuda", cuda_workspace) as ledger:
        kept = aten.convolution(source, weight, None, *options)

    taken = forward(source, weight, *options)
    assert ledger.timeline.peak().live_bytes == kept.nbytes + taken
    assert sum(ledger.timeline.storages[number].size_bytes for number in ledger.timeline.alive_at(10**9)) == kept.nbytes


@pytest.mark.parametrize("dimensions", [1, 3])
def test_convolutions_of_other_dimensions_have_the_same_rule(dimensions):
    source = torch.empty(N, 64, *[4] * dimensions, dtype=torch.bfloat16, device="cuda:0")
    weight = torch.empty(128, 64, *[1] * dimensions, dtype=torch.bfloat16, device="cuda:0")
    options = [1] * dimensions, [0] * dimensions, [1] * dimensions, False, [0] * dimensions, 1

    assert forward(source, weight, *options) == 3 * source.nbytes + weight.nbytes


# Tiles of 4 x 4 results, each of 6 x 6 numbers in float32, of what is read and of what is written; and the filters.
WINOGRAD = 36 * 4 * (N * (PIXELS // 4) ** 2 * (64 + 128) + 64 * 128)


def test_float32_without_tensor_cores_is_convolved_by_winograds_algorithm():
    source, weight, *options = convolution(dtype=torch.float32)
    assert forward(source, weight, *options, tensor_float=False) == WINOGRAD
    assert backward(source, weight, *options, tensor_float=False) == [
        source.nbytes + WINOGRAD,
        source.nbytes + weight.nbytes + WINOGRAD,
    ]


def test_what_winograds_algorithm_transforms_is_fixed_or_grows_with_the_samples():
    source, weight, *options = convolution(dtype=torch.float32)

    def pieces(source):
        result = aten.convolution(source, weight, None, *options)
        args = source, weight, None, *options
        return cuda_workspace(aten.convolution.default, args, result, tensor_float=False).beside

    one, half = pieces(source), pieces(source[: N // 2])
    assert [piece / other for piece, other in zip(one, half, strict=True)] == [2, 1]


@pytest.mark.parametrize("tensor_float", [True, False])
@pytest.mark.parametrize(("samples", "channels"), [(N, 0), (0, 64)])
def test_what_is_empty_takes_nothing(samples, channels, tensor_float):
    source, weight, *options = convolution(channels, dtype=torch.float32)

    assert forward(source[:samples], weight, *options, tensor_float=tensor_float) == 0
    assert backward(source[:samples], weight, *options, tensor_float=tensor_float) == []


def test_halves_are_for_tensor_cores_whatever_float32_is():
    assert forward(*convolution(), tensor_float=False) == forward(*convolution())


@pytest.mark.parametrize(
    "changed",
    [{"kernel": 1}, {"kernel": 5}, {"groups": 2}, {"layout": torch.channels_last}],
    ids=str,
)
def test_other_filters_and_layouts_are_not_convolved_so(changed):
    assert forward(*convolution(dtype=torch.float32, **changed), tensor_float=False) == 0


@pytest.mark.parametrize("changed", [{2: [2, 2]}, {4: [2, 2]}], ids=["stride", "dilation"])
def test_steps_between_pixels_are_not_convolved_so(changed):
    arguments = [changed.get(place, argument) for place, argument in enumerate(convolution(dtype=torch.float32))]

    assert forward(*arguments, tensor_float=False) == 0


@pytest.mark.parametrize("allowed", ["ieee", "tf32"])
def test_what_convolutions_were_told_of_float32_counts(allowed):
    of_convolutions = getattr(torch.backends.cudnn, "conv", None)
    if of_convolutions is None:
        pytest.skip("this PyTorch tells all of cuDNN at once")
    before = of_convolutions.fp32_precision
    of_convolutions.fp32_precision = allowed
    try:
        taken = forward(*convolution(dtype=torch.float32))
    finally:
        of_convolutions.fp32_precision = before

    source, weight, *_ = convolution(dtype=torch.float32)
    assert taken == (WINOGRAD if allowed == "ieee" else 3 * source.nbytes + weight.nbytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_benchmark_mode_the_largest_known_workspace_counts(monkeypatch, dtype):
    source, weight, *options = convolution(dtype=dtype)
    usual = forward(source, weight, *options), backward(source, weight, *options)
    other = forward(*convolution(kernel=1))

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)

    assert forward(source, weight, *options) > usual[0]
    assert all(now >= before for now, before in zip(backward(source, weight, *options), usual[1], strict=True))
    assert forward(*convolution(kernel=1)) == other
