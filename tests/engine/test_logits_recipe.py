"""Logits that are computed later are those that would have been computed at once, or they are refused."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional

from autoaccum._engine.chunked_logits import Logits
from autoaccum._engine.chunked_recipe import chunked
from autoaccum.errors import SavingRefusedError

V, D, T, N = 64, 16, 11, 3
TOKENS = torch.randint(V, (N, T), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.roll(-1, 1)


class Model(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(V, D), head or nn.Linear(D, V)
        self.double()

    def forward(self, input_ids):
        return self.head(self.tokens(input_ids).tanh())


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("autoaccum._engine.chunked_recipe.CHUNK", 7)


@contextlib.contextmanager
def in_chunks(model):
    """Yields what was said."""
    said = []
    with chunked([model], "head", said.append):
        yield said


def each(logits):
    return functional.cross_entropy(logits.transpose(1, 2), LABELS, reduction="none")


def assert_as_whole(model, loss):
    """Check that a loss and its gradients are the same in chunks as of all logits at once."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = loss(model)
    of_whole = torch.autograd.grad(expected, trained)
    with in_chunks(model):
        found = loss(model)
        of_chunks = torch.autograd.grad(found, trained)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(of_chunks, of_whole, rtol=1e-12, atol=1e-14)


def weighted_by_no_grad(model):
    with torch.no_grad():
        other = model(TOKENS.roll(1, 0))
    return (each(model(TOKENS)) * each(other)).mean()


def weighted_by_inference(model):
    with torch.inference_mode():
        other = model(TOKENS.roll(1, 0))
    return (each(model(TOKENS)) * each(other)).mean()


def weighted_by_confidence(model):
    logits = model(TOKENS)
    with torch.no_grad():
        probabilities = logits.softmax(-1)
    return (each(logits) * probabilities.gather(-1, LABELS[..., None])[..., 0]).mean()


def distilled(model):
    with torch.no_grad():
        teacher = model(TOKENS.roll(1, 0)) / 2
    return -(teacher.softmax(-1) * model(TOKENS).log_softmax(-1)).sum(-1).mean()


def cut_off_by_view(model):
    logits = model(TOKENS)
    with torch.no_grad():
        flat = logits.view(-1, V)
    return (each(logits) * functional.cross_entropy(flat, LABELS.view(-1), reduction="none").view(N, T)).mean()


@pytest.mark.parametrize(
    "loss", [weighted_by_no_grad, weighted_by_inference, weighted_by_confidence, distilled, cut_off_by_view]
)
def test_what_is_made_without_gradient_has_none_later(loss):
    assert_as_whole(Model(), loss)


def test_learned_temperature_has_its_gradient_where_all_else_is_frozen():
    model = Model().requires_grad_(requires_grad=False)
    model.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    assert_as_whole(model, lambda model: each(model(TOKENS) / model.temperature).mean())


def test_hidden_states_that_are_changed_after_the_head_are_refused():
    model = Model()
    model.head.requires_grad_(requires_grad=False)  # with its gradients, autograd would refuse it itself
    with in_chunks(model):
        hidden = model.tokens(TOKENS).tanh()
        logits = model.head(hidden)
        hidden.add_(1.0)

        with pytest.raises(SavingRefusedError, match="inputs of the layer that makes its logits in place"):
            each(logits)


def test_hidden_states_that_are_changed_before_the_backward_pass_are_refused():
    model = Model()
    with in_chunks(model):
        hidden = model.tokens(TOKENS).tanh()
        loss = each(model.head(hidden)).sum()
        hidden.detach().add_(1.0)

        with pytest.raises(RuntimeError, match=r"modified.* inplace|modified by an inplace"):
            loss.backward()


@pytest.mark.parametrize(
    "view",
    [
        lambda logits: logits[:, :-1],
        lambda logits: logits.view(-1, V),
        lambda logits: logits.flatten(0, 1),
        lambda logits: logits.transpose(1, 2),
        lambda logits: next(iter(logits)),
    ],
)
@pytest.mark.parametrize("changes_view", [True, False])
def test_views_of_what_is_changed_in_place_are_refused(view, changes_view):
    with in_chunks(model := Model()):
        logits = model(TOKENS)
        part = view(logits)
        (part if changes_view else logits).div_(2.0)

        with pytest.raises(SavingRefusedError, match="another view"):
            (logits if changes_view else part).argmax(-1)
        assert (part if changes_view else logits).sum().isfinite()


