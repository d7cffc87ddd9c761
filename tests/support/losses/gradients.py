"""The gradient of a window as torch computes it from the full batch at once, and as a runner does in any cut."""

import copy

import torch
from hypothesis import strategies as st
from torch import nn

import autoaccum
from support.losses.outcomes import converted, total


def whole_loss(model, loss, batch, forward=None):
    """The loss over a whole batch, by its definition and without autoaccum."""
    if isinstance(loss, list):
        return sum(one(model, batch) for one in loss)
    is_pair = isinstance(batch, tuple)
    outputs = forward(model, batch) if forward else model(batch[0])
    return total(loss(outputs, batch[1] if is_pair else batch))


def full_batch_gradient(model, loss, batch, forward=None):
    """The gradient of all parameters, joined into one vector, and the loss."""
    model = copy.deepcopy(model)
    value = whole_loss(model, loss, batch, forward)
    value.backward()
    return joined(model), value.item()


def cut_gradient(model, loss, window, sizes, **options):
    """The gradient that the optimizer meets when a runner makes one step in this cut, and the step's report."""
    model, seen = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(joined(model)))
    runner = autoaccum.Runner(
        model,
        optimizer,
        autoaccum.Plan(sum(sizes), tuple(sizes)),
        loss=loss,
        **({"device": "cpu", "precision": "fp32"} | options),
    )
    report = runner.step(window)
    assert report.micro_batches == tuple(sizes)
    return seen[0], report


def joined(model):
    return torch.cat([(p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def distance(one, other):
    return float((one.double() - other).norm() / other.norm())


def assert_full_batch_gradient(model, loss, window, sizes, *, tolerance=1e-12, **options):
    """Check that a model in float64 gets the gradient and the loss of the full batch."""
    expected, expected_loss = full_batch_gradient(model, loss, window)
    found, report = cut_gradient(model, loss, window, sizes, **options)
    assert distance(found, expected) <= tolerance, distance(found, expected)
    assert abs(report.loss - expected_loss) <= tolerance * abs(expected_loss)


def assert_as_exact_as_full_batch(model, loss, window, sizes, forward=None):
    """Check that a float64 model's float32 copy gets a gradient as near to float64's as its full batch is.

    No further than twice that, or 1e-6.
    """
    exact, _ = full_batch_gradient(model, loss, window, forward)
    single, narrowed = copy.deepcopy(model).float(), converted(window, torch.float32)
    loss = copy.deepcopy(loss).float() if isinstance(loss, nn.Module) else loss
    whole, _ = full_batch_gradient(single, loss, narrowed, forward)
    found, _ = cut_gradient(single, loss, narrowed, sizes, forward=forward)
    assert distance(found, exact) <= max(2 * distance(whole, exact), 1e-6)


@st.composite
def cuts(draw, samples):
    """The sizes of the micro-batches of a window: any cut at all."""
    stops = sorted(draw(st.sets(st.integers(1, samples - 1)))) if samples > 1 else []
    return tuple(stop - start for start, stop in zip([0, *stops], [*stops, samples], strict=True))
