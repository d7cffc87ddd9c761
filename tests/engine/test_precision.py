"""The precision that was asked for, or what the device does well."""

import pytest
import torch
from torch import nn

from autoaccum._engine.precision import PRECISIONS, resolve
from autoaccum._system.notices import Notices  # an argument
from support.models.small import CPU


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("asked", PRECISIONS)
def test_model_that_is_in_half_precision_is_left_so_without_casts_or_scaler(asked, name, dtype):
    notices = Notices(silent=True)
    precision = resolve(asked, CPU, nn.Linear(2, 2, dtype=dtype), notices)

    assert (precision.name, precision.scaler) == (name, None)
    with precision.autocast():
        assert nn.functional.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype is torch.float32
    assert notices.texts == (f"precision {name} (as the model's parameters have it)",)
