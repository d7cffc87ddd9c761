"""The backward pass that predictions for a GPU go through gives the gradients of PyTorch's own, and holds no more.

Tested by itself, with values: a prediction's tensors have none.
"""

import contextlib
import copy
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from autoaccum._estimate.cuda_dispatch import without_driver
from autoaccum._estimate.fake_backward import backward, backward_from, loosened

# --- functions of users -----------------------------------------------------------------------------------------------


class Twice(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor, x.sum()

    @staticmethod
    def backward(ctx, grad, _):
        return grad * ctx.factor, None


class UsedInPart(Function):
    """Of two results one is not used; its gradient says what came for the other: zeros, or None."""

    @staticmethod
    def forward(ctx, x, materializes):
        if materializes is not None:
            ctx.set_materialize_grads(materializes)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx, unused, used):
        return used * (2 if unused is None else 3 + unused), None


class Halved(Function):
    """Its gradient says in which type the gradient of its result came."""

    @staticmethod
    def forward(ctx, x, declared):
        ctx.set_output_grad_dtype(declared)
        return x.half()

    @staticmethod
    def backward(ctx, grad):
        return grad.float() * grad.dtype.itemsize, None


class Widened(Function):
    @staticmethod
    def forward(ctx, x):
        return x.float()

    @staticmethod
    def backward(ctx, grad):
        return grad


# --- the table --------------------------------------------------------------------------------------------------------


def shared(model, x):
    """A gradient that goes two ways, and ways that meet; broadcast and cast."""
    y = model(x)
    return (y + (y * 2).double().mean(0, keepdim=True) + model(x)).relu().square().sum()


def checkpointed(model, x, *, reentrant):
    x = x.requires_grad_()
    for _ in range(3):
        x = x + checkpoint(lambda x: model(x).tanh(), x, use_reentrant=reentrant)
    return x.square().mean()


def two_losses(model, x, way):
    hidden = model(x).tanh()
    return torch.stack([way(hidden.sum()), way(hidden.square().mean())]).sum()


def transformer():
    layer = nn.TransformerEncoderLayer(6, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def layer():
    return nn.Linear(6, 6)


# A loss of a model, a batch, and how the loss is kept: as it is by PyTorch, loosened by predictions.
LOSSES = {
    "layer": lambda model, x, way: way(model(x).square().sum()),
    "scaled": lambda model, x, way: way(model(x).square().sum()) * 2,
    "two of one graph": two_losses,
    "shared": lambda model, x, way: way(shared(model, x)),
    "own function": lambda model, x, way: way(Twice.apply(model(x), 2.0)[0].square().sum()),
    "checkpoints": lambda model, x, way: way(checkpointed(model, x, reentrant=False)),
    "reentrant checkpoints": lambda model, x, way: checkpointed(model, x, reentrant=True),
    **{
        f"unused result, materialized: {how}": lambda model, x, way, how=how: way(
            UsedInPart.apply(model(x), how)[1].sum()
        )
        for how in (None, True, False)
    },
}
if hasattr(torch.autograd.function.FunctionCtx, "set_output_grad_dtype"):  # in newer versions of PyTorch
    LOSSES |= {
        f"type of a gradient: {how}": lambda model, x, way, how=how: way(
            Widened.apply(Halved.apply(model(x), how)).sum()
        )
        for how in (torch.float64, torch.float16, None)
    }


@pytest.mark.parametrize(("name", "make"), [*((name, layer) for name in LOSSES), ("layer", transformer)])
def test_gradients_are_those_of_the_engine_bit_for_bit(name, make):
    model, x = make(), torch.randn(4, 5, 6)
    other, loss = copy.deepcopy(model), LOSSES[name]
    # Its attention would be computed by a kernel that the CPU does not have.
    surroundings = contextlib.nullcontext if make is transformer else without_driver

    for _ in range(2):
        loss(model, x.clone(), lambda it: it).backward()
        with surroundings():
            backward(loss(other, x.clone(), loosened))

    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_several_roots_of_one_graph_have_the_gradients_of_the_engine():
    model = layer()
    other, x = copy.deepcopy(model), torch.randn(4, 6)
    given = [torch.randn(4, 6), torch.randn(4, 6)]

    def outputs(model):
        hidden = model(x).tanh()
        return [hidden * 2, hidden]

    torch.autograd.backward(outputs(model), given)
    backward_from(outputs(other), given)

    assert torch.allclose(other.weight.grad, model.weight.grad, rtol=1e-6)


# --- what it holds and computes ---------------------------------------------------------------------------------------


def test_checkpoint_is_computed_again_once():
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return super().forward(x).sigmoid() * 2

    model = Counted(6, 6)

    for _ in range(2):
        backward(checkpoint(model, torch.randn(4, 6), use_reentrant=False).exp().sum())

    assert len(calls) == 4


@pytest.mark.parametrize("recompute", [False, True])
def test_graph_of_a_loosened_loss_is_let_go_of_on_the_way(recompute):
    alive_at_first_gradient = []
    first, last, x = layer(), nn.Linear(6, 1), torch.randn(4, 6)
    hidden = first(x).exp()
    saved = weakref.ref(hidden.untyped_storage())
    output = checkpoint(last, hidden, use_reentrant=False) if recompute else last(hidden)
    loss = loosened(output.square().sum())
    del hidden, output
    first.weight.register_post_accumulate_grad_hook(lambda _: alive_at_first_gradient.append(saved() is not None))

    backward(loss * 2)

    assert alive_at_first_gradient == [False]
