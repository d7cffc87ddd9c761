"""What a check on a few samples finds of models, and that it finds nothing where there is nothing."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from support.faults.modes import FailAt, differences, state_of
from support.models.small import runner_of


def doubts_of(report):
    """What is warned of, but for the buffer in which the model counts its passes."""
    return [text for text in report.warnings if not text.startswith("forward() moves calls")]


class Between(nn.Module):
    def __init__(self, mix, between=None, width=4):
        super().__init__()
        self.between = nn.Identity() if between is None else between
        self.linear, self.mix = nn.Linear(6, width), mix
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.calls += 1
        return self.linear(self.mix(self.between(inputs)))


def train(model, loss, batch, cut=(3, 3, 3, 3), **options):
    """Make a step of SGD in micro-batches; return how far it is from that of the whole batch, and the report."""
    names = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer, plan = torch.optim.SGD(model.parameters(), lr=1.0), autoaccum.Plan(sum(cut), cut)
    runner = autoaccum.Runner(model, optimizer, plan, loss=loss, device="cpu", precision="fp32", **options)
    report = runner.step(batch)
    found = {name: names[name] - parameter.detach() for name, parameter in model.named_parameters()}
    model.load_state_dict(state)
    model.zero_grad()
    outputs = options["forward"](model, batch) if "forward" in options else model(batch[0])
    whole = (loss or functional.mse_loss)(outputs, batch if "forward" in options else batch[1])
    whole.backward()
    return max(float((found[name] - one.grad).abs().max()) for name, one in model.named_parameters()), report


def pair():
    torch.manual_seed(1)
    return torch.randn(12, 6).double(), torch.randn(12, 4).double()


def info_nce(outputs, targets):
    return functional.cross_entropy(outputs @ targets.T, torch.arange(len(outputs)))


MIXES = {
    "mixup": lambda x: 0.5 * x + 0.5 * x.flip(0),
    "centred": lambda x: x - x.mean(0),
    "scaled": lambda x: x / x.std(0),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
}
TRUSTED = {"none": None, "function": functional.mse_loss, "module": nn.MSELoss(), "summed": nn.MSELoss(reduction="sum")}


COMPARED = "a sample depend on the others of its micro-batch"


@pytest.mark.parametrize("loss", TRUSTED)
@pytest.mark.parametrize("mix", MIXES)
def test_a_model_that_compares_samples_is_warned_of_also_with_a_loss_of_torch(mix, loss):
    with pytest.warns(autoaccum.LossWarning, match=COMPARED):
        _, report = train(Between(MIXES[mix]).double(), TRUSTED[loss], pair())

    assert any(COMPARED in text for text in report.warnings)


def test_a_hook_that_compares_samples_is_warned_of():
    model = Between(lambda x: x).double()
    model.linear.register_forward_hook(lambda _, __, outputs: outputs / outputs.norm(dim=0))

    with pytest.warns(autoaccum.LossWarning, match=COMPARED):
        train(model, nn.MSELoss(), pair())


def test_a_model_that_compares_samples_in_training_alone_is_warned_of_after_an_evaluation():
    model, batch = Between(lambda x: x).double(), pair()
    model.mix = lambda x: x - x.mean(0) if model.training else x
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(12, 3), device="cpu", precision="fp32")
    runner.evaluate([batch])

    with pytest.warns(autoaccum.LossWarning, match=COMPARED):
        runner.step(batch)


def test_a_model_that_takes_no_parts_of_a_check_is_trained_with_a_loss_of_torch():
    model = Between(lambda x: x.view(-1, 6, 6).flatten(0, 1)).double()

    distance, report = train(model, nn.MSELoss(), pair(), (6, 6))

    assert distance < 1e-12
    assert not doubts_of(report)


class OnlyFour(nn.Linear):
    def __init__(self):
        super().__init__(6, 4)

    def forward(self, inputs):
        return super().forward(inputs).view(4, 4)


def test_a_model_of_fixed_size_is_trained_in_it_with_a_loss_of_torch():
    model, (inputs, targets) = OnlyFour().double(), pair()
    weight, bias = model.weight.detach().clone().requires_grad_(), model.bias.detach().clone()
    functional.mse_loss(functional.linear(inputs, weight, bias), targets).backward()
    optimizer, plan = torch.optim.SGD(model.parameters(), lr=1.0), autoaccum.plan(12, 4)

    autoaccum.Runner(model, optimizer, plan, loss=nn.MSELoss()).step((inputs, targets))

    assert torch.allclose(model.weight, weight - weight.grad)


@pytest.mark.parametrize("stated", [{}, {"loss_reduction": "mean"}])
def test_a_check_that_a_model_of_fixed_size_refuses_says_how_to_train_it(stated):
    model, loss = OnlyFour().double(), lambda outputs, targets: (outputs - targets).square().mean()
    optimizer, plan = torch.optim.SGD(model.parameters(), lr=1.0), autoaccum.plan(12, 4)
    runner = autoaccum.Runner(model, optimizer, plan, loss=loss, **stated)

    if stated:
        assert runner.step(pair()).micro_batches == (4, 4, 4)
        return
    with pytest.raises(RuntimeError, match="shape") as caught:
        runner.step(pair())
    assert "loss_reduction='mean' or 'sum'" in caught.value.__notes__[0]
    assert "micro_batch=" in caught.value.__notes__[0]


@pytest.mark.parametrize("error", [AssertionError, ValueError, RuntimeError])
def test_error_of_a_closure_that_takes_even_sizes_names_the_size_and_the_remedies(error):
    model = nn.Linear(6, 4).double()

    def closure(batch):
        if len(batch[0]) % 2:
            raise error("the batch size should be even")
        return (model(batch[0]) - batch[1]).square().mean()

    accumulator = autoaccum.Accumulator(model, closure=closure, micro_batch=4)

    with pytest.raises(error, match="even") as caught:
        accumulator.backward((torch.randn(10, 6).double(), torch.randn(10, 4).double()))
    (note,) = caught.value.__notes__
    assert "in a micro-batch of 3 of the window's 10 samples" in note
    assert "split=" in note


def test_closure_of_a_namespace_without_a_name_is_trained():
    made = {"torch": torch}
    code = """
