"""Quick fakes have the shapes, types and strides that PyTorch's own have."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoaccum._estimate.tracer import quick_fake

aten = torch.ops.aten
SHAPES = ((4, 6), (4, 6, 10), (4, 6, 8, 8), (4, 6, 4, 4, 4))


def look(value):
    return None if value is None else (value.shape, value.dtype, value.stride(), value.device)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.card_fakes
def test_batch_norm_is_as_pytorch_fakes_it(device, dtype, layout, shape):
    if layout is torch.channels_last and len(shape) != 4:
        pytest.skip("only images have that layout")
    with FakeTensorMode():
        source = torch.empty(shape, dtype=dtype, device=device).to(memory_format=layout)
        channels = [torch.empty(shape[1], device=device) for _ in range(4)]
        args = (source, *channels, True, 0.1, 1e-5)
        result = aten.native_batch_norm(*args)
        gradient = torch.empty_like(source)
        for mask in itertools.product([True, False], repeat=2):
            back = (gradient, source, channels[0], *channels[2:], *result[1:], True, 1e-5, [True, *mask])

            expected = aten.native_batch_norm_backward(*back)

            quick = quick_fake(aten.native_batch_norm_backward.default, back)
            assert list(map(look, quick)) == list(map(look, expected))
        assert list(map(look, quick_fake(aten.native_batch_norm.default, args))) == list(map(look, result))


def test_a_gradient_that_is_not_asked_for_is_not_made():
    """As the real operator has it, and PyTorch's fake has not."""
    source, channels = torch.randn(4, 6), [torch.ones(6) for _ in range(4)]
    _, mean, deviation = aten.native_batch_norm(source, *channels, True, 0.1, 1e-5)
    args = (source, source, channels[0], *channels[2:], mean, deviation, True, 1e-5, [False, True, True])

    real, quick = aten.native_batch_norm_backward(*args), quick_fake(aten.native_batch_norm_backward.default, args)

    assert [one is None for one in real] == [one is None for one in quick] == [True, False, False]


def test_what_is_no_training_is_asked_of_pytorch():
    with FakeTensorMode():
        channels = [torch.empty(6) for _ in range(4)]

        assert quick_fake(aten.native_batch_norm.default, (torch.empty(4, 6), *channels, False, 0.1, 1e-5)) is None
    assert quick_fake(aten.mm.default, (torch.empty(2, 2), torch.empty(2, 2))) is None
