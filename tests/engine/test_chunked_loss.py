"""ChunkedLoss is nn.CrossEntropyLoss of a head's logits, which are never whole."""

import copy
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum import ChunkedLoss
from autoaccum._engine import chunked_loss
from autoaccum._memory import Simulated
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError, SavingRefusedError

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
    """A language model that returns hidden states."""

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


@pytest.mark.parametrize("way", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", ["mean", "smoothed", "weighted"])
def test_in_other_types_it_is_as_exact_as_with_whole_logits(name, way):
    model = Language().to(torch.bfloat16 if way == "bf16" else torch.float32)
    exact, options = copy.deepcopy(model).double(), OPTIONS[name]
    in_full = {key: one.double() if key == "weight" else one for key, one in options.items()}
    expected = gradients(of_whole(exact, in_full, LABELS), exact)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        loss = ChunkedLoss(model.head, **options)(model(TOKENS), LABELS)
        found = gradients(loss, model)

    assert loss.dtype is torch.float32
    for one, other in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
        assert (one.double() - other).norm() <= (1e-6 if way == "fp32" else 2e-2) * other.norm()


def test_without_gradients_it_is_the_same_number():
    model = Language()
    with torch.no_grad():
        found = ChunkedLoss(model.head)(model(TOKENS), LABELS)

    torch.testing.assert_close(found, of_whole(model, {}, LABELS).detach())
    assert torch.isnan(ChunkedLoss(model.head)(model(TOKENS), torch.full((N, T), -100)))  # as nn.CrossEntropyLoss


def test_head_that_drops_is_computed_again_with_the_same_masks():
    model = Language(nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, V))).double()
    loss = ChunkedLoss(model.head)
    torch.manual_seed(1)
    (found,) = torch.autograd.grad(loss(model(TOKENS), LABELS), model.head[0].weight)
    small = []
    for sign in (1, -1):
        with torch.no_grad():
            model.head[0].weight[3, 4] += sign * 1e-6
            torch.manual_seed(1)
            small.append(float(loss(model(TOKENS), LABELS)))
            model.head[0].weight[3, 4] -= sign * 1e-6

    assert float(found[3, 4]) == pytest.approx((small[0] - small[1]) / 2e-6, rel=1e-4)


def test_weights_that_are_put_in_for_the_forward_pass_alone_are_refused():
    model = Language()
    loss = ChunkedLoss(model.head)
    others = {name: one.detach().clone().requires_grad_() for name, one in loss.named_parameters()}

    found = torch.func.functional_call(loss, others, (model(TOKENS), LABELS))

    with pytest.raises(SavingRefusedError, match="other parameters where its logits are computed"):
        found.backward()


# --- in windows -------------------------------------------------------------------------------------------------------


def trained(make, sizes, *, windows=4, double=True, **options):
    model = Language()
    model = model.double() if double else model
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        autoaccum.Plan(N, sizes),
        loss=make(model),
        notices=Notices(silent=True),
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
    vocabulary, peaks = 20_000, []
    for is_chunked in (False, True):
        model = Language(nn.Linear(D, vocabulary, bias=False))
        tokens, labels = torch.randint(V, (8, 512)), torch.randint(vocabulary, (8, 512))
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

    of_all = 8 * 512 * vocabulary * 4
    assert peaks[0] > 2 * of_all
    assert peaks[1] < of_all / 4


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (LABELS[:, 1:], r"integers of shape \(4, 10\)"),
        (LABELS.flatten(), r"shape \(40,\)"),
        (torch.ones(N, T), r"torch\.float32"),
        (torch.ones(N, T, V), r"torch\.float32 of shape \(4, 10, 50\)"),
    ],
)
def test_labels_that_are_no_classes_of_the_tokens_are_refused(labels, said):
    model = Language()

    with pytest.raises(InvalidInputError, match=said):
        ChunkedLoss(model.head)(model(TOKENS), labels)


# --- Liger's kernel ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smoothed", "weighted", "each"])
def test_what_the_kernel_does_not_compute_is_computed_in_chunks(name, monkeypatch):
    model, options = Language(), OPTIONS[name]
    monkeypatch.setattr(chunked_loss, "has_kernel", pytest.fail)

    found = gradients(ChunkedLoss(model.head, **options)(model(TOKENS), LABELS), model)

    torch.testing.assert_close(found, gradients(of_whole(model, options, LABELS), model), rtol=1e-5, atol=1e-6)


def test_kernel_is_taken_on_cuda_for_a_linear_layer_and_types_that_it_is_exact_in(monkeypatch):
    class Scaled(nn.Linear):
        """A layer that does more than nn.Linear."""

    def is_taken(head, kind="cuda", dtype=torch.float32, size=10**6):
        hidden = SimpleNamespace(device=torch.device(kind), dtype=dtype, numel=lambda: size)
        return chunked_loss.has_kernel(head, hidden)

    head = nn.Linear(D, V)
    monkeypatch.setattr(chunked_loss, "_of_liger", lambda: print)

    assert is_taken(head)
    assert is_taken(head, dtype=torch.bfloat16)
    assert not is_taken(head, dtype=torch.float16)
    assert not is_taken(head, kind="cpu")
    assert not is_taken(head, size=100)
    assert not is_taken(Scaled(D, V))
    monkeypatch.setattr(chunked_loss, "_of_liger", lambda: None)
    assert not is_taken(head)


OF_LIGER = """
    import torch
    from torch.nn import functional
    from autoaccum._engine import chunked_loss

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
