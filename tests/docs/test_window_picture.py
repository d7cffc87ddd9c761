"""The picture of a window shows what `fit` does."""

import re

import torch

from support.models.small import fit_quietly
from support.processes.folders import ROOT

PICTURE = (ROOT / "docs" / "window.svg").read_text()
SAMPLES, CUT, CUT_AGAIN = 100, (34, 33, 33), (20, 20, 20, 20, 20)
FAILED = 2  # the third


class FailsOnce(torch.autograd.Function):
    """Counts backward passes; one of a micro-batch that is too large for the numbered pass runs out of memory."""

    passes: list[int] = []  # noqa: RUF012 - emptied by the test

    @staticmethod
    def forward(ctx, outputs, fails_at):
        ctx.fails_at, ctx.size = fails_at, len(outputs)
        return outputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        FailsOnce.passes.append(ctx.size)
        if len(FailsOnce.passes) == ctx.fails_at + 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return gradient, None


def test_sizes_in_the_picture_are_those_of_a_window_that_fails_in_its_third_backward_pass():
    FailsOnce.passes.clear()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)

    def forward(model, batch):
        return FailsOnce.apply(model(batch[0]), FAILED)

    result = fit_quietly(
        model,
        [(torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 1))],
        SAMPLES,
        loss=torch.nn.MSELoss(),
        loss_reduction="mean",  # without a check before
        forward=forward,
        micro_batch=max(CUT),
    )

    shown = [int(samples) for samples in re.findall(rf">(\d+) of {SAMPLES}<", PICTURE)]
    assert shown == [*CUT[:FAILED], *CUT_AGAIN]
    assert FailsOnce.passes == [*CUT[: FAILED + 1], *CUT_AGAIN]
    assert result.plans[0][1].micro_batches == CUT
    assert result.history[0].micro_batches == CUT_AGAIN
