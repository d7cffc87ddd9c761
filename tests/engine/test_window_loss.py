"""A loss over the whole window has the whole batch's gradient, in the memory of one micro-batch."""

import itertools
import random
import textwrap

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BatchEncoding

import autoaccum
from autoaccum.errors import InvalidInputError
from support.models.small import assert_bitwise

SAMPLES = 13
SIZES = [13, 7, 5, 1]  # the last two but one are in unequal micro-batches


class Tower(nn.Module):
    """One tower with everything that a forward pass may move: statistics, spectral norm, masks, foreign generators."""

    def __init__(self):
        super().__init__()
        self.body = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16))
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.seen += len(inputs)
        noise = random.random() + np.random.randn()  # noqa: NPY002, S311
        return self.head(self.drop(self.norm(self.body(inputs)))) * (1.0 + 0.1 * noise + 0.01 * self.seen)


def against_each_other(outputs, targets):
    """Return for each sample how well it tells its own class from the others."""
    similarity = functional.normalize(outputs, dim=1) @ functional.normalize(outputs, dim=1).T
    same = (targets[:, None] == targets).to(similarity)
    return functional.binary_cross_entropy_with_logits(similarity, same, reduction="none").mean(1)


def supervised(outputs, targets):
    return against_each_other(outputs, targets).mean()


def plain(samples=SAMPLES):
    return torch.randn(samples, 6, dtype=torch.float64), torch.arange(samples) % 3


def accumulator(model, loss, micro_batch, **options):
    settings = {"device": "cpu", "micro_batch": micro_batch, "loss_scope": "window"} | options
    return autoaccum.Accumulator(model, loss=loss, **settings)


def run(model, loss, batch, micro_batch, **options):
    return accumulator(model, loss, micro_batch, **options).backward(batch).losses


def gradients(*modules):
    return [None if p.grad is None else p.grad.clone() for module in modules for p in module.parameters()]


def whole_batch(model, loss, batch):
    loss(model(batch[0]), batch[1]).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def assert_whole(loss, micro_batch, used=None, *, model=None, batch=None, by_hand=None, **options):
    """Check the gradient of a window against that of the plain whole batch, of whose loss `by_hand` is another form."""
    model, batch = model or nn.Linear(6, 5).double(), batch or plain()
    expected = whole_batch(model, by_hand or loss, batch)
    losses = run(model, loss, batch if used is None else used, micro_batch, **options)
    assert distance(gradients(model), expected) < 1e-12
    return losses


def all_graphs_alive(model, loss, batch, sizes):
    """Leave the gradient with every micro-batch's graph alive at once, and every forward pass run once."""
    outputs = torch.cat([model(inputs) for inputs in batch[0].split(list(sizes))])
    loss(outputs, batch[1]).backward()


def distance(found, expected):
    ours, theirs = (torch.cat([part.flatten().double() for part in both]) for both in (found, expected))
    return float((ours - theirs).norm() / theirs.norm())


def generators():
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


def seed():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002


# --- the gradient ----------------------------------------------------------------------------------------------------


def root_of_mean(outputs, targets):
    return functional.mse_loss(outputs[:, 0], targets.double()).sqrt()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss", [supervised, root_of_mean])
def test_any_function_of_per_sample_outputs_has_the_whole_batchs_gradient(loss, size):
    model, batch = nn.Linear(6, 5).double(), plain()

    losses = assert_whole(loss, size, model=model, batch=batch)

    assert losses["loss"] == pytest.approx(loss(model(batch[0]), batch[1]).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (lambda x, y: against_each_other(x, y) / len(y), {"loss_reduction": "sum"}),
        (against_each_other, {}),
        (lambda x, y: (against_each_other(x, y).sum(), len(y)), {}),
        (lambda x, y: {"near": supervised(x, y) / 4, "far": against_each_other(x, y) * 3 / 4}, {}),
    ],
    ids=["summed vector", "vector", "pair", "mapping"],
)
def test_loss_may_have_any_form(loss, options):
    model, batch = nn.Linear(6, 5).double(), plain()

    losses = assert_whole(loss, 7, model=model, batch=batch, by_hand=supervised, **options)

    assert sum(losses.values()) == pytest.approx(supervised(model(batch[0]), batch[1]).item())


# --- what a forward pass moves ---------------------------------------------------------------------------------------


def drawing(outputs, targets):
    return supervised(outputs * torch.rand_like(outputs), targets)


