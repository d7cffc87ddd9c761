"""The gradient of a batch is added to `.grad` once, whatever micro-batches it took and whatever failed in between."""

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._engine.accumulator import Accumulator
from autoaccum._engine.events import Events
from autoaccum._engine.forward_backward import assemble_without_optimizer
from autoaccum._sizing.sizing import Cutting, Sizing, SizingOptions
from autoaccum._system.notices import Notices

SAMPLES, CLASSES = 12, 3


class Failing(nn.Module):
    """Lacks memory where more samples come at once than `most`."""

    def __init__(self, most=None):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, CLASSES)).double()
        self.most = most
        self.body[1].eval()

    def forward(self, inputs):
        if self.most is not None and len(inputs) > self.most:
            raise torch.OutOfMemoryError("told to")
        return self.body(inputs)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    targets[:4] = -100  # so that micro-batches weigh differently
    return torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64), targets


def accumulator_of(model, micro_batch, loss=None):
    notices, events = Notices(silent=True), Events()
    step = assemble_without_optimizer(
        model,
        loss or nn.CrossEntropyLoss(),
        memory=autoaccum.Simulated("1GiB"),
        precision_name="fp32",
        forward=None,
        loss_reduction=None,
        notices=notices,
    )
    cutting = Cutting.of(autoaccum.plan(SAMPLES, micro_batch))
    return Accumulator(
        step, Sizing(step.memory, lambda: step.parameters, cutting, SizingOptions(), events), events, notices
    )


def expected(*batches):
    """Gradients of plain backward passes, one after the other, without dropout."""
    model = Failing()
    model.body[2].p = 0.0
    for inputs, targets in batches:
        nn.functional.cross_entropy(model(inputs), targets).backward()
    return [parameter.grad for parameter in model.parameters()]


def without_dropout(most=None):
    model = Failing(most)
    model.body[2].p = 0.0
    return model


@pytest.mark.parametrize("micro_batch", [12, 5, 1])
def test_gradient_of_a_batch_is_that_of_one_backward_pass(micro_batch):
    model = without_dropout()

    done = accumulator_of(model, micro_batch).backward(batch())

    torch.testing.assert_close([p.grad for p in model.parameters()], expected(batch()), rtol=1e-12, atol=1e-14)
    assert sum(done.micro_batches) == done.samples == SAMPLES


@pytest.mark.parametrize("most", [None, 4])
def test_two_batches_add_up_in_grad_as_two_backward_passes_do(most):
    model = without_dropout(most)
    accumulator = accumulator_of(model, 12)

    first, second = accumulator.backward(batch(0)), accumulator.backward(batch(1))

    torch.testing.assert_close(
        [p.grad for p in model.parameters()], expected(batch(0), batch(1)), rtol=1e-12, atol=1e-14
    )
    assert (first.oom_events > 0) == (most is not None)
    assert second.oom_events == 0


def test_gradients_that_were_there_are_bitwise_untouched_by_a_batch_that_fails():
    model = Failing(most=0)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number))
    before = [parameter.grad for parameter in model.parameters()]
    random = torch.get_rng_state()

    with pytest.raises(autoaccum.DoesNotFitError):
        accumulator_of(model, 12).backward(batch())

    assert all(now.grad is then for now, then in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_error_of_the_loss_leaves_everything_as_it_was():
    def fail(outputs, targets):
        raise LookupError("the user's own")

    model = Failing()
    state = {name: value.clone() for name, value in model.state_dict().items()}

    with pytest.raises(LookupError, match="the user's own"):
        accumulator_of(model, 5, fail).backward(batch())

    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_failures_do_not_change_a_bit_of_what_the_same_cut_gives_that_never_failed():
    failed, plain = Failing(most=4), Failing()
    torch.manual_seed(3)
    done = accumulator_of(failed, 6).backward(batch())
    torch.manual_seed(3)
    again = accumulator_of(plain, max(done.micro_batches)).backward(batch())

    assert done.oom_events == 1
    assert done.micro_batches == again.micro_batches
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(failed.parameters(), plain.parameters(), strict=True)
    )
