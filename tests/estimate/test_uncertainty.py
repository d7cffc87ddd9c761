import pytest
from torch import nn

from autoaccum._estimate.uncertainty import MARGINS, margin_for


def margin(*modules, precision="bf16", real_step=False):
    return margin_for(nn.Sequential(*modules).modules(), precision, real_step=real_step)


def test_a_single_convolution_makes_patches():
    convolution = nn.Conv2d(3, 8, 3)

    assert margin(convolution, nn.Linear(8, 8)) == MARGINS["others", "half"]
    assert margin(convolution, nn.Conv2d(8, 8, 3)) == MARGINS["convolutions", "half"]
    assert margin(nn.Linear(8, 8), precision="fp32") == MARGINS["others", "fp32"]


@pytest.mark.parametrize(("modules", "real_step"), [((nn.GRU(8, 8),), False), ((nn.Linear(8, 8),), True)])
def test_what_no_published_training_tells_gets_the_widest_margin_and_says_so(modules, real_step):
    found = margin(*modules, real_step=real_step)

    assert found.share > max(one.share for one in MARGINS.values())
    assert "assumed" in found.basis
