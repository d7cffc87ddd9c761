from torch import nn

from autoaccum._estimate.uncertainty import MARGINS, margin_for


def margin(*modules, precision="bf16"):
    return margin_for(nn.Sequential(*modules).modules(), precision)


def test_a_single_convolution_makes_patches():
    convolution = nn.Conv2d(3, 8, 3)

    assert margin(convolution, nn.Linear(8, 8)) == MARGINS["others", "half"]
    assert margin(convolution, nn.Conv2d(8, 8, 3)) == MARGINS["convolutions", "half"]
    assert margin(nn.Linear(8, 8), precision="fp32") == MARGINS["others", "fp32"]
