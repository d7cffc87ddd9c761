"""A loss over the whole window has the whole batch's gradient, in the memory of one micro-batch."""

import itertools
import random
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

import autoaccum
from autoaccum._data.batches import Window
from autoaccum._engine.savepoint import Savepoint
from autoaccum._engine.window_loss import WholeWindow, check_loss_scope
from autoaccum.errors import InvalidInputError
from faults import FailAt, differences, state_of
from folders import ROOT
from helpers import assert_bitwise
from put_together import training_step

SAMPLES = 12
CUTS = [(12,), (6, 6), (5, 7), (4, 4, 4), (1, 11), (1,) * 12]


class Two(NamedTuple):
    image: torch.Tensor
    text: torch.Tensor


class Clip(nn.Module):
    """Two towers and the scale of their similarities, as in CLIP."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 5))
        self.text = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 5))
        self.logit_scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, inputs):
        image, text = inputs
        return self.image(image), self.text(text), self.logit_scale.exp()


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


def info_nce(outputs, _=None):
    image, text, scale = outputs
    logits = scale * functional.normalize(image, dim=1) @ functional.normalize(text, dim=1).T
    labels = torch.arange(len(logits))
    return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


def against_each_other(outputs, targets):
    """Return for each sample how well it tells its own class from the others."""
    similarity = functional.normalize(outputs, dim=1) @ functional.normalize(outputs, dim=1).T
    same = (targets[:, None] == targets).to(similarity)
    return functional.binary_cross_entropy_with_logits(similarity, same, reduction="none").mean(1)


def supervised(outputs, targets):
    return against_each_other(outputs, targets).mean()


def paired(samples=SAMPLES):
    """((image, text), targets)."""
    inputs = torch.randn(samples, 6, dtype=torch.float64), torch.randn(samples, 4, dtype=torch.float64)
    return inputs, torch.arange(samples) % 3


def plain(samples=SAMPLES):
    """(inputs, targets)."""
    return torch.randn(samples, 6, dtype=torch.float64), torch.arange(samples) % 3


def ready(model, loss, **options):
    """What a runner has: a training step, a mark, and the two passes over a window."""
    step = training_step(model, loss, lambda p: torch.optim.SGD(p, lr=0.1), **options)
    mark = Savepoint(step.objective.modules, step.memory.device)
    return step, mark, WholeWindow(step, mark)


def run(model, loss, batch, sizes, **options):
    """Run one window as a runner does and return its losses."""
    step, mark, whole = ready(model, loss, **options)
    step.clear_gradients()
    mark.take()
    return whole.run(batch if isinstance(batch, Window) else Window([batch]), sizes, entering=lambda _: None)


def gradients(*modules):
    return [None if p.grad is None else p.grad.clone() for module in modules for p in module.parameters()]


def whole_batch(model, loss, batch):
    """Return the gradients of the plain whole batch, and leave none."""
    model.zero_grad()
    loss(model(batch[0]), batch[1]).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def all_graphs_alive(model, loss, batch, sizes):
    """Do the same with every micro-batch's graph alive at once, and every forward pass run once."""
    model.zero_grad()
    outputs = torch.cat([model(inputs) for inputs in batch[0].split(list(sizes))])
    value = loss(outputs, batch[1])
    value.backward()
    return value.detach()


def distance(found, expected):
    """Relative distance of two gradients, each as one long vector."""
    ours, theirs = (torch.cat([part.flatten().double() for part in both]) for both in (found, expected))
    return float((ours - theirs).norm() / theirs.norm())


def generators():
    """State of every generator that a model may draw from, as comparable values."""
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


def seed():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002


# --- the gradient ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_gradient_is_the_whole_batchs_however_it_is_cut(sizes):
    model, batch = Clip().double(), paired()
    expected = whole_batch(model, info_nce, batch)

    losses = run(model, info_nce, batch, sizes)

    assert distance(gradients(model), expected) < 1e-12
    assert float(losses["loss"]) == pytest.approx(info_nce(model(batch[0])).item(), rel=1e-12)