def test_what_is_made_before_or_after_a_change_in_place_is_as_without():
    def loss(model):
        logits = model(TOKENS)
        halved = logits / 2
        logits.div_(3.0)
        return each(logits[:, :]).mean() + each(halved).mean()

    assert_as_whole(Model(), loss)


def test_change_in_place_without_gradient_is_refused():
    with in_chunks(model := Model()):
        logits = model(TOKENS)

        with torch.no_grad(), pytest.raises(SavingRefusedError, match="changes logits in place"):
            logits.div_(2.0)


class Drops(nn.Module):
    """A head whose dropout is no module."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(V, D))

    def forward(self, hidden):
        return functional.linear(functional.dropout(hidden, 0.5, self.training), self.weight)


def test_functional_dropout_of_the_head_is_drawn_once():
    model = Model(Drops())

    def loss():
        torch.manual_seed(1)
        return each(model(TOKENS)).mean()

    with in_chunks(model):
        (found,) = torch.autograd.grad(loss(), model.head.weight)
        values = []
        for change in (1e-6, -2e-6):
            with torch.no_grad():
                model.head.weight[3, 4] += change
                values.append(float(loss()))

    assert float(found[3, 4]) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4)


def log_probabilities(logits):
    return logits.gather(-1, LABELS[..., None])[..., 0] - logits.logsumexp(-1)


def test_logits_that_are_drawn_are_read_once():
    with in_chunks(model := Model(Drops())):
        with pytest.raises(SavingRefusedError, match="draws random numbers"):
            log_probabilities(model(TOKENS))
        logits = model(TOKENS)
        torch.stack([row.logsumexp(-1) for row in logits])  # each is read once
        with pytest.raises(SavingRefusedError, match="draws random numbers"):
            logits[LABELS > 3].logsumexp(-1)

        model.eval()
        assert (log_probabilities(model(TOKENS)) < 0).all()


@pytest.mark.parametrize("function", [torch.log_softmax, torch.softmax])
def test_type_may_be_the_third_argument(function):
    model = Model().bfloat16()
    expected = function(model(TOKENS), -1, torch.float32)

    with in_chunks(model):
        found = function(model(TOKENS), -1, torch.float32)

        assert (type(found), found.dtype) == (Logits, torch.float32)
        torch.testing.assert_close(found + 0, expected)


CALLS = {
    "transpose": lambda logits: logits.transpose(dim0=1, dim1=2),
    "transpose, in part": lambda logits: logits.transpose(1, dim1=2),
    "swapaxes": lambda logits: logits.swapaxes(axis0=1, axis1=2),
    "movedim": lambda logits: torch.movedim(logits, source=-1, destination=1),
    "permute": lambda logits: logits.permute(dims=(0, 2, 1)),
    "view": lambda logits: logits.view(size=(-1, V)),
    "reshape": lambda logits: torch.reshape(logits, shape=(-1, V)),
    "flatten": lambda logits: logits.flatten(start_dim=0, end_dim=1),
    "mul": lambda logits: logits.mul(other=2.0),
    "div": lambda logits: torch.div(logits, 2.0, rounding_mode="floor"),
    "gather": lambda logits: logits.gather(dim=-1, index=LABELS[..., None]),
    "gather, sparse": lambda logits: logits.gather(-1, LABELS[..., None], sparse_grad=True),
    "softmax": lambda logits: torch.softmax(input=logits, dim=-1),
    "logsumexp": lambda logits: logits.logsumexp(dim=-1, keepdim=True),
    "argmax": lambda logits: logits.argmax(dim=-1, keepdim=True),
    "to": lambda logits: logits.to(device="cpu", dtype=torch.float32),
    "float": lambda logits: logits.float(memory_format=torch.contiguous_format),
    "type": lambda logits: logits.type(dtype=torch.float32),
    "contiguous": lambda logits: logits.contiguous(memory_format=torch.contiguous_format),
    "tanh": lambda logits: torch.tanh(logits, out=torch.empty(N, T, V, dtype=torch.float64)),
    "cross entropy": lambda logits: functional.cross_entropy(input=logits.mT, target=LABELS, reduction="sum"),
}


# Without gradients, which out= does not know.
@pytest.mark.parametrize("call", CALLS)
def test_arguments_by_name_are_as_those_in_place(call):
    model = Model().requires_grad_(requires_grad=False)
    expected = CALLS[call](model(TOKENS))

    with in_chunks(model):
        found = CALLS[call](model(TOKENS))

        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(found + 0, expected + 0)


@pytest.mark.parametrize("reads", [each, lambda logits: functional.nll_loss(logits.log_softmax(-1).mT, LABELS)])
def test_head_computes_in_the_autocast_it_was_called_in(reads):
    model = Model().float()

    def loss():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(TOKENS)
        return logits.dtype, reads(logits.float()).mean()

    dtype, expected = loss()
    whole = torch.autograd.grad(expected, model.head.weight)
    with in_chunks(model):
        kind, found = loss()
        parts = torch.autograd.grad(found, model.head.weight)

    assert kind is dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts, whole, rtol=2e-2, atol=1e-3)


def test_softmax_in_autocast_is_in_float32():
    model = Model().float()
    with in_chunks(model), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(TOKENS).softmax(-1).dtype is torch.float32


def by_function(model):
    """Weighted by a teacher whose weights are put in for one call."""
    weights = {name: 3 * parameter.detach() for name, parameter in model.named_parameters()}
    teacher = torch.func.functional_call(model, weights, (TOKENS,))
    return (each(teacher).detach() * each(model(TOKENS))).mean()


def test_weights_that_are_put_in_for_one_call_are_those_that_make_its_logits():
    assert_as_whole(Model(), by_function)


def test_weights_of_several_layers_that_are_put_in_for_one_call_are_refused():
    with (
        in_chunks(model := Model(nn.Sequential(nn.Linear(D, V)))),
        pytest.raises(SavingRefusedError, match="other weights or buffers"),
    ):
        by_function(model)


class Counting(nn.Module):
    """A head that changes a buffer."""

    def __init__(self):
        super().__init__()
        self.product = nn.Linear(D, V)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, hidden):
        return self.product(hidden) / self.calls.add_(1.0)


def test_head_that_changes_its_buffers_is_refused():
    with (
        in_chunks(model := Model(Counting())),
        pytest.raises(SavingRefusedError, match="it changes its buffers"),
    ):
        each(model(TOKENS))


def test_weight_that_is_computed_is_computed_once_a_call():
    def loss(model):
        torch.manual_seed(0)
        model.load_state_dict(start)
        return each(model(TOKENS)).mean()

    model = Model(nn.utils.parametrizations.spectral_norm(nn.Linear(D, V)))
    start = {name: value.clone() for name, value in model.state_dict().items()}

    assert_as_whole(model, loss)


def test_weights_that_are_changed_before_the_backward_pass_are_refused():
    with in_chunks(model := Model()):
        loss = each(model(TOKENS)).mean()
        with torch.no_grad():
            model.head.weight.mul_(2.0)

        with pytest.raises(SavingRefusedError, match="other weights or buffers"):
            loss.backward()


class Custom(torch.autograd.Function):
    """Is not told of what stands for logits."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return gradient * 2 * logits / logits.numel()


