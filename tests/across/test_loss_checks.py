"""What checks of losses cost, and what they and other passes leave behind."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autoaccum
from support.faults.modes import differences, state_of

SAMPLES = 12


def linear():
    torch.manual_seed(1)
    return nn.Linear(6, 4).double()


def batches(windows):
    """Batches of inputs, classes and a mask."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(windows):
        inputs = torch.randn(SAMPLES, 6, generator=generator).double()
        classes = torch.randint(0, 4, (SAMPLES,), generator=generator)
        mask = (torch.rand(SAMPLES, generator=generator) < 0.5).double()
        mask[5] = 1.0
        yield {"inputs": inputs, "classes": classes, "mask": mask}


def of_inputs(model, batch):
    return model(batch["inputs"])


@pytest.mark.parametrize("kind", ["divided by 1", "no gradient"])
@pytest.mark.filterwarnings("ignore::autoaccum.errors.LossWarning")
def test_loss_that_no_check_confirms_costs_checks_in_the_first_windows_alone(kind):
    passes, model, counts = [], linear(), []

    def loss(outputs, batch):
        passes.append(len(outputs))
        return outputs.sum() / 1 if kind == "divided by 1" else (outputs - outputs.detach().abs() - 1).relu().mean()

    accumulator = autoaccum.Accumulator(model, loss=loss, forward=of_inputs, micro_batch=4, device="cpu")
    for batch in batches(13):
        passes.clear()
        accumulator.backward(batch)
        counts.append(len(passes))
        model.zero_grad()

    assert counts[-1] == counts[4] == SAMPLES // 4


def test_loss_is_checked_again_where_memory_ran_out_before_something_counted():
    lacks, model = [], linear()

    def loss(outputs, batch):
        if lacks and len(outputs) > 8:
            raise torch.OutOfMemoryError(lacks.pop())
        return (outputs.square().mean(1) * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)

    accumulator = autoaccum.Accumulator(model, loss=loss, forward=of_inputs, micro_batch=16, device="cpu")
    for number in range(3):
        batch = {"inputs": torch.randn(40, 6).double(), "mask": torch.full((40,), float(number == 2)).double()}
        lacks += ["CUDA out of memory."] * (number == 1)
        model.zero_grad()
        accumulator.backward(batch)

    assert not lacks
    found = model.weight.grad
    model.zero_grad()
    loss(model(batch["inputs"]), batch).backward()
    torch.testing.assert_close(found, model.weight.grad)


def test_window_of_a_loss_that_is_there_in_some_passes_alone_ends():
    calls = []

    def loss(outputs, batch):
        calls.append(None)
        found = {"a": (outputs.square().sum(), outputs.numel()), "b": (outputs.abs().sum(), len(outputs))}
        return found if torch.is_grad_enabled() else {"a": found["a"]}

    accumulator = autoaccum.Accumulator(linear(), loss=loss, forward=of_inputs, micro_batch=4, device="cpu")
    with contextlib.suppress(autoaccum.InvalidInputError):
        accumulator.backward(*batches(1))

    assert len(calls) < 30


def test_check_leaves_gradients_of_what_is_no_parameter_alone():
    model, delta = linear(), torch.zeros(6, dtype=torch.float64, requires_grad=True)
    (batch,) = batches(1)

    def forward(model, batch):
        return checkpoint(model, batch["inputs"] + delta, use_reentrant=True)

    def loss(outputs, batch):
        return functional.cross_entropy(outputs, batch["classes"])

    (expected,) = torch.autograd.grad(loss(model(batch["inputs"] + delta), batch), delta)
    autoaccum.Accumulator(model, loss=loss, forward=forward, device="cpu", micro_batch=4).backward(batch)

    torch.testing.assert_close(delta.grad, expected)


class Resizes(nn.Module):
    """Resizes a buffer to its input in each pass, so that putting it back takes memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("offset", torch.zeros(6, 4))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, inputs):
        self.passes += 1
        self.offset.resize_(inputs.shape).fill_(0.5)
        return self.layer(functional.dropout(inputs + self.offset, 0.5, self.training))


class NoRoomFor(TorchDispatchMode):
    """Runs out of memory when a tensor is resized for the n-th time."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if str(operator).startswith("aten.resize_"):
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return operator(*args, **(kwargs or {}))


def resizing(loss, precision, sizes=(6, 6)):
    model = Resizes()
    plan, batch = autoaccum.Plan(SAMPLES, sizes), (torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 3)
    return autoaccum.Runner(model, None, plan, loss=loss, device="cpu", precision=precision), model, batch


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), functional.cross_entropy], ids=["of torch", "function"])
def test_memory_that_runs_out_while_the_state_before_a_check_is_put_back_changes_nothing_but_the_cut(loss, precision):
    def stepped(number, sizes=(6, 6)):
        runner, model, batch = resizing(loss, precision, sizes)
        with NoRoomFor(number) as fault:
            report = runner.step(batch)
        return fault.left <= 0, report.micro_batches, state_of(model, runner.optimizer)

    number, has_failed = 0, True
    while has_failed:
        number += 1
        has_failed, cut, state = stepped(number)
        assert differences(state, stepped(0, cut)[2]) == [], number
    assert number > 5


