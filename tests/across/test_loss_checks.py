"""Losses whose form a few samples hardly show, and passes that leave more than gradients: exact, or refused."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autoaccum
from support.faults.modes import differences, state_of
from support.losses.forms import Form
from support.losses.outcomes import by_runner, outcome

SAMPLES = 12


def linear():
    torch.manual_seed(1)
    return nn.Linear(6, 4).double()


def batches(windows, counted=0.5, seed=0):
    """Batches of inputs, classes and a mask; some classes are ignored."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(windows):
        inputs = torch.randn(SAMPLES, 6, generator=generator).double()
        classes = torch.randint(0, 4, (SAMPLES,), generator=generator)
        mask = (torch.rand(SAMPLES, generator=generator) < counted).double()
        mask[5] = 1.0
        yield {"inputs": inputs, "classes": classes, "mask": mask}


def trained(model, given, loss, forward, optimizer, *, parts):
    """The model after a step for each batch: by Runner in parts, or by a plain loop."""
    model = copy.deepcopy(model)
    optimizer = optimizer(model.parameters())
    plan = autoaccum.Plan(SAMPLES, (SAMPLES // parts,) * parts)
    if parts > 1:
        runner = autoaccum.Runner(model, optimizer, plan, loss=loss, forward=forward, device="cpu", precision="fp32")
    for batch in copy.deepcopy(given):
        if parts > 1:
            runner.step(batch)
            continue
        optimizer.zero_grad()
        loss(forward(model, batch), batch).backward()
        optimizer.step()
    return model


def assert_exact(model, given, loss, *, forward=lambda model, batch: model(batch["inputs"]), optimizer=None):
    optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    found, expected = (trained(model, given, loss, forward, optimizer, parts=parts) for parts in (3, 1))
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_pair_that_counts_by_samples_what_compares_them_is_warned_of_beside_another_loss():
    def loss(outputs, batch):
        spread = (outputs - outputs.mean(0)).square().mean()
        return {"mean": outputs.abs().mean(), "spread": (spread * len(outputs), len(outputs))}

    with pytest.warns(autoaccum.LossWarning, match="'spread' gives samples other losses together .* as its pair says"):
        trained(linear(), [*batches(2)], loss, lambda model, batch: model(batch["inputs"]), torch.optim.SGD, parts=3)


# --- learned weights --------------------------------------------------------------------------------------------------


class Weighted(nn.Linear):
    """Outputs of 4 numbers, and a weight of the loss that is learned."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(6, 4, dtype=torch.float64)
        self.log = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))


def of_weight(model, batch):
    return model(batch["inputs"]), model.log


def masked_sum(outputs, batch):
    return (outputs.square().mean(1) * batch["mask"]).sum()


LEARNED = {
    "before the division": lambda o, b: torch.exp(-o[1]) * masked_sum(o[0], b) / b["mask"].sum() + o[1],
    "after it": lambda o, b: torch.exp(-o[1]) * (masked_sum(o[0], b) / b["mask"].sum()) + o[1],
    "as a divisor": lambda o, b: masked_sum(o[0], b) / (2 * o[1] ** 2) / b["mask"].sum(),
    "clamped": lambda o, b: o[1] * masked_sum(o[0], b) / b["mask"].sum().clamp(min=1),
    "beside a mean": lambda o, b: o[1] * masked_sum(o[0], b) / b["mask"].sum() + torch.exp(-o[1]) * o[0].abs().mean(),
}


@pytest.mark.parametrize("full", [0, 2])
@pytest.mark.parametrize("loss", LEARNED.values(), ids=LEARNED)
def test_learned_weight_of_a_masked_mean_is_exact(loss, full):
    given = [*batches(4)]
    for batch in given[:full]:  # the mask tells nothing at first
        batch["mask"] = torch.ones_like(batch["mask"])
    assert_exact(Weighted(), given, loss, forward=of_weight)


def test_divisor_that_cannot_be_read_is_compared_with_a_mask_that_tells_nothing_at_first():
    given = [*batches(6)]
    for batch in given[:4]:
        batch["mask"] = torch.ones_like(batch["mask"])
    with pytest.raises(autoaccum.InvalidInputError, match=r"neither a mean nor a sum|cannot be read"):
        assert_exact(
            Weighted(), given, lambda o, b: masked_sum(o[0], b) / (b["mask"].sum() * 2 * o[1]), forward=of_weight
        )


# --- sums, and what looks like one ------------------------------------------------------------------------------------

TASKS = torch.tensor([1.0, 0.5]).double()


def of_tasks(outputs, batch):
    """A sum of masked means; its graph ends like that of a sum over samples."""
    mask = batch["mask"]
    each = outputs.square().mean(1), outputs.abs().mean(1)
    return (torch.stack([(one * mask).sum() / mask.sum().clamp(min=1) for one in each]) * TASKS).sum()


def with_noise(model, batch):
    outputs = model(batch["inputs"])
    return outputs + torch.randn_like(outputs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("counted", [0.2, 0.3])
def test_mean_is_no_sum_though_nothing_counts_in_one_part(counted, seed):
    with contextlib.suppress(autoaccum.InvalidInputError):
        assert_exact(linear(), [*batches(3, counted, seed)], of_tasks)


@pytest.mark.parametrize("divisor", [16, 16.0, torch.tensor(16.0).double()], ids=["int", "float", "tensor"])
def test_sum_divided_by_a_constant_is_a_sum_though_one_sample_alone_counts_at_first(divisor):
    given = [*batches(3)]
    given[0]["mask"] = (torch.arange(SAMPLES) == 5).double()

    with pytest.warns(autoaccum.errors.LossWarning, match="in none of the samples that were tried"):
        assert_exact(
            linear(), given, lambda outputs, batch: (outputs.square().mean(1) * batch["mask"]).sum(0) / divisor
        )


def test_what_looks_like_a_sum_is_taken_for_one_with_a_warning_though_few_samples_are_left_to_tell():
    given = [*batches(3)]
    given[0]["mask"] = (torch.arange(SAMPLES) < 7).double()

    with pytest.warns(autoaccum.errors.LossWarning, match="is divided by 1 in all micro-batches"):
        assert_exact(linear(), given, lambda outputs, batch: (outputs.square().mean(1) * batch["mask"]).sum(0) / 1)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("labelled", [1, 2, 11])
def test_loss_of_torch_tells_nothing_of_the_model_where_nothing_counts_in_a_part(reduction, labelled):
    given, loss = [*batches(2)], nn.CrossEntropyLoss(reduction=reduction)
    given[0]["classes"][labelled:] = -100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for micro_batch in (1, 4):
            pairs = [(batch["inputs"], batch["classes"]) for batch in given]
            autoaccum.fit(linear(), pairs, SAMPLES, loss=loss, micro_batch=micro_batch, device="cpu", progress=False)


def test_mean_is_no_sum_though_passes_are_random():
    with pytest.raises(autoaccum.InvalidInputError, match="neither a mean nor a sum"):
        trained(linear(), [*batches(1, 1.0)], of_tasks, with_noise, torch.optim.SGD, parts=3)


@pytest.mark.parametrize("reshaped", [lambda loss: loss.unsqueeze(0), lambda loss: loss.view(1, 1)])
def test_mean_of_a_mean_is_a_mean(reshaped):
    def loss(outputs, _):
        return reshaped(outputs.square().mean()).mean()

    assert_exact(linear(), [*batches(2)], loss)
    trained(linear(), [*batches(1, 1.0)], loss, with_noise, torch.optim.SGD, parts=3)  # which a check cannot compare


@pytest.mark.parametrize("seed", range(5))
def test_sum_is_a_sum_though_passes_are_random(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 4)).double()

    def loss(outputs, batch):
        return (functional.log_softmax(outputs, 1).gather(1, batch["classes"][:, None]) * -1.0).sum()

    def forward(model, batch):
        return model(batch["inputs"])

    trained(model, [*batches(3, seed=seed)], loss, forward, torch.optim.SGD, parts=3)


def test_loss_that_no_sample_changed_at_first_is_looked_at_when_it_changes():
    given = [*batches(8)]
    for number, batch in enumerate(given):
        batch["classes"][batch["mask"] == 0] = -100
        batch["from"] = torch.full((SAMPLES,), float(number >= 4))

    def loss(outputs, batch):
        penalty = 0.1 * outputs[1].square().sum()
        return functional.cross_entropy(outputs[0], batch["classes"]) if batch["from"][0] else penalty

    assert_exact(linear(), given, loss, forward=lambda model, batch: (model(batch["inputs"]), model.weight))


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


@pytest.mark.parametrize("root", [torch.sqrt, lambda loss: loss.pow(0.5), lambda loss: loss.log()])
def test_root_of_a_mean_is_refused_each_time_though_parts_are_nearly_alike(root):
    refused = 0
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
        runner = autoaccum.Runner(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            autoaccum.plan(12, 4),
            loss=lambda outputs, targets: root((outputs - targets).square().mean()),
            device="cpu",
            precision="fp32",
        )
        for _ in range(3):
            with pytest.raises(autoaccum.InvalidInputError, match="its sums over parts of a batch do not add up"):
                runner.step((torch.randn(12, 4), torch.randn(12, 3)))
            refused += 1
    assert refused == 30


# --- what counts is rare ----------------------------------------------------------------------------------------------


def rare(windows, seed, *, labelled=0.1, ignored=-100, samples=64):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(windows):
        inputs = torch.randn(samples, 6, generator=generator).double()
        is_ignored = torch.rand(samples, generator=generator) >= labelled
        yield inputs, torch.randint(0, 4, (samples,), generator=generator).masked_fill(is_ignored, ignored)


def guarded(outputs, targets):
    there = targets >= 0
    return functional.cross_entropy(outputs[there], targets[there]) if there.any() else outputs.sum() * 0


def masked(outputs, targets):
    mask = (targets >= 0).double()
    each = functional.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1)


def not_quite_0(outputs, targets):
    mask = (targets >= 0).double()
    each = functional.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (each * mask).sum() / (mask.sum() + 1e-8)


def penalised(outputs, targets):
    return functional.cross_entropy(outputs, targets) + 0.1 * outputs.square().mean()


def focal(outputs, targets):
    """As RetinaNet's: a sum over everything, divided by the number of positives."""
    classes = functional.one_hot(targets.clamp(min=0), 4).double() * (targets >= 0)[:, None]
    positives = int((targets >= 0).sum())
    return functional.binary_cross_entropy_with_logits(outputs, classes, reduction="sum") / max(1, positives)


def wrong_windows(loss, given):
    """How many gradients of an Accumulator are not those of the whole batch; what it has warned of, or refused."""
    model, wrong = linear(), 0
    accumulator = autoaccum.Accumulator(model, loss=loss, micro_batch=16, device="cpu", precision="fp32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inputs, targets in given:
            optimizer.zero_grad()
            expected = torch.autograd.grad(loss(model(inputs), targets), list(model.parameters()))
            try:
                accumulator.backward((inputs, targets))
            except autoaccum.InvalidInputError as error:
                return wrong, str(error)
            found = [parameter.grad for parameter in model.parameters()]
            wrong += not all(torch.allclose(one, its, rtol=1e-7) for one, its in zip(found, expected, strict=True))
            optimizer.step()
    return wrong, " ".join(str(one.message) for one in caught)


@pytest.mark.parametrize("loss", [guarded, masked, not_quite_0, penalised])
@pytest.mark.parametrize("seed", range(4))
def test_means_over_few_labels_are_exact(loss, seed):
    assert wrong_windows(loss, rare(8, seed))[0] == 0


@pytest.mark.parametrize("seed", range(6))
def test_sum_that_was_divided_by_1_when_it_was_checked_is_never_silently_wrong(seed):
    wrong, said = wrong_windows(focal, rare(8, seed, labelled=0.05))

    assert not wrong or "max(1, n)" in said


def test_loss_that_cannot_be_read_is_checked_anew_where_counts_begin_to_differ():
    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, outputs, targets):
            with torch.enable_grad():
                leaf = outputs.detach().requires_grad_()
                loss = functional.cross_entropy(leaf, targets)
            (ctx.gradient,) = torch.autograd.grad(loss, leaf)
            return loss.detach()

        @staticmethod
        def backward(ctx, gradient):
            return ctx.gradient * gradient, None

    assert wrong_windows(CrossEntropy.apply, [*rare(5, 0, labelled=1.0), *rare(5, 1, labelled=0.5)]) == (0, "")


def test_terms_in_which_nothing_counts_end_no_training():
    given = [*batches(8)]
    for batch in given[3:]:
        batch["classes"][:4] = -100

    def loss(outputs, batch):
        return outputs.square().sum() + 0.0 * functional.cross_entropy(outputs, batch["classes"])

    with contextlib.suppress(autoaccum.InvalidInputError):
        trained(linear(), given, loss, lambda model, batch: model(batch["inputs"]), torch.optim.SGD, parts=3)


def if_any(outputs, targets):
    return functional.cross_entropy(outputs, targets) if (targets != -100).any() else 0.0 * outputs.sum()


def of_at_least_one(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="sum") / (targets != -100).sum().clamp(min=1)


@pytest.mark.parametrize("loss", [if_any, of_at_least_one])
@pytest.mark.parametrize("micro_batch", [8, 3])
def test_window_in_which_nothing_counts_has_a_gradient_of_zeros_where_its_loss_exists(loss, micro_batch):
    model = nn.Linear(6, 4).double()
    accumulator = autoaccum.Accumulator(model, loss=loss, micro_batch=micro_batch, device="cpu")
    for number in range(8):
        inputs, targets = torch.randn(8, 6).double(), torch.randint(4, (8,))
        targets[: 8 if number in (3, 6) else number] = -100
        report = accumulator.backward((inputs, targets))
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        expected = loss(model(inputs), targets)
        expected.backward()
        torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
        assert report.loss == pytest.approx(expected.item(), rel=1e-12)
        model.zero_grad()


def test_named_loss_in_which_nothing_counts_goes_by_where_it_exists():
    given = [*batches(6)]
    for number, batch in enumerate(given):
        batch["rare"] = batch["mask"] * float(number % 3 != 1)

    def loss(outputs, batch):
        rare = (outputs.abs().mean(1) * batch["rare"]).sum() / batch["rare"].sum().clamp(min=1)
        return {"all": outputs.square().mean(), "rare": rare}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it is divided by is more than what counts there
        model, weights = linear(), []
        runner = autoaccum.Runner(
            model, torch.optim.SGD(model.parameters(), lr=0.1), autoaccum.plan(SAMPLES, 4), loss=loss,
            forward=lambda model, batch: model(batch["inputs"]), device="cpu", precision="fp32",
        )  # fmt: skip
        for batch in copy.deepcopy(given):
            runner.step(batch)
            weights.append(model.weight.detach().clone())
    expected = linear()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for batch, found in zip(given, weights, strict=True):
        optimizer.zero_grad()
        sum(loss(expected(batch["inputs"]), batch).values()).backward()
        optimizer.step()
        torch.testing.assert_close(found, expected.weight.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["divided by 1", "no gradient"])
@pytest.mark.filterwarnings("ignore::autoaccum.errors.LossWarning")
def test_loss_that_no_check_confirms_costs_checks_in_the_first_windows_alone(kind):
    passes = []

    def loss(outputs, batch):
        passes.append(len(outputs))
        return outputs.sum() / 1 if kind == "divided by 1" else (outputs - outputs.detach().abs() - 1).relu().mean()

    model = linear()
    accumulator = autoaccum.Accumulator(
        model, loss=loss, forward=lambda model, batch: model(batch["inputs"]), micro_batch=4, device="cpu"
    )
    counts = []
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

    accumulator = autoaccum.Accumulator(
        model, loss=loss, forward=lambda model, batch: model(batch["inputs"]), micro_batch=16, device="cpu"
    )
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


# --- what passes leave behind -----------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two layers, each for a part of the samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()

    def forward(self, inputs, route):
        outputs = inputs.new_zeros(len(inputs), 4)
        for number, expert in enumerate((self.first, self.second)):
            rows = (route == number).nonzero()[:, 0]
            if len(rows):
                outputs = outputs.index_copy(0, rows, expert(inputs[rows]))
        return outputs


def test_parameters_that_only_ignored_samples_reach_have_zeros_for_a_gradient():
    given = [*batches(4)]
    for number, batch in enumerate(given):
        batch["route"] = torch.tensor([0] * 8 + [1] * 4)
        batch["classes"][8:] = -100 if number else batch["classes"][8:]

    assert_exact(
        Experts(),
        given,
        lambda outputs, batch: functional.cross_entropy(outputs, batch["classes"]),
        forward=lambda model, batch: model(batch["inputs"], batch["route"]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    )


@pytest.mark.parametrize("samples", [2, 3])
def test_pass_that_changes_its_input_does_so_once(samples):
    def forward(model, batch):
        return model(batch[0].mul_(2.0))

    inputs, classes = torch.randn(samples, 6).double(), torch.arange(samples)
    model, expected = linear(), linear()
    functional.cross_entropy(expected(2.0 * inputs), classes).backward()
    accumulator = autoaccum.Accumulator(
        model, loss=functional.cross_entropy, forward=forward, device="cpu", micro_batch=1
    )
    accumulator.backward((inputs.clone(), classes))

    torch.testing.assert_close(model.weight.grad, expected.weight.grad)


class Begins(nn.Module):
    """Sets a buffer in the first pass, which a flag says is done."""

    def __init__(self):
        super().__init__()
        self.layer, self.is_ready = linear(), False
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, inputs):
        if not self.is_ready:
            self.scale.fill_(0.5)
            self.is_ready = True
        return self.layer(inputs) * self.scale


def test_pass_for_the_weights_of_pairs_leaves_flags_as_they_were():
    model, (batch, *_) = Begins(), [*batches(1)]

    def loss(outputs, batch):
        ones = torch.tensor(float(len(outputs)))
        return {"one": (outputs.sum(), ones), "other": (outputs.square().sum(), ones)}

    accumulator = autoaccum.Accumulator(
        model, loss=loss, forward=lambda model, batch: model(batch["inputs"]), device="cpu", micro_batch=4
    )
    accumulator.backward(batch)

    assert float(model.scale) == 0.5


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


# --- what is said of the number that is reported ----------------------------------------------------------------------


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
    runner = autoaccum.Runner(
        model, torch.optim.SGD(model.parameters(), lr=0.1), autoaccum.plan(SAMPLES, 4),
        loss=lambda outputs, batch: loss(outputs, batch | {"model": model}),
        forward=lambda model, batch: model(batch["inputs"]), device="cpu", precision="fp32",
    )  # fmt: skip
    with caplog.at_level("INFO", logger="autoaccum"):
        runner.step(next(iter(batches(1))))

    said = [one for one in caplog.messages if "the number that is reported is approximate" in one]
    assert len(said) == (loss in UNLIKE.values())


# --- losses that compare samples, which the first check cannot see ----------------------------------------------------


@pytest.mark.parametrize("cut", [(5, 1, 4, 2), (3,) * 4])
def test_mean_up_to_the_longest_of_its_micro_batch_is_told_once_lengths_differ(cut):
    """Once none of the counts that explained its divisor does, samples are tried whose divisors are unlike."""

    def loss(o, b):
        until = int(b["kept"].sum(1).max().clamp(min=1))
        return (o.square().mean(1, keepdim=True) * b["kept"])[:, :until].mean()

    found = set()
    for seed in range(8):
        windows = []
        for number in range(4):
            chance = torch.Generator().manual_seed(1000 * seed + number)
            kept = torch.rand(12, 5, generator=chance) < (1.0 if number < 2 else 0.15)
            windows.append({"x": torch.randn(12, 6, generator=chance, dtype=torch.float64), "kept": kept.double()})
        form = Form(loss, model=linear, cut=cut, lr=0.01, tolerance=1e-8)
        found.add(outcome(form, by_runner, windows))

    assert found <= {"exact", "warned", "stopped"}


class OverTime(nn.Module):
    """A layer that takes the first dimension for time, and a loss over classes behind it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.double()
        self.head = nn.Linear(4, 3).double()

    def forward(self, inputs):
        hidden = self.layer(inputs)
        return self.head(hidden[0] if isinstance(hidden, tuple) else hidden).movedim(-1, 1)


@pytest.mark.parametrize("layer", [nn.GRU(4, 4), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)])
def test_module_that_takes_samples_for_time_steps_compares_samples(layer):
    batch = torch.randn(8, 5, 4).double(), torch.randint(3, (8, 5))
    options = {"micro_batch": 2, "device": "cpu", "progress": False}
    with pytest.warns(autoaccum.LossWarning, match="depend on the others of its micro-batch"):
        autoaccum.fit(OverTime(layer), [batch], 8, loss=nn.CrossEntropyLoss(), **options)
    with pytest.raises(autoaccum.InvalidInputError, match="neither a mean nor a sum"):
        autoaccum.fit(OverTime(layer), [batch], 8, loss=lambda *pair: 2 * functional.cross_entropy(*pair), **options)
