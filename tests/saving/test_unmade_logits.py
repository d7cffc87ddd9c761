"""save_memory="chunked_loss": what is computed of each token's logits is as of whole logits, with equal gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._saving.chunked_head import chunked
from autoaccum._saving.unmade_logits import UnmadeLogits
from autoaccum.errors import InvalidInputError, SavingRefusedError

V, D, T, N = 37, 16, 11, 3
GIVEN = torch.Generator().manual_seed(0)
TOKENS = torch.randint(V, (N, T), generator=GIVEN)
IDS = torch.randint(V, (N, T), generator=GIVEN)
SEVERAL = torch.randint(V, (N, T, 4), generator=GIVEN)
KEPT = torch.rand(N, T, generator=GIVEN) > 0.3
WEIGHTS = torch.randn(1000, generator=GIVEN, dtype=torch.float64)
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float64: {"rtol": 1e-10, "atol": 1e-12}}


class Model(nn.Module):
    """As those of Transformers: it tells its head."""

    def __init__(self, dtype=torch.float64, classes=V, width=D):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, width), nn.Linear(width, classes)
        self.to(dtype)

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        return self.head(3 * self.embed(tokens).tanh())


@pytest.fixture(autouse=True)
def few_tokens_at_a_time(monkeypatch):
    monkeypatch.setattr("autoaccum._saving.chunked_loss.CHUNK", 7)


def gather(logits, ids=None):
    ids = IDS if ids is None else ids
    return torch.gather(logits, -1, ids.unsqueeze(-1)).squeeze(-1)


def selected(logits, ids=None):
    """As TRL, verl and others compute them in single precision, to spare memory."""
    return gather(logits, ids) - torch.stack([torch.logsumexp(one, dim=-1) for one in logits])


def entropy(logits):
    """As TRL computes it."""
    logps = [functional.log_softmax(chunk, dim=-1) for chunk in logits.reshape(-1, logits.shape[-1]).split(5, dim=0)]
    return torch.cat([-(torch.exp(one) * one).sum(-1) for one in logps]).reshape(logits.shape[:-1])


def entropy_of_probabilities(logits):
    """As verl and OpenRLHF compute it."""
    probabilities = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(probabilities * logits, dim=-1)


def without(function):
    def found(logits):
        with torch.no_grad():
            less = function(logits)
        return less + gather(logits.log_softmax(-1)), less

    return found


def smoothed(logits):
    """As the label smoother of Transformers."""
    negative = -functional.log_softmax(logits, dim=-1)
    return negative.gather(dim=-1, index=IDS.unsqueeze(-1)), negative.sum(dim=-1, keepdim=True, dtype=torch.float32)


def weighted(logits):
    """By weights that change before the backward pass, of which whole logits need a copy."""
    weight = torch.linspace(0.5, 2.0, V, dtype=logits.dtype)
    given = weight if isinstance(logits, UnmadeLogits) else weight.clone()
    loss = functional.cross_entropy(logits.view(-1, V), IDS.view(-1), weight=given)
    weight.zero_()
    return loss


def masked(logits):
    ids = IDS.masked_fill(~KEPT, -100)
    found = gather(logits.log_softmax(-1), ids.clamp(min=0))
    return found[KEPT], found.masked_fill_(~KEPT, 0.0).sum(-1) / KEPT.sum(-1)


USES = {
    "log_softmax": lambda logits: gather(logits.log_softmax(-1)),
    "of functional": lambda logits: gather(functional.log_softmax(logits, dim=-1)),
    "of torch": lambda logits: gather(torch.log_softmax(logits, 2)),
    "named input": lambda logits: torch.gather(input=logits.log_softmax(dim=2), dim=2, index=IDS.unsqueeze(2)),
    "in double": lambda logits: gather(functional.log_softmax(logits, dim=-1, dtype=torch.float64)),
    "method": lambda logits: logits.log_softmax(-1).gather(2, IDS[..., None])[..., 0],
    "several": lambda logits: logits.log_softmax(-1).gather(-1, SEVERAL),
    "expanded": lambda logits: logits.log_softmax(-1).gather(-1, IDS[0, 0].expand(N, T, 2)),
    "none": lambda logits: logits.log_softmax(-1).gather(-1, SEVERAL[..., :0]),
    "selected": selected,
    "logsumexp": lambda logits: logits.logsumexp(-1) - gather(logits),
    "logsumexp of a tuple": lambda logits: logits.logsumexp((2,), keepdim=True) - logits.gather(-1, SEVERAL),
    "logsumexp twice": lambda logits: (gather(logits), *changed_without(logits), logits.logsumexp(-1)),
    "logsumexp after another cast": lambda logits: (gather(logits), logits.double().logsumexp(-1)),
    "temperature": lambda logits: selected(logits / 0.7),
    "number from the left": lambda logits: logits.logsumexp(-1) - (2.0 * logits).logsumexp(-1),
    "soft cap": lambda logits: selected(torch.tanh(logits / 3.0) * 3.0),
    "shift": lambda logits: selected(logits[..., :-1, :], IDS[:, 1:]),
    "kept": lambda logits: selected(logits[:, -4:, :].float(), IDS[:, -4:]),
    "one token": lambda logits: logits[0, 3].log_softmax(-1).gather(-1, SEVERAL[0, 3]),
    "each token": lambda logits: torch.stack([torch.stack([one.logsumexp(-1) for one in row]) for row in logits]),
    "last token": lambda logits: logits[:, -1].log_softmax(-1).gather(-1, SEVERAL[:, 0]),
    "mask": lambda logits: logits[KEPT].log_softmax(-1).gather(-1, IDS[KEPT].unsqueeze(-1)),
    "rows": lambda logits: selected(logits[torch.tensor([2, -1, 0])], IDS[[2, 2, 0]]),
    "list of rows": lambda logits: selected(logits[[1, 0], ...], IDS[[1, 0]]),
    "flat": lambda logits: logits.view(-1, V).log_softmax(1).gather(1, IDS.view(-1, 1)),
    "halves": lambda logits: [selected(one, ids) for one, ids in zip(logits.chunk(2), IDS.chunk(2), strict=True)],
    "masked": masked,
    "entropy": entropy,
    "entropy of probabilities": entropy_of_probabilities,
    "entropy without a gradient": without(entropy),
    "entropy of detached logits": lambda logits: (entropy(logits.detach()), selected(logits)),
    "noted without a gradient": lambda logits: (gather(scaled_without(logits)), selected(logits)),
    "argmax": lambda logits: (selected(logits), logits.argmax(-1), (logits.argmax(dim=-1) == IDS).sum()),
    "mean logit": lambda logits: logits.detach()[KEPT].mean(-1).sum() + gather(logits),
    "smoothed": smoothed,
    "of everything": lambda logits: (logits.sum(), logits[KEPT].mean(), logits.exp().nansum(dtype=torch.float64)),
    "square": lambda logits: (logits.softmax(-1) * logits.softmax(-1)).sum(-1),
    "product of unlike types": lambda logits: (logits.softmax(-1, dtype=torch.float64) * (logits / 2.0)).sum(-1),
    "weights that change later": weighted,
    "beside a cross entropy": lambda logits: (
        selected(logits),
        functional.cross_entropy(input=logits.view(-1, V), target=IDS.view(-1)),
    ),
}


def changed_without(logits):
    with torch.no_grad():
        gather(logits)
        return logits.logsumexp(-1).mul_(2.0), logits.logsumexp(-1)


def scaled_without(logits):
    with torch.no_grad():
        return logits * 2.0


def evaluated(use, dtype, *, in_chunks, autocast=False, network=None):
    """Numbers, and gradients of a sum of all of them by weights."""
    model = network or Model(dtype)
    with chunked([model]) if in_chunks else torch.enable_grad(), torch.autocast("cpu", enabled=autocast):
        logits = model(TOKENS)
        assert isinstance(logits, UnmadeLogits) == in_chunks
        found = use(logits)
        found = list(found) if isinstance(found, list | tuple) else [found]
        assert not any(isinstance(one, UnmadeLogits) for one in found)
        flat = torch.cat([one.double().flatten() for one in found])
        loss = (flat * WEIGHTS[: len(flat)]).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) if loss.requires_grad else None
    return [(one.detach(), one.requires_grad) for one in found], gradients


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", USES)
def test_numbers_and_gradients_are_those_of_whole_logits(name, dtype):
    expected = evaluated(USES[name], dtype, in_chunks=False)
    found = evaluated(USES[name], dtype, in_chunks=True)

    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["log_softmax", "selected", "entropy", "kept", "smoothed", "in double"])
def test_half_precision_has_the_types_and_the_rounding_of_whole_logits(name, autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    expected, _ = evaluated(USES[name], dtype, in_chunks=False, autocast=autocast)
    found, gradients = evaluated(USES[name], dtype, in_chunks=True, autocast=autocast)

    torch.testing.assert_close(found, expected, rtol=1.6e-2, atol=1e-2)  # which checks types
    assert all(one.dtype is dtype for one in gradients)


@pytest.mark.parametrize("name", ["log_softmax", "selected", "entropy", "smoothed"])
def test_no_row_and_one_row_are_taken_too(name, monkeypatch):
    for rows in (1, 0):
        monkeypatch.setattr(f"{__name__}.TOKENS", TOKENS[:1].repeat(rows, 1))
        monkeypatch.setattr(f"{__name__}.IDS", IDS[:1].repeat(rows, 1))
        if rows or name != "selected":  # torch.stack takes no empty list
            found, expected = (evaluated(USES[name], torch.float64, in_chunks=one) for one in (True, False))
            torch.testing.assert_close(found, expected, **TOLERANCE[torch.float64])


def test_gradients_reach_the_hidden_states_alone_where_the_head_is_frozen():
    found, expected = [], []
    for got, in_chunks in ((found, True), (expected, False)):
        model = Model()
        model.head.requires_grad_(False)
        with chunked([model]) if in_chunks else torch.enable_grad():
            selected(model(TOKENS)).sum().backward()
        got += [parameter.grad for parameter in model.parameters()]

    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "topk": lambda logits: logits.topk(3),
    "max": lambda logits: logits.max(-1),
    "sort": lambda logits: torch.sort(logits, dim=-1),
    "nll_loss": lambda logits: functional.nll_loss(logits.log_softmax(-1).view(-1, V), IDS.view(-1)),
    "kl_div": lambda logits: functional.kl_div(logits.log_softmax(-1), torch.zeros(N, T, V)),
    "masked_fill": lambda logits: logits.masked_fill(torch.ones(V, dtype=torch.bool), 0.0),
    "index_add": lambda logits: logits.index_add(0, torch.tensor([0]), torch.ones(1, T, V)),
    "add": lambda logits: logits + torch.ones(V),
    "sub": lambda logits: logits - logits.logsumexp(-1, keepdim=True),
    "div": lambda logits: logits / torch.ones(N, 1, 1),
    "mul": lambda logits: logits.log_softmax(-1) * scaled_without(logits),
    "times a named tensor": lambda logits: torch.mul(logits, other=torch.ones(V)),
    "written to another": lambda logits: torch.mul(logits.detach(), 2.0, out=torch.empty(N, T, V).double()),
    "clamp_": lambda logits: logits.clamp_(max=3.0),
    "div_": lambda logits: logits.div_(0.7),
    "in place by an operator": lambda logits: logits.__itruediv__(0.7),
    "sub_": lambda logits: logits.sub_(logits.detach()),
    "__setitem__": lambda logits: logits.__setitem__((..., 0), 0.0),
    "data": lambda logits: logits.data,
    "dtype": lambda logits: logits.view(torch.int64),
    "numpy": lambda logits: logits.detach().numpy(),
    "log_softmax": lambda logits: logits.log_softmax(1),
    "softmax": lambda logits: logits.softmax(0),
    "logsumexp": lambda logits: logits.logsumexp((1, 2)),
    "sum": lambda logits: logits.sum(1),
    "argmax": lambda logits: logits.argmax(),
    "gather": lambda logits: logits.gather(1, IDS.unsqueeze(-1)),
    "take_along_dim": lambda logits: logits.take_along_dim(IDS.unsqueeze(-1)),
    "unbind": lambda logits: logits.unbind(-1),
    "split": lambda logits: logits.split(5, dim=-1),
    "chunk": lambda logits: logits.chunk(2, dim=2),
    "__getitem__": lambda logits: logits[..., :5],
    "Categorical": lambda logits: torch.distributions.Categorical(logits=logits).log_prob(IDS),
    "cross_entropy": lambda logits: functional.cross_entropy(logits, torch.zeros(N, V, dtype=torch.long)),
    "reduction": lambda logits: functional.cross_entropy(logits.view(-1, V), IDS.view(-1), reduction="total"),
}
NAMES = {
    "Categorical": "(eq|sub|__eq__)",
    "dtype": "view",
    "reduction": "cross_entropy",
    "times a named tensor": "mul",
    "written to another": "mul",
    "in place by an operator": "div_",
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_uses_are_refused_by_name(name):
    with chunked([model := Model()]):
        logits = model(TOKENS)
        with pytest.raises(SavingRefusedError, match=f": {NAMES.get(name, name)} is computed of logits that are"):
            REFUSED[name](logits)


@pytest.mark.parametrize("name", ["topk", "max", "softmax"])
def test_training_with_another_use_beside_log_probabilities_is_refused_before_anything_moves(name):
    def loss(logits, ids):
        REFUSED[name](logits)
        return -selected(logits, ids).mean()

    model, generator = Model(torch.float32), torch.get_rng_state()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())

    with pytest.raises(SavingRefusedError, match=f": {name} is computed of logits that are"):
        autoaccum.fit(
            model, [(TOKENS, IDS)] * 2, N, loss=loss, optimizer=optimizer, save_memory="chunked_loss", device="cpu",
            progress=False,
        )  # fmt: skip

    assert all(map(torch.equal, model.parameters(), before))
    assert torch.equal(torch.get_rng_state(), generator)
    assert not optimizer.state
    assert "forward" not in vars(model.head)


OF_CLASSES = {
    "other shape": lambda logits: logits.gather(-1, torch.zeros(N, 2, 1, dtype=torch.long)),
    "class": lambda logits: logits[:, :, 3],
    "class of all": lambda logits: logits[..., 3],
    "permuted": lambda logits: logits[:, :, torch.arange(8).flip(0)],
    "mask of classes": lambda logits: logits[:, :, torch.ones(8, dtype=torch.bool)],
    "mask of all": lambda logits: logits[torch.ones(8, 8, 8, dtype=torch.bool)],
    "reversed view": lambda logits: logits.transpose(0, 1),
    "unbound classes": lambda logits: logits.unbind(2),
    "split classes": lambda logits: logits.split(4, 2),
    "one dimension more": lambda logits: logits[..., None],
    "flat": lambda logits: logits.flatten(),
    "rows of classes": lambda logits: logits.view(8, 8, 2, 4),
    "times exchanged": lambda logits: logits * logits.mT,
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_part_of_the_classes_is_refused_where_all_dimensions_are_alike(name):
    with chunked([model := Model(classes=8, width=8)]):
        logits = model(torch.randint(8, (8, 8)))
        with pytest.raises(SavingRefusedError, match="is computed of logits"):
            OF_CLASSES[name](logits)


@pytest.mark.parametrize("name", ["log_softmax", "selected", "several"])
@pytest.mark.parametrize("wrong", [V, -1, -100])
def test_indices_outside_the_vocabulary_are_refused(name, wrong, monkeypatch):
    for ids in (IDS, SEVERAL):
        monkeypatch.setitem(globals(), "IDS" if ids is IDS else "SEVERAL", ids.index_fill(1, torch.tensor([4]), wrong))
    with chunked([model := Model()]):
        logits = model(TOKENS)
        with pytest.raises(InvalidInputError, match=f"ids from .*{wrong}.* for logits of 37 classes; pass ids from 0"):
            USES[name](logits)


def test_head_of_another_type_is_refused():
    model = Model(torch.float32)
    model.embed.bfloat16()
    with (
        chunked([model]),
        pytest.raises(InvalidInputError, match=r"in torch\.bfloat16 for a head of .* in torch\.float32"),
    ):
        model(TOKENS)


def changed(what, head, hidden):
    if what == "trained":
        head.weight.requires_grad_(not head.weight.requires_grad)
    with torch.no_grad():
        {"head": head.weight, "hidden states": hidden}.get(what, torch.ones(())).mul_(2.0)


CHANGES = {"head": "changed in place", "hidden states": "changed in place", "trained": "frozen or trained since, as by"}


@pytest.mark.parametrize("what", CHANGES)
def test_values_that_change_before_the_logits_are_computed_are_refused(what):
    model = Model()
    with chunked([model]):
        hidden = 3 * model.embed(TOKENS)
        logits = model.head(hidden)
        changed(what, model.head, hidden)
        with pytest.raises(SavingRefusedError, match=rf"\({CHANGES[what]}"):
            selected(logits)


@pytest.mark.parametrize("what", ["head", "trained"])
def test_head_that_changes_before_the_backward_pass_is_refused(what):
    model = Model()
    with chunked([model]):
        loss = selected(model(TOKENS)).sum()
    changed(what, model.head, None)

    with pytest.raises(SavingRefusedError, match=CHANGES[what]):
        loss.backward()


def test_head_that_changes_as_it_computes_is_refused():
    model = Model()
    nn.utils.parametrizations.spectral_norm(model.head)  # a step of the power iteration in each forward pass
    with chunked([model]), pytest.raises(SavingRefusedError, match="changed in place"):
        selected(model(TOKENS)).sum().backward()


def test_head_takes_its_input_by_name():
    with chunked([model := Model()]):
        hidden = model.embed(TOKENS)
        torch.testing.assert_close(selected(model.head(input=hidden)), selected(nn.Linear.forward(model.head, hidden)))


def test_compiled_function_around_the_model_makes_whole_logits():
    with chunked([model := Model()]):
        logits = torch.compile(model, backend="eager")(TOKENS)

    assert not isinstance(logits, UnmadeLogits)
    torch.testing.assert_close(logits, model(TOKENS))


class Own(torch.autograd.Function):
    """With a gradient of its own, as kernels have it."""

    @staticmethod
    def forward(ctx, logits):
        ctx.shape = logits.shape
        return logits.logsumexp(-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.unsqueeze(-1).expand(ctx.shape)


def test_gradients_that_functions_compute_themselves_are_not_lost():
    with chunked([model := Model()]):
        logits = model(TOKENS)
        loss = selected(logits).sum() + Own.apply(logits).sum()
        with pytest.raises(SavingRefusedError, match="a gradient is computed of logits"):
            loss.backward()


def test_logits_look_like_those_that_are_made():
    with chunked([model := Model()]):
        logits = model(TOKENS)
        assert (logits.shape, logits.dtype, logits.ndim) == ((N, T, V), torch.float64, 3)
        assert logits.requires_grad
        assert not logits.detach().requires_grad
        assert not scaled_without(logits).requires_grad
        model.requires_grad_(False)
        assert not model(TOKENS).requires_grad
