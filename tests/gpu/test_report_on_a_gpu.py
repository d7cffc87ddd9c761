"""The measured report on a real GPU: parts that add up, peaks in the terms of the limit, nothing changed."""

import pytest
import torch
from torch import nn

import autoaccum
from support.models.small import assert_bitwise, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def measured():
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.GELU()))).cuda()
    batch = torch.randn(64, 2048), torch.randn(64, 2048)
    before = state_of(model)
    report = autoaccum.preflight(model, batch, 65536, memory_limit="1GiB", device="cuda", precision="fp32")
    assert_bitwise(state_of(model), before)
    return report.measured


def test_the_target_is_cut_in_what_fits(measured):
    assert 0 < measured.micro_batch < 65536
    assert {trial.fits for trial in measured.trials} == {True, False}


def test_parts_add_up_to_what_tensors_held(measured):
    found = measured.footprint

    assert sum(found.bytes_by_kind.values()) == found.peak_bytes <= found.reserved_bytes == measured.peak_bytes
    assert found.gradients_bytes == found.parameters_bytes
    assert found.optimizer_bytes >= 2 * found.parameters_bytes


def test_the_peak_counts_the_model_and_lies_within_the_limit(measured):
    assert measured.device.holds_model
    assert measured.footprint.parameters_bytes < measured.peak_bytes <= measured.device.room_bytes <= 2**30