def root_of_mean(outputs, targets):
    return functional.mse_loss(outputs[:, 0], targets.double()).sqrt()


def hardest(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none").topk(len(targets) // 3).values.mean()


def triplet(outputs, targets):
    """The hardest positive and negative of each sample, as metric learning mines them in a batch."""
    apart = torch.cdist(outputs, outputs)
    same = targets[:, None] == targets
    return (apart.where(same, 0.0).amax(1) - apart.where(~same, 1e9).amin(1) + 0.3).relu().mean()


def correlation(outputs, targets):
    return 1.0 - torch.corrcoef(torch.stack([outputs[:, 0], targets.double()]))[0, 1]


@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 7), (1,) * 12], ids=str)
@pytest.mark.parametrize("loss", [root_of_mean, hardest, triplet, correlation])
def test_any_function_of_per_sample_outputs_has_the_whole_batchs_gradient(loss, sizes):
    model, batch = nn.Linear(6, 5).double(), plain()
    expected = whole_batch(model, loss, batch)

    losses = run(model, loss, batch, sizes)

    assert distance(gradients(model), expected) < 1e-12
    assert float(losses["loss"]) == pytest.approx(loss(model(batch[0]), batch[1]).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("sizes", "counts", "as_pair"),
    [
        ((12,), (4, 4, 4), False),
        ((4, 4, 4), (4, 4, 4), False),
        ((4, 4, 4), (3, 4, 2), False),
        ((12,), (4, 4, 4), True),
        ((4, 4, 4), (4, 4, 4), True),
    ],
)
def test_count_of_a_batch_is_that_of_the_window(sizes, counts, as_pair):
    model, (inputs, targets) = nn.Linear(6, 5).double(), plain()
    expected = whole_batch(
        model, lambda x, y: functional.cross_entropy(x, y, reduction="sum") / sum(counts), (inputs, targets)
    )
    pieces = [
        ({"input": one}, {"label": other, "num_items_in_batch": count})
        for one, other, count in zip(inputs.split(4), targets.split(4), counts, strict=True)
    ]
    forward = lambda model, batch: model(batch[0]["input"] if as_pair else batch["input"])  # noqa: E731

    def loss(outputs, batch):
        return functional.cross_entropy(outputs, batch["label"], reduction="sum") / batch["num_items_in_batch"]

    run(model, loss, Window(pieces if as_pair else [one | other for one, other in pieces]), sizes, forward=forward)

    assert distance(gradients(model), expected) < 1e-12


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_gradient_is_the_whole_batchs_for_any_cut(sizes):
    torch.manual_seed(0)
    model, batch = nn.Linear(6, 5).double(), plain(sum(sizes))
    expected = whole_batch(model, supervised, batch)

    run(model, supervised, batch, sizes)

    assert distance(gradients(model), expected) < 1e-12


def test_pieces_of_the_loader_are_one_window():
    model, batch = Clip().double(), paired()
    expected = whole_batch(model, info_nce, batch)
    whole = Window([batch])

    run(model, info_nce, Window([whole.cut(0, 5), whole.cut(5, 12)]), (4, 4, 4))

    assert distance(gradients(model), expected) < 1e-12


@pytest.mark.parametrize(
    "form",
    [
        lambda image, text, scale: (image, text, scale),
        lambda image, text, scale: [Two(image, text), scale],
        lambda image, text, scale: {"a": {"image": image, "text": text}, "scale": scale, "temperature": 0.5},
        lambda image, text, scale: BaseModelOutput(last_hidden_state=image, hidden_states=(text, scale)),
        lambda image, text, scale: (image, text, scale, None, torch.arange(len(image))),
    ],
    ids=["tuple", "named tuple in a list", "nested dict", "ModelOutput", "whole numbers and None"],
)
def test_representations_may_be_nested_at_will(form):
    seen = []

    def loss(outputs, _):
        seen.append(outputs)
        return info_nce(leaves(outputs)[:3])

    model, batch = Clip().double(), paired()
    expected = whole_batch(model, info_nce, batch)

    run(model, loss, batch, (5, 7), forward=lambda model, batch: form(*model(batch[0])))

    assert distance(gradients(model), expected) < 1e-12
    assert type(seen[0]) is type(form(*model(batch[0])))