def test_memory_that_runs_out_while_the_state_before_a_check_in_an_evaluation_is_put_back_counts_no_pass_twice():
    def own(outputs, targets):
        return functional.cross_entropy(outputs, targets)

    def evaluated(number):
        runner, model, batch = resizing(own, "fp32")
        sizes = []
        model.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
        with NoRoomFor(number) as fault:
            runner.evaluate([batch])
        return fault.left <= 0, sizes[-2:], int(model.passes)

    number, has_failed = 0, True
    while has_failed:
        number += 1
        has_failed, sizes, passes = evaluated(number)
        assert passes == (2 if sizes == [6, 6] else 3), number
    assert number > 5


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), lambda outputs, y: 2 * functional.cross_entropy(outputs, y)])
def test_check_runs_no_more_samples_than_a_wrapper_allows_as_more_have_been_killed(monkeypatch, loss):
    monkeypatch.setenv("AUTOACCUM_MAX_MICRO_BATCH", "3")
    model, sizes = nn.Linear(4, 2), []
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))

    autoaccum.fit(model, [(torch.randn(16, 4), torch.randint(2, (16,)))], 16, loss=loss, device="cpu", progress=False)

    assert max(sizes) == 3


# --- samples in which few pairs count -------------------------------------------------------------------------------


def distances(outputs):
    return (2.0 - 2.0 * functional.normalize(outputs) @ functional.normalize(outputs).T).clamp(min=1e-12).sqrt()


def hardest_triplets(outputs, classes):
    """Of each sample: 0 where its class has no other one."""
    apart, alike = distances(outputs), (classes[:, None] == classes).double()
    return (0.2 + (apart * alike).amax(1) - (apart + 10.0 * alike).amin(1)).relu().mean()


def supervised_contrast(outputs, classes):
    own = torch.eye(len(classes), dtype=torch.bool)
    alike = (classes[:, None] == classes) & ~own
    logits = (-distances(outputs)).masked_fill(own, -1e9)
    return -((logits.log_softmax(1) * alike).sum(1) / alike.sum(1).clamp(min=1)).mean()


@pytest.mark.parametrize("of_class", [2, 4])
@pytest.mark.parametrize("beside", [0.0, 1.0])
@pytest.mark.parametrize("loss", [hardest_triplets, supervised_contrast])
def test_loss_of_pairs_of_a_class_is_refused_though_few_samples_hold_a_pair(loss, beside, of_class):
    torch.manual_seed(of_class)
    classes = torch.arange(32) // of_class
    inputs = torch.randn(32, 6).double()[classes] + torch.randn(32, 6)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def both(outputs, classes):
        return loss(outputs, classes) + (beside * outputs.square().mean() if beside else 0.0)

    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(32, 8), loss=both, device="cpu", precision="fp32")

    with pytest.raises(autoaccum.InvalidInputError, match="its sums over parts of a batch do not add up"):
        runner.step((inputs, classes))


# --- what is said of the number that is reported ----------------------------------------------------------------------


def masked_sum(outputs, batch):
    return (outputs.square().mean(1) * batch["mask"]).sum()


UNLIKE = {
    "two means": lambda o, b: masked_sum(o, b) / b["mask"].sum() + o.square().mean(),
    "a mean and a sum": lambda o, b: masked_sum(o, b) / b["mask"].sum() + 0.01 * o.square().sum(),
    "a mean over some and a penalty": lambda o, b: masked_sum(o, b) / b["mask"].sum() + b["model"].weight.abs().sum(),
    "a sum and a penalty": lambda o, b: o.square().sum() + 0.1 * b["model"].weight.abs().sum(),
}
ALIKE = {
    "a mean": lambda o, b: o.square().mean(),
    "a mean and a penalty": lambda o, b: o.square().mean() + b["model"].weight.abs().sum(),
    "two means over the same": lambda o, b: o.square().mean() + o.abs().mean(),
    "by name": lambda o, b: {"one": masked_sum(o, b) / b["mask"].sum(), "other": o.square().mean()},
}


@pytest.mark.parametrize("loss", [*UNLIKE.values(), *ALIKE.values()], ids=[*UNLIKE, *ALIKE])
def test_number_of_terms_with_unlike_divisors_is_said_to_be_approximate(loss, caplog):
    model = linear()

    def with_model(outputs, batch):
        return loss(outputs, batch | {"model": model})

    accumulator = autoaccum.Accumulator(model, loss=with_model, forward=of_inputs, micro_batch=4, device="cpu")
    with caplog.at_level("INFO", logger="autoaccum"):
        accumulator.backward(*batches(1))

    said = [one for one in caplog.messages if "the number that is reported is approximate" in one]
    assert len(said) == (loss in UNLIKE.values())
