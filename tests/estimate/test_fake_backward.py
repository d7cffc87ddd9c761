import copy
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoaccum._estimate.cuda_dispatch import without_driver
from autoaccum._estimate.fake_backward import backward, backward_from, loosened


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor, x.sum()

    @staticmethod
    def backward(ctx, grad, _):
        return grad * ctx.factor, None


class Custom(nn.Linear):
    def forward(self, x):
        return Twice.apply(super().forward(x), 2.0)[0]


class Shared(nn.Linear):
    """A gradient that goes two ways, and ways that meet; broadcast and cast."""

    def forward(self, x):
        x = super().forward(x)
        return (x + (x * 2).double().mean(0, keepdim=True) + super().forward(x)).relu()


class Transformer(nn.TransformerEncoder):
    def __init__(self, *_):
        layer = nn.TransformerEncoderLayer(6, 2, 32, dropout=0.0, batch_first=True)
        super().__init__(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("kind", [Custom, Shared, Transformer])
def test_gradients_are_those_of_the_engine_bit_for_bit(kind):
    model, x = kind(6, 6), torch.randn(4, 5, 6)
    other = copy.deepcopy(model)

    for _ in range(2):
        model(x).square().sum().backward()
        backward(other(x).square().sum())

    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


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
    first, last, x = nn.Linear(6, 6), nn.Linear(6, 1), torch.randn(4, 6)
    hidden = first(x).exp()
    saved = weakref.ref(hidden.untyped_storage())
    output = checkpoint(last, hidden, use_reentrant=False) if recompute else last(hidden)
    loss = loosened(output.square().sum())
    del hidden, output
    first.weight.register_post_accumulate_grad_hook(lambda _: alive_at_first_gradient.append(saved() is not None))

    backward(loss * 2)

    assert alive_at_first_gradient == [False]


def test_loosened_losses_of_one_graph_have_the_gradients_of_the_engine():
    model, x = nn.Linear(6, 6), torch.randn(4, 6)
    other = copy.deepcopy(model)

    def losses(layer):
        hidden = layer(x).tanh()
        return [hidden.sum(), hidden.square().mean()]

    torch.stack(losses(model)).sum().backward()
    backward(torch.stack([loosened(loss) for loss in losses(other)]).sum())

    assert torch.equal(other.weight.grad, model.weight.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_either_kind_have_the_gradients_of_the_engine(reentrant):
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3)])
    other = copy.deepcopy(blocks)
    x = torch.randn(4, 6, requires_grad=True)

    def loss(stack):
        hidden = x
        for block in stack:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=reentrant)
        return hidden.square().mean()

    loss(blocks).backward()
    with without_driver():
        backward(loss(other))

    pairs = zip(blocks.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one.grad, two.grad) for one, two in pairs)


def test_several_roots_of_one_graph_have_the_gradients_of_the_engine():
    model = nn.Linear(6, 6)
    other, x = copy.deepcopy(model), torch.randn(4, 6)
    given = [torch.randn(4, 6), torch.randn(4, 6)]

    def outputs(layer):
        hidden = layer(x).tanh()
        return [hidden * 2, hidden]

    torch.autograd.backward(outputs(model), given)
    backward_from(outputs(other), given)

    assert torch.allclose(other.weight.grad, model.weight.grad, rtol=1e-6)


def test_loosened_loss_is_itself_where_to_begin():
    model = nn.Linear(6, 1)

    backward(loosened(model(torch.ones(2, 6)).sum()))

    assert torch.equal(model.weight.grad, torch.full((1, 6), 2.0))


@pytest.mark.parametrize("materializes", [None, True, False])
def test_function_gets_zeros_or_none_for_unused_outputs_as_from_the_engine(materializes):
    given = []

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if materializes is not None:
                ctx.set_materialize_grads(materializes)
            return x * 1, x * 2

        @staticmethod
        def backward(ctx, unused, used):
            given.append(unused)
            return used * 2

    x = torch.randn(4, requires_grad=True)

    Two.apply(x)[1].sum().backward()
    with without_driver():
        backward(Two.apply(x)[1].sum())

    by_engine, ours = given
    assert (ours is None) == (by_engine is None) == (materializes is False)
    assert torch.equal(x.grad, torch.full((4,), 4.0))


@pytest.mark.skipif(
    not hasattr(torch.autograd.function.FunctionCtx, "set_output_grad_dtype"), reason="PyTorch is too old for it"
)
@pytest.mark.parametrize("declared", [torch.float64, torch.float16, None])
def test_function_gets_gradients_in_the_type_that_it_declared(declared):
    given = []

    class Cast(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_output_grad_dtype(declared)
            return x.half()

        @staticmethod
        def backward(ctx, grad):
            given.append(grad.dtype)
            return grad.float()

    class Widened(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.float()

        @staticmethod
        def backward(ctx, grad):
            return grad

    x = torch.randn(4, requires_grad=True)

    Widened.apply(Cast.apply(x)).sum().backward()
    with without_driver():
        backward(Widened.apply(Cast.apply(x)).sum())

    by_engine, ours = given
    assert ours == by_engine == (declared or torch.float32)
