"""What the simulated device counts, to the byte."""

import gc

import pytest
import torch

from autoaccum._memory import Simulated
from autoaccum.errors import InvalidInputError

KIB = 1024


@pytest.fixture
def device():
    return Simulated(100 * KIB)


def floats(n_bytes):
    return torch.zeros(n_bytes // 4)


def test_storage_counts_from_its_making_to_its_death(device):
    with device.limited(None):
        tensor = floats(40 * KIB)
        alive = device.reading().used_bytes
        del tensor
        dead = device.reading().used_bytes

    assert (alive, dead) == (40 * KIB, 0)


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


def test_update_in_place_counts_nothing(device):
    tensor = floats(40 * KIB)

    with device.limited(None):
        tensor.add_(1).mul_(2)
        used = device.reading().used_bytes

    assert used == 0


def test_resized_storage_counts_by_its_new_size(device):
    with device.limited(None):
        tensor = floats(4 * KIB)
        tensor.resize_(2 * KIB)
        used = device.reading().used_bytes

    assert used == 8 * KIB


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


def test_peaks_are_the_same_in_every_run(device):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    peaks = set()

    for _ in range(3):
        with device.limited(None):
            model(torch.ones(16, 8)).sum().backward()
            peaks.add(device.peak_bytes())
        model.zero_grad()
        gc.collect()

    assert len(peaks) == 1


def test_result_that_does_not_fit_leaves_nothing(device):
    with device.limited(None):
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 101\.0 KiB"):
            floats(101 * KIB)
        used, peak = device.reading().used_bytes, device.peak_bytes()

    assert (used, peak) == (0, 0)


def test_exactly_the_capacity_fits(device):
    with device.limited(None):
        assert floats(100 * KIB).nbytes == device.reading().used_bytes


def test_limit_below_the_capacity_counts(device):
    with device.limited(50 * KIB), pytest.raises(torch.OutOfMemoryError):
        floats(51 * KIB)


def test_limit_above_the_capacity_does_not_add_to_it(device):
    with device.limited(500 * KIB), pytest.raises(torch.OutOfMemoryError):
        floats(101 * KIB)


def test_storages_of_an_earlier_context_are_free_of_charge(device):
    with device.limited(None):
        old = floats(90 * KIB)
    with device.limited(None):
        new = floats(90 * KIB)
        used = device.reading().used_bytes
        del old
        still = device.reading().used_bytes

    assert used == still == new.nbytes


def test_outside_a_context_nothing_is_enforced_but_ensure_answers(device):
    floats(500 * KIB)

    device.ensure(100 * KIB)
    with pytest.raises(torch.OutOfMemoryError):
        device.ensure(101 * KIB)


@pytest.mark.parametrize("capacity", [0, -1, True, "0.5", "50%", 0.5, None, "much"])
def test_capacity_that_is_no_size_is_refused(capacity):
    with pytest.raises(InvalidInputError, match="capacity="):
        Simulated(capacity)