def leaves(outputs):
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    inside = outputs.values() if hasattr(outputs, "values") else outputs if isinstance(outputs, tuple | list) else ()
    return [leaf for part in inside for leaf in leaves(part)]


def test_tensor_that_is_returned_twice_counts_twice():
    model, batch = nn.Linear(6, 5).double(), plain()
    expected = whole_batch(model, lambda outputs, y: supervised(outputs, y) + outputs.square().mean(), batch)

    run(
        model,
        lambda outputs, y: supervised(outputs[0], y) + outputs[1].square().mean(),
        batch,
        (6, 6),
        forward=lambda model, batch: (made := model(batch[0]), made),
    )

    assert distance(gradients(model), expected) < 1e-12


def test_scalar_that_all_micro_batches_share_may_be_the_parameter_itself():
    model, batch = Clip().double(), paired()
    expected = whole_batch(model, lambda outputs, y: info_nce((*outputs[:2], outputs[2].log())), batch)

    run(
        model,
        info_nce,
        batch,
        (4, 4, 4),
        forward=lambda model, batch: (*model(batch[0])[:2], model.logit_scale),
    )

    assert model.logit_scale.grad is not None
    assert distance(gradients(model), expected) < 1e-12


@pytest.mark.parametrize(
    "loss",
    [
        against_each_other,
        lambda x, y: (against_each_other(x, y).sum(), len(y)),
        lambda x, y: {"near": supervised(x, y) / 4, "far": against_each_other(x, y) * 3 / 4},
    ],
    ids=["vector", "pair", "mapping"],
)
def test_loss_may_have_any_form(loss):
    model, batch = nn.Linear(6, 5).double(), plain()
    expected = whole_batch(model, supervised, batch)

    losses = run(model, loss, batch, (5, 7))

    assert distance(gradients(model), expected) < 1e-12
    assert float(sum(losses.values())) == pytest.approx(supervised(model(batch[0]), batch[1]).item())


def test_vector_is_summed_where_that_is_said():
    model, batch = nn.Linear(6, 5).double(), plain()
    expected = whole_batch(model, lambda x, y: against_each_other(x, y).sum(), batch)

    run(model, against_each_other, batch, (5, 7), loss_reduction="sum")

    assert distance(gradients(model), expected) < 1e-12


