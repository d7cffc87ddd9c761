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
            r"size mismatch.*\n.*a micro-batch of 1 of the window's 12 samples.*micro_batch=",
        ),
        (Paired(6, 1), torch.randn(12), 3, r"shape '\[-1, 2\]'.*\n.*a micro-batch of 3 of the"),
    ],
    ids=["squeeze", "view of pairs"],
)
def test_error_of_a_size_tells_the_size_and_the_remedy(model, targets, size, said):
    loss = nn.CrossEntropyLoss() if targets.dtype is torch.int64 else nn.MSELoss()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    with pytest.raises(RuntimeError, match=said):
        train(model, targets, size, loss)

    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_single_output_that_was_squeezed_is_not_taken_for_the_loss_of_the_model():
    with pytest.raises(autoaccum.InvalidInputError, match=r"a single number for a micro-batch of 1.*squeeze\(-1\)"):
        train(Squeezed(6, 1), torch.randn(12), 1, None)
