"""The precision that was asked for, or what the device does well."""

import pytest
import torch
from torch import nn

from autoaccum._engine.precision import PRECISIONS, Precision, resolve
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError
from helpers import CPU


@pytest.fixture
def notices():
    return Notices(silent=True)


def dtype_within(precision):
    """In which type a linear layer computes."""
    with precision.autocast():
        return nn.functional.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    ("name", "dtype", "scaled"),
    [("fp32", torch.float32, False), ("bf16", torch.bfloat16, False), ("fp16", torch.float16, True)],
)
def test_named_precision_computes_in_its_type_and_scales_where_due(name, dtype, scaled, notices):
    precision = resolve(name, CPU, nn.Linear(2, 2), notices)

    assert precision.name == name
    assert dtype_within(precision) is dtype
    assert (precision.scaler is not None) is scaled
    assert notices.texts == ()


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.ReLU()], ids=["linear", "without parameters"])
def test_auto_on_the_host_is_fp32_and_said(model, notices):
    precision = resolve("auto", CPU, model, notices)

    assert (precision.name, precision.scaler) == ("fp32", None)
    assert notices.texts == ("precision: fp32 on cpu (precision='auto')",)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("asked", PRECISIONS)
def test_model_that_is_in_half_precision_is_left_so_without_casts_or_scaler(asked, name, dtype, notices):
    precision = resolve(asked, CPU, nn.Linear(2, 2, dtype=dtype), notices)

    assert (precision.name, precision.scaler) == (name, None)
    assert dtype_within(precision) is torch.float32
    assert notices.texts == (f"precision: {name}, in which the model's parameters are already",)


def test_model_of_mixed_types_is_cast(notices):
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2))

    assert dtype_within(resolve("bf16", CPU, model, notices)) is torch.bfloat16


@pytest.mark.parametrize("name", ["fp8", "FP16", "16-mixed", "", None, 16, torch.bfloat16])
def test_unknown_precision_is_refused_with_the_known_ones(name, notices):
    with pytest.raises(InvalidInputError) as caught:
        resolve(name, CPU, nn.Linear(2, 2), notices)

    assert f"precision={name!r}" in str(caught.value)
    assert all(repr(known) in str(caught.value) for known in PRECISIONS)


def test_scaler_is_whole_before_the_first_window():
    scaler = Precision("fp16", CPU).scaler

    assert isinstance(scaler._scale, torch.Tensor)
    assert isinstance(scaler._growth_tracker, torch.Tensor)
