"""How what ranks must have alike is described: equal where it is alike, and otherwise not."""

import numpy as np
import pytest
import torch

from autoaccum._distributed.descriptions import checksums, text_of


@pytest.mark.parametrize("value", [np.longdouble(1.5), np.clongdouble(1.5), np.array([1.5, 2.5], np.longdouble)])
def test_numbers_that_no_type_of_python_holds_are_described_by_their_values(value):
    assert "1.5" in text_of(value)
    assert text_of(value) == text_of(value.copy())
    assert text_of(value) != text_of(value + 1)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
)
def test_checksum_differs_where_a_bit_or_an_order_does_and_not_where_strides_do(dtype):
    chance = torch.Generator().manual_seed(0)
    one = torch.randint(0, 2, (1500, 2000), generator=chance).to(dtype)
    one[0, :2] = torch.tensor([0, 1]).to(dtype)
    other, swapped = one.clone(), one.clone()
    other[-1, -1] = 1 - int(one[-1, -1].real)
    swapped[0, :2] = swapped[0, :2].flip(0)

    own, strided, changed, moved = checksums([one, one.t().contiguous().t(), other, swapped])

    assert own == strided
    assert own not in (changed, moved)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_checksum_differs_where_all_signs_do(dtype):
    one = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)

    own, negative = checksums([one, one * -1])

    assert own != negative


def test_tensors_of_no_dimension_and_of_no_element_have_checksums():
    assert len(checksums([torch.ones(()), torch.ones(0), torch.ones(3).expand(2, 3)])) == 3
