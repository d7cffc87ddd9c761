"""The README's picture is what its script draws, and its script draws what `fit` does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autoaccum

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "draw_window.py"


@pytest.fixture
def script():
    names = {"__name__": "draw_window", "__file__": str(SCRIPT)}
    source = SCRIPT.read_text().replace("from __future__ import annotations\n", "")
    exec(compile(source, str(SCRIPT), "exec", dont_inherit=True), names)  # noqa: S102 - our own
    return names


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


def test_committed_picture_is_what_the_script_draws():
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_sizes_in_the_picture_are_those_of_a_window_that_fails_in_its_third_backward_pass(script):
    FailsOnce.passes.clear()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    size, failed, own = script["SAMPLES"], script["FAILED"], model.weight

    def forward(model, batch):  # of a copy gradients are compared
        outputs = model(batch[0])
        return FailsOnce.apply(outputs, failed) if model.weight is own and model.training else outputs

    result = autoaccum.fit(
        model,
        [(torch.randn(size, 4), torch.randn(size, 1))],
        target_batch=size,
        forward=forward,
        micro_batch=max(script["CUT"]),
        strategy="greedy",
        device="cpu",
        progress=False,
    )

    assert FailsOnce.passes == [*script["CUT"][: failed + 1], *script["CUT_AGAIN"]]
    assert result.plans[0][1].micro_batches == script["CUT"]
    assert result.history[0].micro_batches == script["CUT_AGAIN"]