class LearnedScale(nn.Module):
    """A loss with a parameter, and a buffer that counts its calls."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs, targets):
        self.calls += 1
        return supervised(outputs, targets) * self.scale.exp()


def test_loss_has_parameters_and_buffers_of_its_own():
    model, loss, batch = nn.Linear(6, 5).double(), LearnedScale(), plain()
    all_graphs_alive(model, loss, batch, (SAMPLES,))
    expected = gradients(model, loss)
    loss.zero_grad()
    loss.calls.zero_()

    run(model, loss, batch, (5, 7))

    assert distance(gradients(model, loss), expected) < 1e-12
    assert float(loss.calls) == 1


def test_loss_that_uses_the_models_parameters_directly():
    model, batch = Clip().double(), paired()
    expected = whole_batch(model, info_nce, batch)

    run(
        model,
        lambda outputs, _: info_nce((*outputs, model.logit_scale.exp())),
        batch,
        (5, 7),
        forward=lambda model, batch: model(batch[0])[:2],
    )

    assert distance(gradients(model), expected) < 1e-12


def test_loss_may_change_its_arguments_in_place():
    def loss(outputs, targets):
        outputs += 1.0
        targets[targets == 2] = 0
        return supervised(outputs, targets)

    model, batch = nn.Linear(6, 5).double(), plain()
    expected = whole_batch(model, loss, (batch[0], batch[1].clone()))

    run(model, loss, batch, (5, 7))

    assert distance(gradients(model), expected) < 1e-12
    assert (batch[1] == 2).any()


def test_frozen_tower_needs_no_gradient():
    model, batch = Clip().double(), paired()
    model.image.requires_grad_(False)
    info_nce(model(batch[0])).backward()
    expected = gradients(model.text)
    model.zero_grad()

    run(model, info_nce, batch, (5, 7))

    assert distance(gradients(model.text), expected) < 1e-12
    assert gradients(model.image) == [None] * 4


def test_only_the_loss_is_trained():
    model, loss, batch = nn.Linear(6, 5).double().requires_grad_(False), LearnedScale(), plain()

    run(model, loss, batch, (5, 7))

    assert loss.scale.grad is not None
    assert gradients(model) == [None, None]


def test_same_cut_gives_the_same_bits():
    def outcome():
        seed()
        model = Tower().double()
        losses = run(model, supervised, plain(), (4, 4, 4))
        return losses, gradients(model), list(model.buffers())

    assert_bitwise(outcome(), outcome())


# --- what a forward pass moves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(12,), (6, 6), (5, 7)], ids=str)
def test_everything_is_as_if_each_micro_batch_had_gone_forward_once(sizes):
    batch = plain()
    torch.manual_seed(1)
    ours, theirs = Tower().double(), Tower().double()
    theirs.load_state_dict(ours.state_dict())

    seed()
    all_graphs_alive(theirs, supervised, batch, sizes)
    expected = generators()
    seed()
    run(ours, supervised, batch, sizes)

    assert distance(gradients(ours), gradients(theirs)) < 1e-12
    assert generators() == expected
    assert_bitwise(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert float(ours.seen) == SAMPLES
    assert int(ours.norm.num_batches_tracked) == len(sizes)


def test_random_state_is_the_one_that_the_loss_left():
    def loss(outputs, targets):
        return supervised(outputs * torch.rand_like(outputs), targets)

    model, batch = Tower().double(), plain()

    seed()
    all_graphs_alive(model, loss, batch, (6, 6))
    expected = generators()
    seed()
    run(model, loss, batch, (6, 6))

    assert generators() == expected


def test_checkpointed_batchnorm_moves_once_a_micro_batch():
    class Checkpointed(Tower):
        def forward(self, inputs):
            return checkpoint(super().forward, inputs, use_reentrant=False)

    batch = plain()
    torch.manual_seed(1)
    ours, theirs = Checkpointed().double(), Tower().double()
    theirs.load_state_dict(ours.state_dict())

    seed()
    all_graphs_alive(theirs, supervised, batch, (6, 6))
    seed()
    run(ours, supervised, batch, (6, 6))

    assert_bitwise(dict(ours.named_buffers()), dict(theirs.named_buffers()))


def test_model_that_changes_its_input_sees_the_same_data_twice():
    class Greedy(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs.mul_(2.0))

    torch.manual_seed(1)
    model, batch = Greedy(6, 5).double(), plain()
    before = batch[0].clone()
    expected = whole_batch(model, supervised, (batch[0].clone(), batch[1]))

    run(model, supervised, batch, (6, 6))

    assert distance(gradients(model), expected) < 1e-12
    assert torch.equal(batch[0], before)


def test_model_that_is_another_one_the_second_time_is_refused():
    calls = itertools.count()
    model = nn.Linear(6, 5).double()

    with pytest.raises(InvalidInputError, match=r"runs every micro-batch twice.*register state as buffers"):
        run(model, supervised, plain(), (6, 6), forward=lambda model, batch: model(batch[0]) * (1 + next(calls)))


# --- how it is done --------------------------------------------------------------------------------------------------


def test_every_phase_of_every_micro_batch_is_told():
    model, batch = nn.Linear(6, 5).double(), plain()
    step, mark, whole = ready(model, supervised)
    mark.take()
    told = []

    whole.run(Window([batch]), (5, 7), entering=lambda size: told.append((size, step.phase)))

    assert [size for size, _ in told] == [5, 7, None, 5, 7]
    assert [phase for _, phase in told] == ["transfer", "transfer", "forward", "transfer", "transfer"]
    assert step.phase == "backward"


def test_uncut_window_goes_forward_once():
    calls = []
    model = nn.Linear(6, 5).double()
    model.register_forward_hook(lambda *_: calls.append(1))

    run(model, supervised, plain(), (12,))

    assert len(calls) == 1


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


def peak_of(work, capacity="1GiB"):
    memory = autoaccum.Simulated(capacity)
    work_of_memory = work(memory)
    with memory.limited(None):
        memory.reset_peak()
        work_of_memory()
        return memory.peak_bytes()


@pytest.mark.parametrize("samples", [32, 128])
def test_peak_is_that_of_one_micro_batch(samples):
    batch = torch.randn(samples, 16), torch.arange(samples) % 3

    def cut_in(sizes):
        def work(memory):
            _, mark, whole = ready(Sequences(), supervised, memory=memory)
            mark.take()
            return lambda: whole.run(Window([batch]), sizes, entering=lambda _: None)

        return work

    def one_micro_batch(memory):
        model = Sequences()
        return lambda: supervised(model(batch[0][:8]), batch[1][:8]).backward()

    one = peak_of(one_micro_batch)

    assert peak_of(cut_in((8,) * (samples // 8))) < 1.1 * one
    assert peak_of(cut_in((samples,))) > 0.8 * one * samples / 8


@pytest.mark.parametrize("point", range(1, 356, 12))
def test_failed_window_is_as_if_it_had_never_begun(point):
    """As a runner does: gradients dropped, the mark put back, and the window begun again in a smaller cut."""

    def outcome(*, fails):
        torch.manual_seed(1)
        model, batch = Tower().double(), plain()
        step, mark, whole = ready(model, supervised)
        seed()
        mark.take()
        if fails:
            with FailAt(point) as failing, pytest.raises(torch.OutOfMemoryError):
                whole.run(Window([batch]), (6, 6), entering=lambda _: None)
            assert failing.hits == 1
            step.abandon()
            mark.put_back()
        before = state_of(model, step.optimizer)
        losses = whole.run(Window([batch]), (4, 4, 4), entering=lambda _: None)
        return before, losses, gradients(model), state_of(model, step.optimizer)

    failed, fresh = outcome(fails=True), outcome(fails=False)

    assert differences(failed[0], fresh[0]) == []
    assert_bitwise(failed[1:3], fresh[1:3])
    assert differences(failed[3], fresh[3]) == []


def test_scaler_scales_the_gradient():
    torch.manual_seed(1)
    model, batch = nn.Linear(6, 5), (torch.randn(4, 6), torch.arange(4) % 2)
    step, mark, whole = ready(model, supervised, precision="fp16")
    mark.take()
    found = []
    for sizes in ((2, 2), (4,)):
        step.clear_gradients()
        whole.run(Window([batch]), sizes, entering=lambda _: None)
        found.append(gradients(model))

    scaled = [gradient * step.precision.scaler.get_scale() for gradient in whole_batch(model, supervised, batch)]

    assert distance(found[0], scaled) < 1e-2
    assert distance(found[0], found[1]) < 1e-2


class Casts(TorchDispatchMode):
    """Counts how often a tensor is cast."""

    def __init__(self, tensor):
        super().__init__()
        self._storage = tensor.untyped_storage().data_ptr()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        cast = operator is torch.ops.aten._to_copy.default
        self.count += cast and args[0].untyped_storage().data_ptr() == self._storage
        return operator(*args, **(kwargs or {}))


def test_weights_that_were_cast_without_graph_are_cast_again():
    """In older versions of torch an autocast around both passes takes the first one's, and loses the gradient."""
    model, batch = nn.Linear(6, 5), (torch.randn(12, 6), torch.arange(12) % 3)

    with torch.autocast("cpu", dtype=torch.bfloat16), Casts(model.weight) as casts:
        run(model, supervised, batch, (4, 4, 4))

    assert casts.count == 2


