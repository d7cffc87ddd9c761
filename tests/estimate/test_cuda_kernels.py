"""What kernels take for themselves is asked of fakes on a card; the sizes are those of their sources."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from autoaccum._estimate.cuda_dispatch import cuda_workspace
from autoaccum._estimate.fake_backward import backward, loosened
from autoaccum._estimate.tracer import Ledger

pytestmark = pytest.mark.card_fakes

N, WIDE = 8, 64
FLOATS = N * WIDE * 4


def taken(function, *shape, dtype=torch.float32, turned=False):
    """Go forward and back through a function of one tensor; return what its kernels took for themselves."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        source = torch.empty(*(reversed(shape) if turned else shape), dtype=dtype, device="cuda:0", requires_grad=True)
        with Ledger(1, "cuda", cuda_workspace) as ledger:
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


def test_going_back_through_log_softmax_takes_nothing():
    assert taken(lambda x: x.log_softmax(-1).square().sum(), N, WIDE) == []


@pytest.mark.parametrize(
    ("function", "contiguous", "expected"),
    [
        (lambda x: x.log_softmax(-1), [], [FLOATS]),
        (lambda x: x.softmax(-1), [FLOATS], [FLOATS, FLOATS]),  # back the product; forward a copy before it
        (lambda x: functional.layer_norm(x, (WIDE,)), [], [FLOATS, FLOATS]),  # forward and back
    ],
    ids=["log_softmax", "softmax", "layer_norm"],
)
def test_what_is_not_contiguous_is_copied(function, contiguous, expected):
    assert taken(lambda x: function(x).square().sum(), N, WIDE) == contiguous
    assert taken(lambda x: function(x).square().sum(), N, WIDE, turned=True) == expected


def embedded(tokens, rows, *, dtype=torch.float32, scaled=False):
    with FakeTensorMode(allow_non_fake_inputs=True):
        table = torch.empty(rows, WIDE, dtype=dtype, device="cuda:0", requires_grad=True)
        indices = torch.zeros(tokens, dtype=torch.long, device="cuda:0")
        with Ledger(1, "cuda", cuda_workspace) as ledger:
            made = functional.embedding(indices, table, scale_grad_by_freq=scaled)
            backward(loosened(made.square().sum()))
    return [storage.size_bytes for storage in ledger.timeline.storages if storage.category.value == "workspace"]


def test_few_indices_of_an_embedding_are_not_sorted():
    assert embedded(3072, 50) == []


@pytest.mark.parametrize(("rows", "met"), [(50, 50), (10_000, 4000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_indices_of_an_embedding_are_sorted_and_added_up_in_parts(rows, met, dtype):
    parts = 400 + met

    assert embedded(4000, rows, dtype=dtype) == [(12_000 + 2 * met + parts) * 8, parts * WIDE * 4]


def test_indices_are_sorted_too_where_their_frequency_is_asked_for():
    assert len(embedded(10, 50, scaled=True)) == 2
