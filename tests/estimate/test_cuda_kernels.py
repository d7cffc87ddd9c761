"""What kernels take for themselves is asked of fakes on a GPU; the sizes are those of their sources."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from autoaccum._estimate.cuda_dispatch import _layouts_of_cudnn as layouts_of_cudnn
from autoaccum._estimate.cuda_kernels import workspace
from autoaccum._estimate.fake_backward import backward, loosened
from autoaccum._estimate.tracer import Ledger

pytestmark = pytest.mark.gpu_fakes

N, WIDE = 8, 64
FLOATS = N * WIDE * 4


def taken(function, *shape, dtype=torch.float32, turned=False):
    """Go forward and back through a function of one tensor; return what its kernels took for themselves."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        source = torch.empty(*(reversed(shape) if turned else shape), dtype=dtype, device="cuda:0", requires_grad=True)
        with Ledger(1, "cuda", workspace) as ledger:
            backward(loosened(function(source.t() if turned else source)))
    return [storage.size_bytes for storage in ledger.timeline.storages if storage.category.value == "workspace"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_going_back_through_softmax_takes_the_gradient_times_the_result(dtype):
    assert taken(lambda x: x.softmax(-1).square().sum(), N, WIDE, dtype=dtype) == [N * WIDE * dtype.itemsize]


def test_a_softmax_in_float32_of_halves_takes_it_in_float32():
    made = taken(lambda x: functional.softmax(x, -1, dtype=torch.float32).square().sum(), N, WIDE, dtype=torch.bfloat16)

    assert made == [FLOATS]


def test_that_product_is_copied_where_the_gradient_comes_turned():
    """As from attention over the other side of the same scores: `scores.softmax(-1).mT @ values`."""
    assert taken(lambda x: (x.softmax(-1).mT @ x).square().sum(), 2, N, WIDE) == [2 * FLOATS, 2 * FLOATS]


def convolved(inputs=64, outputs=128, kernel=3, *, stride=1, tensor_float=False, layout=torch.contiguous_format):
    """Go forward and back through a convolution in float32; return what its kernels took for themselves."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        source = torch.empty(N, inputs, 28, 28, device="cuda:0", requires_grad=True).to(memory_format=layout)
        weight = torch.empty(outputs, inputs, kernel, kernel, device="cuda:0", requires_grad=True)
        with Ledger(1, "cuda", partial(workspace, tensor_float=tensor_float)) as ledger, layouts_of_cudnn():
            backward(loosened(functional.conv2d(source, weight, stride=stride).square().sum()))
    return [storage.size_bytes for storage in ledger.timeline.storages if storage.category.value == "workspace"]


def test_filters_of_3_by_3_are_transformed_as_a_whole_forward_and_back():
    """By Winograd's algorithm: 7 x 7 tiles of 26 x 26 results, each of 6 x 6 numbers."""
    each = 36 * 4

    assert convolved() == 2 * [each * (64 + 128) * N * 7 * 7, each * 64 * 128]


@pytest.mark.parametrize(
    "options",
    [{"kernel": 1}, {"kernel": 5}, {"stride": 2}, {"tensor_float": True}, {"layout": torch.channels_last}],
    ids=str,
)
def test_other_convolutions_are_not(options):
    assert convolved(**options) == []
