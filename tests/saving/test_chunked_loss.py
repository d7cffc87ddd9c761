"""ChunkedLoss is nn.CrossEntropyLoss of a head's logits, which are never whole."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum import ChunkedLoss, Simulated
from autoaccum._saving import chunked_loss
from support.models.small import a_few_of

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


# --- log-probabilities ------------------------------------------------------------------------------------------------

EXACT = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float64: {"rtol": 1e-10, "atol": 1e-12}}
IDS = LABELS.clamp(min=0)


def of_all(head, hidden, ids):
    return head(hidden).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("head", [nn.Linear(D, V), nn.Linear(D, V, bias=False), nn.Sequential(nn.Linear(D, V))])
def test_log_probabilities_and_their_gradients_are_those_of_whole_logits(head, dtype):
    head, hidden = copy.deepcopy(head).to(dtype), torch.randn(N, T, D, dtype=dtype, generator=GIVEN).requires_grad_()
    by, inputs = torch.linspace(-1, 2, N * T, dtype=dtype).view(N, T), [hidden, *head.parameters()]

    found = ChunkedLoss(head, weight=WEIGHT, reduction="sum", label_smoothing=0.1).log_probs(hidden, IDS)
    expected = of_all(head, hidden, IDS)

    assert (found.shape, found.dtype) == ((N, T), dtype)
    torch.testing.assert_close(found, expected, **EXACT[dtype])
    of_found, of_expected = (torch.autograd.grad((one.exp() * by).sum(), inputs) for one in (found, expected))
    torch.testing.assert_close(of_found, of_expected, **EXACT[dtype])


def test_log_probabilities_of_ignored_tokens_are_0_and_have_no_gradient():
    head, hidden = nn.Linear(D, V), torch.randn(N, T, D, generator=GIVEN).requires_grad_()

    found = ChunkedLoss(head).log_probs(hidden, LABELS.int())
    found.sum().backward()

    torch.testing.assert_close(found, of_all(head, hidden, IDS).where(LABELS != -100, 0.0), **EXACT[torch.float32])
    assert torch.equal(hidden.grad.abs().sum(-1) > 0, LABELS != -100)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 0), (2, 3, 4)])
def test_log_probabilities_have_the_shape_of_the_ids(shape):
    head, hidden, ids = nn.Linear(D, V), torch.randn(*shape, D, generator=GIVEN), torch.full(shape, 3)

    torch.testing.assert_close(ChunkedLoss(head).log_probs(hidden, ids), of_all(head, hidden, ids))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_reference_model_has_log_probabilities_without_gradients(around):
    head = nn.Linear(D, V)
    with around():
        hidden = torch.randn(N, T, D)
        found, expected = ChunkedLoss(head).log_probs(hidden, IDS), of_all(head, hidden, IDS)

    assert not found.requires_grad
    torch.testing.assert_close(found, expected)


def test_log_probabilities_are_in_float32_under_autocast_and_of_half_precision():
    head, hidden = nn.Linear(D, V), torch.randn(N, T, D, generator=GIVEN)
    half = copy.deepcopy(head).bfloat16()

    with torch.autocast("cpu"):
        cast = ChunkedLoss(head).log_probs(hidden, IDS)
    found = [cast, ChunkedLoss(half).log_probs(hidden.bfloat16(), IDS)]

    for one in found:
        assert one.dtype is torch.float32
        torch.testing.assert_close(one, of_all(head, hidden, IDS), rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of Dynamo, which asks every tensor
def test_log_probabilities_in_a_compiled_function_are_those_of_whole_logits():
    loss, hidden = ChunkedLoss(nn.Linear(D, V)), torch.randn(N, T, D, generator=GIVEN).requires_grad_()
    compiled = torch.compile(lambda hidden, ids: loss.log_probs(hidden, ids).sum(), backend="aot_eager")

    found, expected = compiled(hidden, IDS), of_all(loss.head, hidden, IDS).sum()

    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(one, [hidden, loss.head.weight]) for one in (found, expected)]
    torch.testing.assert_close(*grads)


HIDDEN = torch.zeros(N, T, D)
FORMS = "log_probs takes the head's inputs, shape .* integers of shape .* and got "
WRONG = {
    "no tensor": ([[0.0]], IDS, FORMS + r"\[\[0.0\]\] and \(torch"),
    "no dimension": (HIDDEN[0, 0, 0], IDS, FORMS),
    "whole numbers": (HIDDEN.long(), IDS, r"in torch\.int64 for a head of 16 features in torch\.float32"),
    "width": (HIDDEN[..., :5], IDS, r"hidden states of shape \(4, 10, 5\) in torch\.float32 for a head of 16 features"),
    "type": (HIDDEN.double(), IDS, r"in torch\.float64 for a head of 16 features in torch\.float32; pass"),
    "half": (HIDDEN.bfloat16(), IDS, r"in torch\.bfloat16 for a head of 16 features in torch\.float32; pass"),
    "shape": (HIDDEN, IDS[:, 1:], FORMS + r".*\(torch\.int64, \(4, 9\)\)"),
    "several": (HIDDEN, IDS.unsqueeze(-1), FORMS),
    "float": (HIDDEN, IDS.float(), FORMS),
    "bool": (HIDDEN, IDS > 3, FORMS),
    "list": (HIDDEN, IDS.tolist(), FORMS),
    "high": (HIDDEN, IDS.masked_fill(IDS == 3, V), "ids from 0 to 50 for logits of 50 classes; pass ids from 0 to 49"),
    "negative": (HIDDEN, IDS.masked_fill(IDS == 3, -1), "ids from -1 to"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_log_probabilities_of_wrong_input_are_refused(wrong):
    hidden, ids, said = WRONG[wrong]
    with pytest.raises(autoaccum.InvalidInputError, match=said):
        ChunkedLoss(nn.Linear(D, V)).log_probs(hidden, ids)


# --- in windows -------------------------------------------------------------------------------------------------------


def trained(make, sizes, *, windows=4, **options):
    model = Language().double()
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        autoaccum.Plan(N, sizes),
        loss=make(model),
        **{"device": "cpu", "precision": "fp32"} | options,
    )
    reports = [runner.step((TOKENS, LABELS)) for _ in range(windows)]
    return [float(report.loss) for report in reports], list(model.parameters())


def in_model(options):
    """A loss that the model computes itself, as people write it."""

    def make(model):
        loss = ChunkedLoss(model.head, **options)
        return lambda hidden, labels: {"lm": loss(hidden, labels)}

    return make


@pytest.mark.parametrize(
    ("name", "form"),
    a_few_of(["mean", "sum", "smoothed", "weighted", "weighted and smoothed"], ["module", "function"]),
)
def test_window_of_micro_batches_of_unlike_counts_has_the_gradient_of_all(name, form):
    options = OPTIONS.get(name, {})
    options = {key: one.double() if key == "weight" else one for key, one in options.items()}
    make = in_model(options) if form == "function" else lambda model: ChunkedLoss(model.head, **options)

    found = trained(make, (1, 1, 2))
    expected = trained(
        lambda model: (
            lambda hidden, labels: nn.CrossEntropyLoss(**options)(model.head(hidden).flatten(0, 1), labels.flatten())
        ),
        (4,),
    )

    torch.testing.assert_close(found, expected)


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