model = torch.nn.Linear(6, 4).double()
def noisy(inputs):
    return inputs + torch.randn_like(inputs)
def closure(batch):
    return (model(noisy(batch[0])) - batch[1]).square().mean()
"""
    exec(code, made)  # noqa: S102 - as configurations are run

    report = autoaccum.Accumulator(made["model"], closure=made["closure"], micro_batch=3).backward(pair())

    assert report.micro_batches == (3, 3, 3, 3)


def test_a_check_that_does_not_fit_is_left_out_with_a_loss_of_torch():
    class Full(Between):
        def forward(self, inputs):
            if 3 < len(inputs) < 12:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(inputs)

    distance, report = train(Full(lambda x: x).double(), nn.MSELoss(), pair())

    assert distance < 1e-12
    assert (report.oom_events, report.recomputed_samples) == (0, 0)
    assert report.micro_batches == (3, 3, 3, 3)


def test_a_check_in_which_memory_runs_out_anywhere_changes_nothing():
    def trained(point=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4)).double()
        runner = runner_of(model, samples=12, micro_batch=3, loss=nn.MSELoss(), precision="fp32")
        with FailAt(*[] if point is None else [point]) as fault:
            report = runner.step(pair())
        return fault.hits, report.oom_events, report.micro_batches, state_of(model, runner.optimizer)

    _, *expected = trained()
    told = []
    for point in range(20, 200, 4):
        hits, events, sizes, state = trained(point)
        assert hits == 1
        told.append(events)
        if not events:
            assert [events, sizes] == expected[:2]
            assert differences(state, expected[2]) == []
    assert 0 in told


@pytest.mark.parametrize("loss", [nn.MSELoss(), lambda outputs, targets: (outputs - targets).square().mean()])
def test_numbers_that_a_model_notes_in_attributes_are_those_of_its_micro_batches(loss):
    class Noting(nn.Linear):
        first, passes = None, 0

        def forward(self, inputs):
            self.first = len(inputs) if self.first is None else self.first
            self.passes += 1
            return super().forward(inputs)

    model = Noting(6, 4).double()

    runner_of(model, samples=12, micro_batch=3, loss=loss, precision="fp32").step(pair())

    assert (model.first, model.passes) == (3, 4)


@pytest.mark.parametrize("loss", [None, nn.MSELoss(), lambda outputs, targets: (outputs - targets).square().mean()])
@pytest.mark.parametrize(
    "between",
    [
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        nn.utils.spectral_norm(nn.Linear(6, 6)),
        nn.Dropout(0.3),
        nn.BatchNorm1d(6),
        nn.LayerNorm(6),
    ],
    ids=lambda one: type(one).__name__,
)
def test_layers_of_torch_are_trained(between, loss):
    _, report = train(Between(lambda x: x, between).double(), loss, pair())

    assert not any(COMPARED in text for text in report.warnings)


@pytest.mark.parametrize("loss", [None, lambda outputs, targets: (outputs - targets).square().mean()])
def test_random_augmentation_in_forward_is_trained(loss):
    _, report = train(Between(lambda x: x + torch.randn_like(x)).double(), loss, pair())

    assert not doubts_of(report)


def test_buffer_that_moves_leaves_the_loss_checked():
    """Every model here counts its passes."""
    said = r"its sums over parts of a batch do not add up \(it is .* for 8 samples, and .* for 3 and .* for 5 of them\)"
    with pytest.raises(autoaccum.InvalidInputError, match=said):
        train(Between(lambda x: x).double(), info_nce, pair())


@pytest.mark.parametrize("mine", [lambda each: each.topk(len(each) // 2).values.mean(), lambda each: each.std()])
def test_hard_samples_are_seen_beside_spectral_norm(mine):
    model = Between(lambda x: x, nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))).double()

    with pytest.raises(autoaccum.InvalidInputError, match="neither a mean nor a sum"):
        train(model, lambda outputs, targets: mine((outputs - targets).square().mean(1)), pair())


@pytest.mark.parametrize("size", [3, 4])
def test_interleaved_pairs_that_odd_micro_batches_would_mix_are_refused(size):
    """The last window of a loader may be odd."""
    options = {"forward": lambda model, batch: model(batch["x"])}

    with pytest.raises(autoaccum.InvalidInputError, match="neither a mean nor a sum"):
        train(
            nn.Linear(6, 1).double(),
            lambda outputs, _: -functional.logsigmoid(outputs[0::2] - outputs[1::2]).mean(),
            {"x": pair()[0]},
            (size,) * (12 // size),
            **options,
        )


def test_pairs_that_odd_micro_batches_do_not_hold_are_trained_in_even_ones():
    distance, report = train(
        nn.Linear(6, 1).double(),
        lambda outputs, _: -functional.logsigmoid(outputs.view(-1, 2).diff(dim=1)).mean(),
        {"x": pair()[0]},
        (4, 2, 6),
        forward=lambda model, batch: model(batch["x"]),
    )

    assert distance < 1e-12
    assert not doubts_of(report)


def test_refusal_says_whether_sums_or_weights_fail():
    """Of the sums, the test of a buffer that moves."""

    def at_least_3(outputs, batch):
        kept = batch["kept"][:, 0, 0] > 0  # three dimensions, which the batch does not count
        return (outputs.square().mean(1) * kept).sum() / kept.sum().clamp(min=3)

    kept = torch.tensor([1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 1, 1]).view(12, 1, 1)
    said = (
        r"sums over parts .* add up, and what they are divided by does not \(\d for 8 samples, and 3 for 3 and \d for 5"
    )
    with pytest.raises(autoaccum.InvalidInputError, match=said):
        train(
            nn.Linear(6, 2).double(),
            at_least_3,
            {"x": pair()[0], "kept": kept},
            forward=lambda model, batch: model(batch["x"]),
        )


def test_refusal_of_a_term_does_not_tell_of_another():
    def loss(outputs, batch):
        kept = batch["kept"][:, 0, 0] > 0
        clamped = (outputs.square().mean(1) * kept).sum() / kept.sum().clamp(min=3)
        return outputs.abs().mean() + outputs.square().mean().sqrt() + clamped

    kept = torch.tensor([1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 1, 1]).view(12, 1, 1)
    with pytest.raises(autoaccum.InvalidInputError, match=r"term 2 of 3 .* do not add up \(it is .* for 8 samples"):
        train(
            nn.Linear(6, 2).double(),
            loss,
            {"x": pair()[0], "kept": kept},
            forward=lambda model, batch: model(batch["x"]),
        )


# --- one sample fits at once ------------------------------------------------------------------------------------------


class Narrow(nn.Module):
    """Runs out of memory with more than one sample; beside a number of outputs it learns a scale, a single number."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(0.7))
        self.fits = 1

    def forward(self, inputs):
        if len(inputs) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.linear(inputs) * self.scale

    def penalty(self):
        return sum(p.abs().sum() for p in self.parameters())


