"""What a check on a few samples says and leaves behind. What it finds of losses: the forms in tests/support/losses."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._data.nesting import numbers_in  # what checks read
from autoaccum._loss.modes import Clamps, quiet_training, without_onednn
from support.faults.modes import FailAt, InterruptAtLine, differences, state_of
from support.models.small import a_few_of, runner_of

COMPARED = "a sample depend on the others of its micro-batch"


def squared(outputs, targets):
    return (outputs - targets).square().mean()


def pair():
    torch.manual_seed(1)
    return torch.randn(12, 6).double(), torch.randn(12, 4).double()


def runner(model, loss=None, **options):
    return runner_of(model, samples=12, micro_batch=3, loss=loss or nn.MSELoss(), precision="fp32", **options)


def test_a_model_that_compares_samples_in_training_alone_is_warned_of_after_an_evaluation():
    class Centred(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs - inputs.mean(0) if self.training else inputs)

    made, batch = runner(Centred(6, 4).double()), pair()
    made.evaluate([batch])

    with pytest.warns(autoaccum.LossWarning, match=COMPARED):
        made.step(batch)


class OnlyFour(nn.Linear):
    def __init__(self):
        super().__init__(6, 4)

    def forward(self, inputs):
        return super().forward(inputs).view(4, 4)


@pytest.mark.parametrize(("loss", "stated"), [(nn.MSELoss(), {}), (squared, {"loss_reduction": "mean"})])
def test_a_model_of_fixed_size_is_trained_in_it_where_the_loss_is_known(loss, stated):
    model, (inputs, targets) = OnlyFour().double(), pair()
    weight, bias = model.weight.detach().clone().requires_grad_(), model.bias.detach().clone()
    functional.mse_loss(functional.linear(inputs, weight, bias), targets).backward()

    runner_of(model, samples=12, micro_batch=4, loss=loss, **stated).step((inputs, targets))

    assert torch.allclose(model.weight, weight - 0.1 * weight.grad)


def test_a_check_that_a_model_of_fixed_size_refuses_says_how_to_train_it():
    with pytest.raises(RuntimeError, match="shape") as caught:
        runner_of(OnlyFour().double(), samples=12, micro_batch=4, loss=squared).step(pair())
    assert "loss_reduction='mean' or 'sum'" in caught.value.__notes__[0]
    assert "micro_batch=" in caught.value.__notes__[0]


@pytest.mark.parametrize("error", [AssertionError, ValueError, RuntimeError])
def test_error_of_a_closure_that_takes_even_sizes_names_the_size_and_the_remedies(error):
    model = nn.Linear(6, 4).double()

    def closure(batch):
        if len(batch[0]) % 2:
            raise error("the batch size should be even")
        return squared(model(batch[0]), batch[1])

    with pytest.raises(error, match="even") as caught:
        autoaccum.Accumulator(model, closure=closure, micro_batch=4).backward([half[:10] for half in pair()])
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
    class Full(nn.Linear):
        def forward(self, inputs):
            if len(inputs) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(inputs)

    report = runner(Full(6, 4).double()).step(pair())

    assert (report.oom_events, report.recomputed_samples, report.micro_batches) == (0, 0, (3, 3, 3, 3))


def test_a_check_in_which_memory_runs_out_anywhere_changes_nothing():
    def trained(point=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4)).double()
        made = runner(model)
        with FailAt(*[] if point is None else [point]) as fault:
            report = made.step(pair())
        return fault.hits, report.oom_events, report.micro_batches, state_of(model, made.optimizer)

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


@pytest.mark.parametrize("loss", [nn.MSELoss(), squared])
def test_numbers_that_a_model_notes_in_attributes_are_those_of_its_micro_batches(loss):
    class Noting(nn.Linear):
        first, passes = None, 0

        def forward(self, inputs):
            self.first = len(inputs) if self.first is None else self.first
            self.passes += 1
            return super().forward(inputs)

    model = Noting(6, 4).double()

    runner(model, loss).step(pair())

    assert (model.first, model.passes) == (3, 4)


LAYERS = {
    "spectral norm": nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)),
    "the older one": nn.utils.spectral_norm(nn.Linear(6, 4)),
    "dropout": nn.Dropout(0.3),
    "BatchNorm": nn.BatchNorm1d(6),
    "LayerNorm": nn.LayerNorm(6),
}


@pytest.mark.parametrize(("layer", "loss"), a_few_of(LAYERS, ["of torch", "a function"]))
def test_layers_of_torch_compare_no_samples(layer, loss):
    model = nn.Sequential(LAYERS[layer], nn.LazyLinear(4)).double()
    model(pair()[0])

    report = runner(model, squared if loss == "a function" else None).step(pair())

    assert not any(COMPARED in text for text in report.warnings)


@pytest.mark.parametrize("first", [0, 1])
def test_clamped_number_of_boxes_in_lists_of_samples_is_exact_or_told(first):
    """Of boxes over max(1, their number): the weight of a micro-batch without any is 1 where 0 is right."""
    samples = [(torch.randn(6).double(), torch.randn(count).double()) for count in (first, 2, 0, 3, 0, 0, 0, 0) * 2]
    model = nn.Linear(6, 1).double()

    def collate(batch):
        return {"inputs": torch.stack([one for one, _ in batch]), "boxes": [boxes for _, boxes in batch]}

    def loss(outputs, batch):
        errors = [(output - target).square().sum() for output, target in zip(outputs, batch["boxes"], strict=True)]
        return torch.stack(errors).sum() / max(1, sum(map(len, batch["boxes"])))

    batch = collate(samples)
    loss(model(batch["inputs"]), batch).backward()
    expected = model.weight - 0.1 * model.weight.grad
    options = {"split": autoaccum.ListOfSamples(collate), "forward": lambda model, batch: model(batch["inputs"])}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        runner_of(model, samples=16, micro_batch=4, loss=loss, **options).step(samples)

    is_exact = torch.allclose(model.weight, expected, rtol=1e-9)
    assert is_exact or any(issubclass(one.category, autoaccum.LossWarning) for one in told)


def test_labels_of_a_list_of_samples_are_no_numbers_of_the_batch():
    assert numbers_in([{"image": torch.zeros(2), "label": 3}, {"image": torch.zeros(2), "label": 4}]) == {}
    assert numbers_in([torch.zeros(2), torch.zeros(2), 5]) == {(2,): 5.0}


def test_quiet_training_that_is_interrupted_at_any_line_leaves_modules_as_they_were():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def check():
        with quiet_training([net], noting=Clamps()), without_onednn():
            net(torch.zeros(2, 3))

    listing = InterruptAtLine("autoaccum")
    with listing:
        check()

    for line in range(1, listing.count + 1):
        with pytest.raises(KeyboardInterrupt), InterruptAtLine("autoaccum", line):
            check()
        assert all(part.training for part in net.modules())
        assert torch.backends.mkldnn.enabled
    assert listing.count > 40