def test_random_numbers_that_only_a_pass_with_graph_draws_do_not_move_the_masks():
    class Noisy(nn.Sequential):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            if outputs.requires_grad:
                noise = torch.rand_like(outputs)
                outputs.register_hook(lambda gradient: gradient + 0.0 * noise * torch.rand_like(gradient))
            return outputs

    batch = plain()
    torch.manual_seed(1)
    model = Noisy(nn.Linear(6, 3), nn.Dropout(0.5)).double()

    seed()
    all_graphs_alive(nn.Sequential(*model), supervised, batch, (4, 4, 4))
    expected = gradients(model)
    seed()
    run(model, supervised, batch, (4, 4, 4))

    assert distance(gradients(model), expected) < 1e-12


def test_autocast_of_the_users_own_around_it_loses_no_gradient():
    torch.manual_seed(1)
    model, batch = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)), (torch.randn(12, 6), torch.arange(12) % 3)
    expected = whole_batch(model, supervised, batch)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(model, supervised, batch, (6, 6))

    assert distance(gradients(model), expected) < 5e-2


# --- what the loss sees ----------------------------------------------------------------------------------------------


def seen_by_the_loss(model, window, sizes, **options):
    seen = []

    def loss(outputs, batch):
        seen.append(batch)
        return outputs.square().mean()

    run(model, loss, window, sizes, **options)
    return seen[0]