@pytest.mark.filterwarnings("ignore:autoaccum. two samples that can be joined do not fit at once")
@pytest.mark.parametrize("is_named", [False, True])
def test_penalty_on_parameters_beside_a_mean_is_exact_where_one_sample_fits_at_once(is_named):
    model = Narrow().double()
    inputs, weights = torch.randn(8, 6, dtype=torch.float64), torch.rand(8, dtype=torch.float64) + 0.1

    def closure(batch):
        mean = (model(batch[0]).square().mean(1) * batch[1]).sum() / batch[1].sum()
        return {"mean": mean, "penalty": 0.1 * model.penalty()} if is_named else mean + 0.1 * model.penalty()

    autoaccum.Accumulator(model, closure=closure, micro_batch=4, device="cpu", precision="fp32").backward(
        (inputs, weights)
    )
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.fits = 8
    whole = closure((inputs, weights))
    (sum(whole.values()) if is_named else whole).backward()

    for own, parameter in zip(found, model.parameters(), strict=True):
        assert torch.allclose(own, parameter.grad, rtol=1e-12, atol=0)


def test_loss_of_one_sample_that_cannot_be_read_is_refused_with_what_helps():
    model = Narrow().double()

    def closure(batch):
        return model(batch[0]).square().mean() + model(batch[0]).square().mean().sqrt()

    accumulator = autoaccum.Accumulator(model, closure=closure, micro_batch=4, device="cpu", precision="fp32")

    with pytest.raises(autoaccum.InvalidInputError, match=r"cannot be read from its graph.*\(sum, weight\) pair"):
        accumulator.backward((torch.randn(8, 6, dtype=torch.float64), torch.randn(8)))
