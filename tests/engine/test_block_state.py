"""A block that is computed again finds what it found the first time, whatever it changes; else it is refused."""

import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._engine.checkpointing import checkpointed
from autoaccum.errors import SavingRefusedError
from helpers import CPU, assert_bitwise, live_tensors

D, N = 8, 6
INPUTS = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)
        self.begin()

    def begin(self):
        """Make what it holds."""

    def factor(self, inside):
        """Return what its results are multiplied by."""
        return 1.0

    def forward(self, inputs, *_):
        inside = self.one(inputs).tanh()
        return inputs + self.two(inside * self.factor(inside))


class ReplacedBuffer(Block):
    def begin(self):
        self.register_buffer("scale", torch.ones(()))

    def factor(self, inside):
        self.scale = self.scale * 0.9
        return self.scale


class ChangedBuffer(ReplacedBuffer):
    def factor(self, inside):
        before = self.scale.clone()
        self.scale.mul_(0.9)
        return before


class NewBuffer(Block):
    def begin(self):
        self.register_buffer("scale", None)

    def factor(self, inside):
        self.scale = torch.ones(()) if self.scale is None else self.scale * 0.9
        return self.scale


class Normalized(Block):
    """A normalization written by hand, whose statistics are replaced."""

    def begin(self):
        self.register_buffer("mean", torch.zeros(D))

    def factor(self, inside):
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * inside.mean(0)
        return inside - self.mean


class ReplacedTensor(ReplacedBuffer):
    def begin(self):
        self.scale = torch.ones(())


class ChangedTensor(ChangedBuffer):
    def begin(self):
        self.scale = torch.ones(())


class Counter(Block):
    def begin(self):
        self.calls = 0

    def factor(self, inside):
        self.calls += 1
        return 1.0 / self.calls


class Listed(Block):
    def begin(self):
        self.calls = [1.0]

    def factor(self, inside):
        self.calls[0] *= 0.9
        self.calls.append(0)
        return self.calls[0] / len(self.calls)


class Mapped(Block):
    def begin(self):
        self.calls, self.seen = {"all": 0}, set()

    def factor(self, inside):
        self.calls["all"] += 1
        self.seen.add(self.calls["all"])
        return 1.0 / self.calls["all"] + len(self.seen)


class Added(Block):
    """Makes an attribute and a buffer when it is first computed."""

    calls = 0

    def factor(self, inside):
        self.calls += 1
        if "scale" not in self._buffers:
            self.register_buffer("scale", torch.ones(()))
        else:
            self.scale = self.scale * 0.9
        return self.scale / self.calls


class Typed(Block):
    """Counts in types of its own."""

    def begin(self):
        self.calls, self.scale, self.seen = np.float64(1.0), np.ones(2), deque([1.0], maxlen=3)

    def factor(self, inside):
        self.calls *= 0.9
        self.scale *= 0.9
        self.seen.append(self.seen[-1] / 2)
        return float(self.calls) * float(self.scale[0]) * sum(self.seen)


class Rolling(Block):
    """Adds to a result of the call before, in the same step."""

    def begin(self):
        self.before = None

    def forward(self, inputs, *rest):
        results = super().forward(inputs, *rest)
        results = results if self.before is None else results * self.before
        self.before = results
        return results + super().forward(results, *rest)