def test_loss_sees_the_targets_of_pairs_though_their_inputs_cannot_be_joined():
    short, long = (torch.randint(9, (4, 3)), torch.arange(4)), (torch.randint(9, (8, 5)), torch.arange(4, 12))

    seen = seen_by_the_loss(nn.EmbeddingBag(9, 5), Window([short, long]), (4, 4, 4))

    assert seen.tolist() == list(range(12))


def test_targets_that_cannot_be_joined_are_refused():
    window = Window([(torch.randn(4, 6), torch.zeros(4, 3)), (torch.randn(4, 6), torch.zeros(4, 5))])

    with pytest.raises(InvalidInputError, match=r"targets of the window's 2 batches cannot be joined.*pad them"):
        seen_by_the_loss(nn.Linear(6, 5), window, (4, 4))


def test_loss_sees_what_can_be_joined_of_mappings():
    short = {"input": torch.randint(9, (4, 3)), "label": torch.arange(4), "name": list("abcd"), "of": 2, "id": 1}
    long = {"input": torch.randint(9, (8, 5)), "label": torch.arange(4, 12), "name": list("efghijkl"), "of": 2, "id": 2}

    seen = seen_by_the_loss(nn.EmbeddingBag(9, 5), Window([short, long]), (4, 4, 4))

    assert list(seen) == ["label", "name", "of"]
    assert len(seen) == 3
    assert seen["label"].tolist() == list(range(12))
    assert seen["name"] == list("abcdefghijkl")
    assert seen["of"] == 2
    assert "input" not in seen
    assert seen.get("id") is None
    with pytest.raises(KeyError, match=r"input .it cannot be joined over the window"):
        seen["input"]


def test_items_of_mappings_are_joined_only_when_the_loss_asks():
    batch = {"input": torch.randn(256, 4096), "label": torch.arange(256)}

    def loss(outputs, batch):
        return (outputs.square().mean(1) * batch["label"]).mean()

    def work(memory):
        _, mark, whole = ready(nn.Linear(4096, 5), loss, memory=memory)
        mark.take()
        halves = [{name: item[rows] for name, item in batch.items()} for rows in (slice(128), slice(128, 256))]
        window = Window(halves)
        return lambda: whole.run(window, (8,) * 32, entering=lambda _: None)

    assert peak_of(work) < batch["input"].nbytes / 4


def test_items_of_mappings_are_attributes_too():
    batch = BatchEncoding({"input": torch.randn(8, 6), "label": torch.arange(8)})

    seen = seen_by_the_loss(nn.Linear(6, 5), Window([batch]), (4, 4), forward=lambda model, batch: model(batch.input))

    assert seen.label.tolist() == list(range(8))
    assert not hasattr(seen, "items_of")


