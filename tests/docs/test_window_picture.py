"""The picture of a window shows what `fit` does."""

import importlib
import sys

import pytest
import torch

import autoaccum
from folders import ROOT

SCRIPTS = ROOT / "scripts" / "docs_pictures"


@pytest.fixture
def picture(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("svg", "window"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module("window")
    yield found
    for name in ("svg", "window"):
        sys.modules.pop(name, None)


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


def test_sizes_in_the_picture_are_those_of_a_window_that_fails_in_its_third_backward_pass(picture):
    FailsOnce.passes.clear()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    size, failed = picture.SAMPLES, picture.FAILED

    def forward(model, batch):
        return FailsOnce.apply(model(batch[0]), failed)

    result = autoaccum.fit(
        model,
        [(torch.randn(size, 4), torch.randn(size, 1))],
        target_batch=size,
        loss=torch.nn.MSELoss(),  # which is not tried on a few samples
        forward=forward,
        micro_batch=max(picture.CUT),
        device="cpu",
        progress=False,
    )

    assert FailsOnce.passes == [*picture.CUT[: failed + 1], *picture.CUT_AGAIN]
    assert result.plans[0][1].micro_batches == picture.CUT
    assert result.history[0].micro_batches == picture.CUT_AGAIN