class Twice(nn.Module):
    """Calls each block twice."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *given):
        return self.block(self.block(*given), *given[1:])


class Given(Block):
    """Draws from a generator that it is given."""

    def forward(self, inputs, generators):
        noise = torch.rand(N, D, generator=generators["torch"]) * generators["numpy"][0].random()
        return inputs + self.one(inputs) * noise * generators["python"].random()


class Parents(Block):
    """Draws from a generator that the model holds."""

    def factor(self, inside):
        return torch.rand(inside.shape, generator=self.parent().generator)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 1)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.generator = torch.Generator().manual_seed(0)
        self.others = {"torch": self.generator, "numpy": (np.random.default_rng(0),), "python": random.Random(0)}  # noqa: S311
        for one in self.blocks:
            one.parent = lambda: self
        self.double()

    def forward(self, inputs):
        inside = self.first(inputs)
        for block in self.blocks:
            inside = block(inside, self.others)
        return self.last(inside)


STATEFUL = [
    ReplacedBuffer, ChangedBuffer, NewBuffer, Normalized, ReplacedTensor, ChangedTensor, Counter, Listed, Mapped, Given,
    Parents, Added, Typed,
]  # fmt: skip


def states(model):
    """Return all that blocks hold, by name."""
    return [
        {name: value for name, value in {**vars(block), **block._buffers}.items() if name in ("scale", "calls", "seen")}
        for block in model.blocks
    ]


@pytest.mark.parametrize("block", STATEFUL)
def test_gradients_and_what_blocks_hold_are_as_without(block):
    plain, model = Model(block), Model(block)
    for _ in range(2):
        plain(INPUTS).square().mean().backward()
        with checkpointed([model], CPU):
            model(INPUTS).square().mean().backward()

    assert_bitwise({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in plain.named_parameters()})
    assert_bitwise(model.state_dict(), plain.state_dict())
    assert str(states(model)) == str(states(plain))
    assert torch.equal(model.generator.get_state(), plain.generator.get_state())


def test_results_of_the_call_before_are_what_they_were():
    plain, model = Model(Rolling), Model(Rolling)
    for one in (plain, model):
        one.twice = [Twice(block) for block in one.blocks]
        one.forward = lambda inputs, one=one: sum(twice(inputs).sum() for twice in one.twice)
    expected = torch.autograd.grad(plain(INPUTS), list(plain.blocks.parameters()))

    with checkpointed([model], CPU):
        found = torch.autograd.grad(model(INPUTS), list(model.blocks.parameters()))

    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


class Scaled(Block):
    """Fails where it is given other numbers, and is given some by name."""

    def forward(self, inputs, others, *, scale=None):
        return super().forward(inputs) * scale


class ChangesLater(Model):
    def forward(self, inputs):
        scale = torch.ones(N, 1)
        inside = self.blocks[0](self.first(inputs), None, scale=scale)
        with torch.no_grad():
            scale.mul_(2.0)
        return self.last(inside)


def test_what_a_block_was_given_by_name_and_is_changed_later_is_refused():
    model = ChangesLater(Scaled)
    with checkpointed([model], CPU):
        loss = model(INPUTS).sum()

        with pytest.raises(SavingRefusedError, match="is changed in place before the backward pass"):
            loss.backward()


class Steps(Block):
    """Keeps what no one else knows in an object of its own."""

    says = "too late"

    def begin(self):
        self.state = SimpleNamespace(calls=0)

    def factor(self, inside):
        self.state.calls += 1
        if self.state.calls > 1:
            raise RuntimeError(self.says)
        return 1.0


def test_block_that_fails_where_it_is_computed_again_is_named():
    model = Model(Steps)
    with checkpointed([model], CPU):
        loss = model(INPUTS).sum()

        with pytest.raises(SavingRefusedError, match=r"a Steps fails where it is computed again.*too late"):
            loss.backward()


@pytest.mark.parametrize(
    "says", ["CUDA error: device-side assert triggered", "CUDA out of memory. Tried to allocate 1.00 GiB."]
)
def test_error_of_the_device_stays_one_where_a_block_is_computed_again(says):
    model = Model(Steps)
    for block in model.blocks:
        block.says = says
    with checkpointed([model], CPU):
        loss = model(INPUTS).sum()

        with pytest.raises(RuntimeError, match=says):
            loss.backward()


class Refusing(dict):
    """A mapping that nobody may change, as configurations are."""

    def update(self, *given, **named):
        raise TypeError("frozen")

    clear = update


class Configured(Block):
    def begin(self):
        self.configuration = Refusing(scale=2.0)

    def factor(self, inside):
        return self.configuration["scale"]


def test_mappings_that_refuse_changes_are_left_alone():
    model = Model(Configured)
    with checkpointed([model], CPU):
        model(INPUTS).sum().backward()

    assert model.blocks[0].configuration == {"scale": 2.0}


class Dense(nn.Module):
    """Gives each block the results of all before it, in a list that grows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Joining(), Joining(), Joining()])
        self.double()

    def forward(self, inputs):
        results = [inputs]
        for block in self.blocks:
            results.append(block(results, {"all": results}))
        return torch.stack(results).sum(0)


