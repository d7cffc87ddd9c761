"""ChunkedLoss is nn.CrossEntropyLoss of a head's logits, which are never whole."""

import copy
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum import ChunkedLoss
from autoaccum._memory.simulated import Simulated
from autoaccum._saving import chunked_loss

V, D, N, T = 50, 16, 4, 10
GIVEN = torch.Generator().manual_seed(0)
TOKENS = torch.randint(V, (N, T), generator=GIVEN)
LABELS = torch.randint(V, (N, T), generator=GIVEN).masked_fill(
    torch.arange(T) < torch.tensor([[8], [0], [3], [9]]), -100
)
WEIGHT = torch.linspace(0.5, 1.5, V)


@pytest.fixture(autouse=True)
def few_tokens_at_a_time(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 7)


class Language(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(V, D)
        self.head = head or nn.Linear(D, V)

    def forward(self, tokens):
        return self.tokens(tokens).tanh()


OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "each": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": WEIGHT},
    "weighted and smoothed": {"weight": WEIGHT, "label_smoothing": 0.1},
    "weighted sum": {"weight": WEIGHT, "reduction": "sum"},
    "padding of its own": {"ignore_index": 3},
}


def of_whole(model, options, labels):
    loss = nn.CrossEntropyLoss(**options)
    found = loss(model.head(model(TOKENS)).flatten(0, 1), labels.flatten())
    return found.view(N, T) if found.dim() else found


def gradients(loss, model):
    return loss, torch.autograd.grad(loss if loss.dim() == 0 else loss.square().sum(), list(model.parameters()))


@pytest.mark.parametrize(
    "head", [None, nn.Linear(D, V, bias=False), nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, V))]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_those_of_whole_logits(name, head):
    options, model = OPTIONS[name], Language(copy.deepcopy(head)).double()
    options = options | ({"weight": WEIGHT.double()} if "weight" in options else {})
    labels = LABELS.clamp(min=0) if "ignore_index" in options else LABELS

    found = gradients(ChunkedLoss(model.head, **options)(model(TOKENS), labels), model)

    torch.testing.assert_close(found, gradients(of_whole(model, options, labels), model), rtol=1e-12, atol=1e-14)


# --- in windows -------------------------------------------------------------------------------------------------------


def trained(make, sizes, *, windows=4, double=True, **options):
    model = Language()
    model = model.double() if double else model
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        autoaccum.Plan(N, sizes),
        loss=make(model),
        **{"device": "cpu", "precision": "fp32"} | options,
    )
    reports = [runner.step((TOKENS, LABELS)) for _ in range(windows)]
    return [float(report.loss) for report in reports], list(model.parameters())


def by_kernel(monkeypatch):
    def summed(head, hidden, classes, ignore_index):
        return functional.cross_entropy(head(hidden), classes, reduction="sum", ignore_index=ignore_index)

    monkeypatch.setattr(chunked_loss, "has_kernel", lambda *_: True)
    monkeypatch.setattr(chunked_loss, "by_liger", summed)
    monkeypatch.setattr(chunked_loss, "checkpoint", None)  # of chunks


def in_model(options):
    """A loss that the model computes itself, as people write it."""

    def make(model):
        loss = ChunkedLoss(model.head, **options)
        return lambda hidden, labels: {"lm": loss(hidden, labels)}

    return make


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("name", ["mean", "sum", "smoothed", "weighted", "weighted and smoothed", "kernel"])
def test_window_of_micro_batches_of_unlike_counts_has_the_gradient_of_all(name, form, monkeypatch):
    options = OPTIONS.get(name, {})
    if name == "kernel":
        by_kernel(monkeypatch)
    options = {key: one.double() if key == "weight" else one for key, one in options.items()}
    make = in_model(options) if form == "function" else lambda model: ChunkedLoss(model.head, **options)

    found = trained(make, (1, 1, 2), double=name != "kernel")
    expected = trained(
        lambda model: (
            lambda hidden, labels: nn.CrossEntropyLoss(**options)(model.head(hidden).flatten(0, 1), labels.flatten())
        ),
        (4,),
        double=name != "kernel",
    )

    torch.testing.assert_close(found, expected, **({"rtol": 1e-5, "atol": 1e-6} if name == "kernel" else {}))


def test_logits_are_never_whole():
    vocabulary, peaks = 5_000, []
    for is_chunked in (False, True):
        model = Language(nn.Linear(D, vocabulary, bias=False))
        tokens, labels = torch.randint(V, (8, 256)), torch.randint(vocabulary, (8, 256))
        plain = lambda hidden, labels, model=model: functional.cross_entropy(  # noqa: E731
            model.head(hidden).flatten(0, 1), labels.flatten()
        )
        result = autoaccum.fit(
            model,
            [(tokens, labels)] * 2,
            8,
            loss=ChunkedLoss(model.head) if is_chunked else plain,
            micro_batch=8,
            device=Simulated(2**33),
            progress=False,
        )
        peaks.append(result.history[-1].peak_bytes)

    of_all = 8 * 256 * vocabulary * 4
    assert peaks[0] > 2 * of_all
    assert peaks[1] < of_all / 4


# --- Liger's kernel ---------------------------------------------------------------------------------------------------


OF_LIGER = """
    import torch
    from torch.nn import functional
    from autoaccum._saving import chunked_loss

    torch.manual_seed(0)
    for dtype, allowed in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        head = torch.nn.Linear(16, 50, dtype=dtype)
        hidden = torch.randn(40, 16, dtype=dtype, requires_grad=True)
        inputs = [hidden, head.weight, head.bias]
        classes = torch.randint(50, (40,)).masked_fill(torch.arange(40) % 7 == 0, -100)
        found = chunked_loss.by_liger(head, hidden, classes, -100)
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