def test_loss_sees_any_other_batch_whole():
    batch = torch.randn(8, 6)

    seen = seen_by_the_loss(nn.Linear(6, 5), Window([batch[:4], batch[4:]]), (4, 4))

    assert torch.equal(seen, batch)


def test_loss_sees_the_pieces_of_a_batch_that_cannot_be_joined():
    window = Window([torch.randint(9, (4, 3)), torch.randint(9, (4, 5))])

    seen = seen_by_the_loss(nn.EmbeddingBag(9, 5), window, (4, 4))

    assert seen is window


# --- what is refused -------------------------------------------------------------------------------------------------


def test_unknown_scope_is_refused():
    check_loss_scope("window")
    check_loss_scope("micro_batch")

    with pytest.raises(InvalidInputError, match="loss_scope='batch' is unknown; choose 'micro_batch' or 'window'"):
        check_loss_scope("batch")


@pytest.mark.parametrize("loss", [None, [lambda model, batch: model(batch[0]).mean()]], ids=["none", "list"])
def test_loss_has_to_take_outputs(loss):
    with pytest.raises(InvalidInputError, match="takes one loss over the outputs of the whole window, but there is"):
        ready(nn.Linear(6, 5), loss)


@dataclass
class Embeddings:
    image: torch.Tensor


@pytest.mark.parametrize("sizes", [(12,), (6, 6)], ids=["uncut", "cut"])
@pytest.mark.parametrize(
    ("forward", "found"),
    [
        (lambda model, batch: model(batch[0]).mean(), "only tensors without dimensions"),
        (lambda model, batch: model(batch[0]).T, r"a tensor of shape \(5, "),
        (lambda model, batch: Embeddings(model(batch[0])), "a Embeddings in which no tensor is found"),
        (lambda model, batch: None, "a NoneType"),
    ],
    ids=["a loss", "features first", "dataclass", "nothing"],
)
def test_model_has_to_return_representations(forward, found, sizes):
    with pytest.raises(InvalidInputError, match=rf"needs representations.*{found}.*pass loss="):
        run(nn.Linear(6, 5).double(), supervised, plain(), sizes, forward=forward)


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        (lambda model, batch: (model(batch[0]), model(batch[0]).mean()), "the value .* against .* the value"),
        (lambda model, batch: (model(batch[0]), batch[1].tolist()[0]), "a tuple"),
        (lambda model, batch: model(batch[0]) @ model(batch[0]).T, r"shape \(5, 5\) against .* shape \(7, 7\)"),
    ],
    ids=["a loss of the micro-batch", "a number of the micro-batch", "similarities within the micro-batch"],
)
def test_what_cannot_be_joined_is_refused(forward, found):
    with pytest.raises(InvalidInputError, match=f"cannot join what the model returned.*{found}"):
        run(nn.Linear(6, 5).double(), lambda outputs, _: outputs[0].mean(), plain(), (5, 7), forward=forward)


def test_loss_without_a_graph_is_refused():
    with pytest.raises(InvalidInputError, match="loss 'loss' has no gradient"):
        run(nn.Linear(6, 5).double(), lambda x, y: supervised(x, y).detach(), plain(), (6, 6))


def test_model_without_a_gradient_is_refused():
    def detached(model, batch):
        return model(batch[0]).detach()

    with pytest.raises(InvalidInputError, match="no output of the model does"):
        run(nn.Linear(6, 5).double(), supervised, plain(), (6, 6), forward=detached)


def test_weight_of_nothing_is_refused():
    with pytest.raises(InvalidInputError, match="have weight 0 together"):
        run(nn.Linear(6, 5).double(), lambda x, y: (x.sum(), 0), plain(), (6, 6))


# --- the documentation -----------------------------------------------------------------------------------------------


def test_example_of_the_documentation_runs():
    page = ROOT / "docs" / "contrastive.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    names = {}

    exec(compile(example, str(page), "exec"), names)  # noqa: S102

    assert names["result"].steps == 4
    assert names["result"].plan.micro_batch == 16