@pytest.mark.parametrize(
    "term", [Custom.apply, lambda logits: torch.vmap(torch.logsumexp, (0, None))(logits, -1).mean()]
)
def test_gradient_that_would_be_lost_is_refused(term):
    with in_chunks(model := Model()):
        logits = model(TOKENS)
        loss = each(logits).mean() + term(logits)

        with pytest.raises(SavingRefusedError, match="by a way that does not ask them"):
            loss.backward()


def test_logits_that_are_computed_first_go_anywhere():
    assert_as_whole(Model(), lambda model: Custom.apply(model(TOKENS) + 0))


def by_changed_temperature(model):
    temperature = torch.ones(())
    logits = model(TOKENS) / temperature
    temperature.mul_(2.0)
    return each(logits).mean()


def by_changed_targets(model):
    labels = LABELS.clone()
    loss = functional.cross_entropy(model(TOKENS).mT, labels)
    labels.zero_()
    return loss


def by_changed_index(model):
    labels = LABELS.clone()
    loss = model(TOKENS).gather(-1, labels[..., None]).mean()
    labels.zero_()
    return loss


def by_changed_weights(model):
    weights = torch.ones(V, dtype=torch.float64)
    loss = functional.cross_entropy(model(TOKENS).mT, LABELS, weight=weights)
    weights.zero_()
    return loss


@pytest.mark.parametrize("loss", [by_changed_temperature, by_changed_targets, by_changed_index, by_changed_weights])
def test_what_is_changed_before_logits_are_computed_again_is_refused(loss):
    with in_chunks(model := Model()), pytest.raises((SavingRefusedError, RuntimeError), match=r"in place|inplace"):
        loss(model).backward()
