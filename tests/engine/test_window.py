"""What a window says of an error that only micro-batches of a size raise."""

import pytest
import torch
from torch import nn

import autoaccum


class Squeezed(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs).squeeze()


class Paired(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs).view(-1, 2).flatten()


def train(model, targets, micro_batch, loss):
    batch = torch.randn(12, 6), targets
    return autoaccum.fit(model, [batch], 12, loss=loss, micro_batch=micro_batch, progress=False)


@pytest.mark.parametrize(
    ("model", "targets", "size", "said"),
    [
        (
            Squeezed(6, 4),
            torch.arange(12) % 4,
            1,
            r"2 samples, and not for a micro-batch of 1 \(size mismatch",
        ),
        (Paired(6, 1), torch.randn(12), 3, r"work for 6 samples, and not for a micro-batch of 3 \(shape '\[-1, 2\]'"),
    ],
    ids=["squeeze", "view of pairs"],
)
def test_error_of_a_size_is_told_with_the_remedy_and_its_cause(model, targets, size, said):
    loss = nn.CrossEntropyLoss() if targets.dtype is torch.int64 else nn.MSELoss()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    with pytest.raises(autoaccum.InvalidInputError, match=said) as caught:
        train(model, targets, size, loss)

    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "micro_batch=" in str(caught.value)
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_single_output_that_was_squeezed_is_not_taken_for_the_loss_of_the_model():
    with pytest.raises(autoaccum.InvalidInputError, match=r"a single number for a micro-batch of 1.*squeeze\(-1\)"):
        train(Squeezed(6, 1), torch.randn(12), 1, None)