class Joining(Block):
    def forward(self, results, named):
        return super().forward(torch.stack([*results, *named["all"]]).mean(0))


def test_lists_that_the_caller_adds_to_are_what_they_were():
    plain, model = Dense(), Dense()
    expected = torch.autograd.grad(plain(INPUTS).sum(), list(plain.parameters()))

    with checkpointed([model], CPU):
        found = torch.autograd.grad(model(INPUTS).sum(), list(model.parameters()))

    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


class Decaying(Block):
    """Changes a parameter in forward()."""

    def factor(self, inside):
        with torch.no_grad():
            self.two.bias.mul_(0.9)
        return 1.0


class Codebook(Block):
    def begin(self):
        self.register_buffer("codes", torch.zeros(1024, 72))

    def factor(self, inside):
        self.codes[0] += 1.0
        return self.codes[0, 0].clone()


class Nested(Block):
    def begin(self):
        self.calls = {"inner": [0]}

    def factor(self, inside):
        self.calls["inner"][0] += 1
        return float(self.calls["inner"][0])


@pytest.mark.parametrize("block", [Codebook, Nested, Decaying])
def test_changes_that_cannot_be_put_back_are_refused(block):
    model = Model(block)
    with checkpointed([model], CPU), pytest.raises(SavingRefusedError, match=f"a {block.__name__} changes"):
        model(INPUTS)


def test_parameters_that_are_put_in_for_one_call_are_refused():
    model = Model(Block)
    others = {name: 3 * parameter.detach() for name, parameter in model.named_parameters()}
    with checkpointed([model], CPU):
        loss = torch.func.functional_call(model, others, (INPUTS.clone().requires_grad_(),)).sum()

        with pytest.raises(SavingRefusedError, match="other parameters in the backward pass"):
            loss.backward()


def penalized(model, batch):
    """Its gradient by the inputs is part of the loss, so that blocks are computed a second time."""
    inputs = batch[0].clone().requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return functional.mse_loss(outputs, batch[1]) + slope.square().sum(1).mean()


@pytest.mark.parametrize("block", [Block, Counter, Parents])
def test_blocks_are_computed_again_as_often_as_a_gradient_is_asked_for(block):
    batch = INPUTS, torch.ones(N, 1, dtype=torch.float64)
    plain, model = Model(block), Model(block)
    expected = torch.autograd.grad(penalized(plain, batch), list(plain.parameters()))

    with checkpointed([model], CPU):
        found = torch.autograd.grad(penalized(model, batch), list(model.parameters()))

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Aside(Block):
    """Keeps a result of each step."""

    def begin(self):
        self.kept = None

    def factor(self, inside):
        self.kept = inside.square().mean(1)
        return 1.0


def test_results_that_a_block_keeps_are_those_of_the_graph_and_hold_no_earlier_one():
    plain, model = Model(Aside), Model(Aside)

    def step(model):
        loss = model(INPUTS).mean() + sum(block.kept.mean() for block in model.blocks)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        kept = [block.kept.detach().clone() for block in model.blocks]
        for block in model.blocks:
            block.kept = None
        return gradients, kept

    expected = step(plain)
    with checkpointed([model], CPU):
        found = step(model)
        before = live_tensors()
        again = step(model)

    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    torch.testing.assert_close(again, expected, rtol=0.0, atol=0.0)
    del again
    assert live_tensors() <= before


def test_fit_ends_as_without_where_blocks_hold_state():
    data = [(INPUTS, torch.ones(N, 1, dtype=torch.float64))] * 3
    plain, model = Model(Normalized), Model(Normalized)
    options = {"loss": nn.MSELoss(), "device": "cpu", "cache": False, "progress": False, "micro_batch": 2}

    autoaccum.fit(plain, data, N, **options)
    autoaccum.fit(model, data, N, memory="checkpoint", **options)

    assert_bitwise(model.state_dict(), plain.state_dict())
