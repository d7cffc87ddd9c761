"""The gradient of a window as torch computes it from the full batch at once, and as a runner does in any cut."""

import copy

import torch
from hypothesis import strategies as st

import autoaccum


def whole_loss(model, loss, batch, forward=None):
    """The loss over a whole batch, by its definition and without autoaccum."""
    if isinstance(loss, list):
        return sum(one(model, batch) for one in loss)
    pair = isinstance(batch, tuple)
    outputs = model(batch[0]) if pair else forward(model, batch)
    raw = loss(outputs, batch[1] if pair else batch)
    return sum(map(reduced, raw.values())) if isinstance(raw, dict) else reduced(raw)


def reduced(raw):
    if isinstance(raw, tuple):
        return raw[0].sum() / raw[1]
    return raw.mean()


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


def assert_as_exact_as_full_batch(model, loss, window, sizes, **options):
    """Check that a float64 model's float32 copy gets a gradient as near to float64's as its full batch is.

    No further than twice that, or 1e-6. A loss that holds tensors is given twice: for float64 and for float32.
    """
    exactly, narrowly = loss if isinstance(loss, tuple) else (loss, loss)
    exact, _ = full_batch_gradient(model, exactly, window)
    single = copy.deepcopy(model).float()
    narrowed = in_single(window)
    whole, _ = full_batch_gradient(single, narrowly, narrowed)
    found, _ = cut_gradient(single, narrowly, narrowed, sizes, **options)
    assert distance(found, exact) <= max(2 * distance(whole, exact), 1e-6)


def in_single(batch):
    if isinstance(batch, dict):
        return {name: in_single(value) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(map(in_single, batch))
    return batch.float() if isinstance(batch, torch.Tensor) and batch.is_floating_point() else batch


@st.composite
def cuts(draw, samples):
    """The sizes of the micro-batches of a window: any cut at all."""
    stops = sorted(draw(st.sets(st.integers(1, samples - 1)))) if samples > 1 else []
    return tuple(stop - start for start, stop in zip([0, *stops], [*stops, samples], strict=True))
