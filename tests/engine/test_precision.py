"""The precision that was asked for, or what the device does well."""

import pytest
import torch
from torch import nn

from autoaccum._engine.precision import PRECISIONS, resolve
from autoaccum._system.notices import Notices
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
