"""What the simulated device counts, to the byte."""

import pytest
import torch

from autoaccum._memory.simulated import Simulated

KIB = 1024


@pytest.fixture
def device():
    return Simulated(100 * KIB)


def floats(n_bytes):
    return torch.zeros(n_bytes // 4)


def test_view_counts_nothing_and_keeps_its_storage_alive(device):
    with device.limited(None):
        tensor = floats(40 * KIB)
        view = tensor[:2].view(1, 2)
        both = device.reading().used_bytes
        del tensor
        view_alone = device.reading().used_bytes
        del view
        none = device.reading().used_bytes

    assert (both, view_alone, none) == (40 * KIB, 40 * KIB, 0)


def test_tensor_from_python_numbers_counts(device):
    with device.limited(None):
        tensor = torch.tensor([1.0] * 1024)
        used = device.reading().used_bytes

    assert used == tensor.nbytes == 4 * KIB


def test_what_lived_before_is_free_of_charge(device):
    before = floats(300 * KIB)

    with device.limited(None):
        before = before[:5]
        used = device.reading().used_bytes

    assert used == 0


def test_backward_pass_is_counted_exactly(device):
    weight = torch.zeros(1024, requires_grad=True)

    with device.limited(None):
        loss = (weight * 2).sum()
        device.reset_peak()
        loss.backward()
        peak, used = device.peak_bytes(), device.reading().used_bytes

    assert used == 4 * KIB + 4  # the gradient and the loss
    assert peak >= used


def test_backward_pass_that_does_not_fit_raises(device):
    weight = torch.zeros(10 * KIB, requires_grad=True)  # 40 KiB

    with device.limited(None):
        loss = (weight * 2).square().sum()  # 80 KiB alive, so that no gradient fits
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()

    assert weight.grad is None


def test_result_that_does_not_fit_leaves_nothing(device):
    with device.limited(None):
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 101\.0 KiB"):
            floats(101 * KIB)
        used, peak = device.reading().used_bytes, device.peak_bytes()

    assert (used, peak) == (0, 0)


def test_limit_above_the_capacity_does_not_add_to_it(device):
    with device.limited(500 * KIB), pytest.raises(torch.OutOfMemoryError):
        floats(101 * KIB)


def test_outside_a_context_nothing_is_enforced_but_ensure_answers(device):
    floats(500 * KIB)

    device.ensure(100 * KIB)
    with pytest.raises(torch.OutOfMemoryError):
        device.ensure(101 * KIB)
