"""Where a library has a kernel for the cross entropy of a linear layer, it computes what chunks compute."""

import functools
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional

from autoaccum._engine import fused_loss
from autoaccum._engine.chunked_logits import logits_of
from autoaccum._engine.replaced_forward import forward_replaced

V, D, N = 50, 16, 40
GIVEN = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(N, D, generator=GIVEN)
CLASSES = torch.randint(V, (N,), generator=GIVEN).masked_fill(torch.arange(N) % 7 == 0, -100)
with_torchs = pytest.mark.skipif(
    not hasattr(functional, "linear_cross_entropy"), reason="this PyTorch has no linear_cross_entropy"
)


def gradients(head, loss, hidden=HIDDEN):
    """Return the loss, and the gradients of the hidden states and of the head."""
    hidden = hidden.to(head.weight.dtype).requires_grad_()
    found = loss(head(hidden))
    return found, torch.autograd.grad(found, [hidden, *head.parameters()])


def in_chunks(head):
    return forward_replaced(head, functools.partial(logits_of, pytest.fail, 8, head))


def of_head(bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(D, V, bias=bias).to(dtype)


@pytest.fixture
def calls(monkeypatch):
    """Let PyTorch's kernel compute what it is made for, here as well; lists the types in which it was asked to."""
    asked = []

    def kernel_for(device, dtype):
        asked.append((device, dtype))
        return fused_loss.by_torch

    monkeypatch.setattr(fused_loss, "kernel_for", kernel_for)
    monkeypatch.setattr("autoaccum._engine.chunked_logits._LEAST", 8)
    return asked


PLAIN = {
    "mean": lambda logits: functional.cross_entropy(logits, CLASSES),
    "sum": lambda logits: functional.cross_entropy(logits, CLASSES, reduction="sum") / 7,
    "rows": lambda logits: functional.cross_entropy(logits.view(4, 10, V).mT, CLASSES.view(4, 10)),
    "cast": lambda logits: functional.cross_entropy(logits.double(), CLASSES),
    "class to ignore": lambda logits: functional.cross_entropy(logits, CLASSES.clamp(min=0), ignore_index=3),
}


@with_torchs
@pytest.mark.parametrize("loss", PLAIN)
@pytest.mark.parametrize("bias", [True, False])
def test_kernel_of_pytorch_computes_loss_and_gradients_of_all_logits(loss, bias, calls):
    head = of_head(bias)
    expected = gradients(head, PLAIN[loss])

    with in_chunks(head):
        found = gradients(head, PLAIN[loss])

    assert calls == [("cpu", torch.float32)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, check_dtype=False)


OTHERS = {
    "label smoothing": lambda logits: functional.cross_entropy(logits, CLASSES, label_smoothing=0.1),
    "class weights": lambda logits: functional.cross_entropy(logits, CLASSES, weight=torch.linspace(0.5, 1.5, V)),
    "each": lambda logits: functional.cross_entropy(logits, CLASSES, reduction="none").square().mean(),
    "soft cap": lambda logits: functional.cross_entropy(3 * torch.tanh(logits / 3), CLASSES),
    "narrow": lambda logits: functional.cross_entropy(logits.bfloat16(), CLASSES),
    "nll": lambda logits: functional.nll_loss(logits.log_softmax(-1), CLASSES),
}


@pytest.mark.parametrize("loss", OTHERS)
def test_other_losses_are_computed_in_chunks(loss, calls):
    head = of_head()
    expected = gradients(head, OTHERS[loss])

    with in_chunks(head):
        found = gradients(head, OTHERS[loss])

    assert not calls
    torch.testing.assert_close(found, expected, rtol=1e-2 if loss == "narrow" else 1e-5, atol=1e-3)


class Scaled(nn.Linear):
    """A layer that does more than nn.Linear."""

    def forward(self, inputs):
        return 2 * super().forward(inputs)


def test_layer_that_does_more_and_passes_without_gradient_are_computed_in_chunks(calls):
    torch.manual_seed(0)
    scaled, head = Scaled(D, V), of_head()
    expected, of_head_alone = gradients(scaled, PLAIN["mean"]), gradients(head, PLAIN["mean"])[0]

    with in_chunks(scaled), in_chunks(head):
        found = gradients(scaled, PLAIN["mean"])
        with torch.no_grad():
            without = PLAIN["mean"](head(HIDDEN))

    assert not calls
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(without, of_head_alone)


@with_torchs
def test_under_autocast_the_kernel_computes_in_its_type(calls):
    head = of_head()
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(head, PLAIN["mean"])
        with in_chunks(head):
            found = gradients(head, PLAIN["mean"])

    assert calls == [("cpu", torch.bfloat16)]
    assert found[0].dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("has_liger", [True, False])
def test_kernels_are_chosen_by_device_and_type(has_liger, monkeypatch):
    monkeypatch.setattr(fused_loss, "_of_liger", lambda: print if has_liger else None)
    of_torch = fused_loss.by_torch if hasattr(functional, "linear_cross_entropy") else None

    assert fused_loss.kernel_for("cuda", torch.float32) is (fused_loss.by_liger if has_liger else of_torch)
    assert fused_loss.kernel_for("cuda", torch.bfloat16) is (fused_loss.by_liger if has_liger else None)
    assert fused_loss.kernel_for("xpu", torch.float32) is of_torch
    assert fused_loss.kernel_for("cuda", torch.float16) is None
    assert fused_loss.kernel_for("cpu", torch.float32) is None


OF_LIGER = """
    import torch
    from torch.nn import functional
    from autoaccum._engine import fused_loss

    torch.manual_seed(0)
    for dtype, allowed in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        inputs = [torch.randn(size).to(dtype).requires_grad_() for size in ((40, 16), (50, 16), (50,))]
        classes = torch.randint(50, (40,)).masked_fill(torch.arange(40) % 7 == 0, -100)
        found = fused_loss.by_liger(*inputs, classes, -100)
        assert found.dtype is torch.float32
        got = torch.autograd.grad(found / 7, inputs)
        exact = [one.detach().double().requires_grad_() for one in inputs]
        expected = functional.cross_entropy(functional.linear(*exact), classes, reduction="sum")
        wanted = torch.autograd.grad(expected / 7, exact)
        assert abs(found.item() / expected.item() - 1) < allowed
        for one, other in zip(got, wanted):
            assert (one - other).norm() < allowed * other.norm()
    print("agrees")
"""


@pytest.mark.slow
def test_kernel_of_liger_agrees_in_tritons_interpreter():
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OF_LIGER)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.stdout == "agrees\n", done.stderr