@pytest.mark.parametrize("size", [13, 7, 5])
@pytest.mark.parametrize("loss", [supervised, drawing])
def test_everything_is_as_if_each_micro_batch_had_gone_forward_once(loss, size):
    ours, theirs, batch = Tower().double(), Tower().double(), plain()
    theirs.load_state_dict(ours.state_dict())
    accumulating = accumulator(ours, loss, size)

    seed()
    report = accumulating.backward(batch)
    found = generators()
    seed()
    all_graphs_alive(theirs, loss, batch, report.micro_batches)

    assert len(report.micro_batches) == -(-SAMPLES // size)
    assert distance(gradients(ours), gradients(theirs)) < 1e-12
    assert found == generators()
    assert_bitwise(dict(ours.named_buffers()), dict(theirs.named_buffers()))


def test_model_that_changes_its_input_sees_the_same_data_twice():
    class Greedy(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs.mul_(2.0))

    inputs, targets = plain()
    before = inputs.clone()

    assert_whole(supervised, 7, (inputs, targets), model=Greedy(6, 5).double(), batch=(inputs.clone(), targets))

    assert torch.equal(inputs, before)


def test_model_that_is_another_one_the_second_time_is_refused():
    calls = itertools.count()
    model = nn.Linear(6, 5).double()

    with pytest.raises(InvalidInputError, match=r"runs every micro-batch twice.*register state as buffers"):
        run(model, supervised, plain(), 7, forward=lambda model, batch: model(batch[0]) * (1 + next(calls)))


# --- memory ----------------------------------------------------------------------------------------------------------


class Sequences(nn.Module):
    """Hidden layers of 64 KiB a sample; the representation is a view of the last one, as a first token's is."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, inputs):
        hidden = self.body(inputs.unsqueeze(1).expand(-1, 1024, -1))
        for _ in range(4):
            hidden = torch.tanh(hidden)
        return hidden[:, 0]


def peak_of(model, loss, batch, micro_batch, **options):
    accumulating = accumulator(model, loss, micro_batch, device=autoaccum.Simulated("1GiB"), **options)
    return accumulating.backward(batch).peak_bytes


@pytest.mark.parametrize("samples", [32, 128])
def test_peak_is_that_of_one_micro_batch(samples):
    batch = torch.randn(samples, 16), torch.arange(samples) % 3
    part = tuple(tensor[:8] for tensor in batch)

    one = peak_of(Sequences(), supervised, part, 8, loss_scope="micro_batch", loss_reduction="mean")

    assert peak_of(Sequences(), supervised, batch, 8) < 1.1 * one
    assert peak_of(Sequences(), supervised, batch, samples) > 0.8 * one * samples / 8


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "options", "found"),
    [
        (lambda x, y: supervised(x, y).detach(), {}, "loss 'loss' has no gradient"),
        (supervised, {"forward": lambda model, batch: model(batch[0]).detach()}, "no output of the model does"),
        (lambda x, y: (x.sum(), 0), {}, "no target of this window counts"),
    ],
    ids=["loss", "model", "weight"],
)
def test_what_has_no_gradient_or_no_weight_is_refused(loss, options, found):
    with pytest.raises(InvalidInputError, match=found):
        run(nn.Linear(6, 5).double(), loss, plain(), 7, **options)


# --- the documentation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 5])
def test_count_of_a_batch_in_a_window_of_several_is_refused(size):
    def loss(outputs, batch):
        return functional.cross_entropy(outputs, batch["label"], reduction="sum") / batch["num_items_in_batch"]

    inputs, targets = plain()
    pieces = [{"input": inputs[at : at + 4], "label": targets[at : at + 4], "num_items_in_batch": 4} for at in (0, 4)]

    with pytest.raises(InvalidInputError, match="'num_items_in_batch', which counts a batch of the loader"):
        run(
            nn.Linear(6, 5).double(),
            loss,
            autoaccum.Window(pieces),
            size,
            forward=lambda model, batch: model(batch["input"]),
        )


class Experts(nn.Module):
    """Leaves a term of its loss as an attribute, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.router, self.head, self.auxiliary_loss = nn.Linear(6, 2), nn.Linear(6, 3), None

    def forward(self, inputs):
        shares = self.router(inputs).softmax(1)
        self.auxiliary_loss = shares.mean(0).square().sum()
        return self.head(inputs) * shares[:, :1]


def test_loss_that_reads_a_term_off_the_model_is_refused():
    model = Experts().double()

    def loss(outputs, targets):
        return functional.cross_entropy(outputs, targets) + model.auxiliary_loss

    with pytest.raises(InvalidInputError, match=r"return .*outputs") as caught:
        run(model, loss, plain(), 7)

    assert len(textwrap.wrap(str(caught.value), 120)) <= 3
    assert gradients(model) == [None] * 4


def test_loss_that_is_given_the_term_with_the_outputs_has_its_whole_gradient():
    class Returning(Experts):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            return outputs, self.router(inputs).softmax(1)

    def loss(outputs, targets):
        return functional.cross_entropy(outputs[0], targets) + outputs[1].mean(0).square().sum()

    assert_whole(loss, 7, model=Returning().double())


def test_metric_that_writes_into_outputs_leaves_the_loss_as_it_is():
    batch, losses = plain(), []
    for metric in (lambda outputs, targets: 0.0, lambda outputs, targets: outputs.zero_().sum()):
        torch.manual_seed(1)
        model = nn.Linear(6, 3).double()
        result = autoaccum.fit(
            model, [batch], SAMPLES, loss=functional.cross_entropy, loss_scope="window", val_loader=[batch],
            metrics={"m": metric}, max_steps=1, progress=False,
        )  # fmt: skip
        losses.append(result.evaluations[-1].loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("micro_batch", [13, 7])
def test_loss_reads_items_of_a_batch_encoding_as_attributes(micro_batch):
    batch = BatchEncoding(dict(zip("xy", plain(), strict=True)))

    def loss(outputs, batch):
        return supervised(outputs, batch.y)

    losses = run(
        model := nn.Linear(6, 5).double(), loss, batch, micro_batch, forward=lambda model, batch: model(batch["x"])
    )

    assert losses["loss"] == pytest.approx(supervised(model(batch["x"]), batch["y"]).item())
