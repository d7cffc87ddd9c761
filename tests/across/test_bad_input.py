"""Bad input is refused with the value and the remedy; model and loader stay as they were."""

import copy
import gc
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum.errors import DoesNotFitError, InvalidInputError
from support.models.small import CountingLoader, assert_bitwise, batches_of, classifier, labelled, runner_of, state_of


@pytest.fixture
def model():
    return classifier()


@pytest.fixture
def loader():
    return CountingLoader(batches_of(labelled(10), 4, 4, 2))


def fit(model, loader, **arguments):
    return autoaccum.fit(model, loader, **{"target_batch": 4, "device": "cpu", "progress": False} | arguments)


def refused(model, loader, kind=InvalidInputError, **arguments):
    """What a refused call says, after checking that it left the model as it was."""
    before = state_of(model)
    random_state = torch.get_rng_state()
    with pytest.raises(kind) as caught:
        fit(model, loader, **arguments)
    assert_bitwise(state_of(model), before)
    assert torch.equal(torch.get_rng_state(), random_state)
    return str(caught.value)


# --- known before the loader is touched ------------------------------------------------------------------------------


OTHER = nn.Linear(2, 2)


def over_another_model(_):
    return torch.optim.SGD(OTHER.parameters(), lr=0.1)


# tests/support/bad_input/arguments.py goes through every argument; these say more than its name.
ARGUMENTS = [
    ({"target_batch": 100.0}, "target_batch must be a whole number, got 100.0 (float); pass an int"),
    ({"target_batch": None}, "there is no target: pass target_batch="),
    ({"precision": "fp8"}, "precision='fp8' is unknown; choose one of 'auto', 'fp32', 'bf16', 'fp16'"),
    ({"loss": nn.MSELoss(), "loss_reduction": "sum"}, "contradicts the loss, a MSELoss with reduction='mean'"),
    ({"noise_scale": True, "loss_scope": "window"}, "noise_scale=True compares gradients of micro-batches"),
    ({"optimizer": over_another_model}, "2 of them not the model's"),
    ({"val_loader": [], "metrics": "accuracy"}, "is no metric; pass a callable of (outputs, targets)"),
    ({"device": "cuda:99"}, "device='cuda:99' is not available; this machine has 'cpu'"),
    ({"memory_limit": "12 parsecs"}, "memory_limit='12 parsecs' has the unknown unit 'parsecs'; give bytes"),
    ({"memory_limit": 1.5}, "memory_limit=1.5 is read as a fraction and must be above 0 and at most 1"),
]


@pytest.mark.parametrize(("arguments", "text"), ARGUMENTS, ids=[text for _, text in ARGUMENTS])
def test_argument_is_refused_before_a_batch_is_drawn(arguments, text, model, loader):
    said = refused(model, loader, **arguments)

    assert text in said
    assert loader.drawn == 0


def test_optimizer_over_another_model_is_left_as_it_was(model, loader):
    other = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.1)
    before, settings = state_of(other), copy.deepcopy(optimizer.state_dict())

    said = refused(model, loader, optimizer=optimizer, lr_scaling="linear", base_batch=2)

    assert "pass a function: optimizer=lambda parameters" in said
    assert_bitwise(state_of(other), before)
    assert optimizer.state_dict() == settings


# --- what the loader yields ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "arguments", "text"),
    [
        (batches_of(labelled(3), 3), {"drop_last": True}, "less than target_batch=4 samples, which drop_last=True"),
        ([{"text": "a"}], {}, "a batch of type dict holds no tensor"),
        ([None], {}, "a batch of type NoneType holds no tensor"),
        ([torch.tensor(1.0)], {}, "a batch of type Tensor holds no tensor with samples"),
        ([{"x": torch.zeros(4, 4), "y": torch.zeros(5)}], {}, "x: (4, 4), y: (5,)"),
        ([(torch.zeros(4, 4).to_sparse(), torch.zeros(4))], {}, "a batch holds a sparse_coo tensor"),
        (
            [(torch.zeros(4, 4), SimpleNamespace(boxes=torch.zeros(4)))],
            {},
            "a batch holds a SimpleNamespace with tensors",
        ),
        ([(nn.utils.rnn.pack_sequence([torch.zeros(4, 4)]), torch.zeros(4))], {}, "a batch holds a PackedSequence"),
    ],
    ids=["all dropped", "no tensor in a dict", "none", "no samples", "unequal in a dict", "sparse", "object", "packed"],
)
def test_loader_of_bad_batches_is_refused(batches, arguments, text, model):
    loader = CountingLoader(batches)

    said = refused(model, loader, **arguments)

    assert text in said
    assert loader.drawn == len(batches)


def test_bad_batch_in_the_middle_leaves_what_was_done(model):
    batches = [*batches_of(labelled(8), 4, 4), (torch.zeros(4, 4).double(), torch.zeros(3))]
    loader, steps = CountingLoader(batches), []

    class Steps(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            steps.append(report.samples)

    with pytest.raises(InvalidInputError, match=re.escape("0: (4, 4), 1: (3,)")):
        fit(model, loader, callbacks=[Steps()])

    assert steps == [4, 4]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("where", ["the model", "the loss"])
def test_parameters_that_were_made_in_inference_mode_are_refused(model, loader, where):
    class Scaled(nn.CrossEntropyLoss):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    with torch.inference_mode():
        made = classifier() if where == "the model" else Scaled()

    said = refused(made, loader) if where == "the model" else refused(model, loader, loss=made)

    assert "was made in torch.inference_mode(), and cannot be trained" in said
    assert loader.drawn == 0


# --- what the loss returns -------------------------------------------------------------------------------------------


ce = functional.cross_entropy
LOSSES = {
    "detached": (lambda x, y: ce(x, y).detach(), ["'loss' has no gradient", ".detach()"]),
    "a float": (lambda x, y: ce(x, y).item(), ["'loss' is a float", "no .item()"]),
    "nothing": (lambda x, y: None, ["'loss' is a NoneType", "return a scalar tensor"]),
    "not a number": (
        lambda x, y: ce(x, y) * float("nan"),
        ["not finite from the start (loss=nan)", "look for NaN in the inputs"],
    ),
    "infinite": (
        lambda x, y: ce(x, y) - torch.log(torch.zeros((), dtype=torch.float64)),
        ["not finite from the start (loss=inf)", "log(0)"],
    ),
    "matrix": (lambda x, y: x.square(), ["shape (", ", 3)", "per-sample losses, or a (sum, weight) pair"]),
    "too short": (lambda x, y: x.square().mean(1)[1:], ["shape (", "samples; return a scalar"]),
    "of nothing": (lambda x, y: (x.sum(), torch.zeros(())), ["does not exist; leave such samples out"]),
    "complex number": (lambda x, y: torch.fft.fft(x).mean(), ["'loss' is a complex number", "loss.abs()"]),
    "complex of each": (lambda x, y: torch.fft.fft(x).mean(1), ["'loss' is a complex number", "loss.abs()"]),
    "complex pair": (lambda x, y: (torch.fft.fft(x).sum(), x.numel()), ["'loss' is a complex number", "loss.abs()"]),
}


@pytest.mark.parametrize(("loss", "texts"), LOSSES.values(), ids=LOSSES)
def test_loss_that_cannot_be_minimised_is_refused_with_what_it_returned(loss, texts, model, loader):
    said = refused(model, loader, loss=loss)

    assert all(text in said for text in texts)
    assert loader.drawn == 1


def masked_error(outputs, targets):
    mask = (targets >= 0).double()
    return (outputs.square().mean(1) * mask).sum(), mask.sum()


def token_mean(outputs, targets):
    """A function of the user's own."""
    return functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize("windows_before", [0, 1])
@pytest.mark.parametrize(
    ("loss", "nothing"),
    [
        (nn.CrossEntropyLoss(), -100),
        (nn.NLLLoss(ignore_index=2), 2),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)), 1),
        (token_mean, -100),
        (None, -100),
        (masked_error, -100),
    ],
    ids=["module", "ignored class", "class of weight 0", "function", "chosen", "pair"],
)
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_window_in_which_nothing_counts_is_refused_and_makes_no_update(
    loss, nothing, windows_before, micro_batch, model
):
    inputs, targets = labelled(4)
    runner = runner_of(model, samples=4, micro_batch=micro_batch, loss=loss)
    targets[3] = nothing
    for _ in range(windows_before):
        runner.step((inputs, targets))
    before = state_of(model)

    with pytest.raises(InvalidInputError, match="leave such samples out"):
        runner.step((inputs, torch.full_like(targets, nothing)))

    assert_bitwise(state_of(model), before)


@pytest.mark.parametrize(
    ("outputs", "targets", "text"),
    [
        (1, torch.zeros(4).double(), "outputs have shape (4, 1) and the targets (4,), which torch would broadcast"),
        (3, torch.zeros(4, 1).double(), "outputs have shape (4, 3) and the targets (4, 1)"),
        (1, torch.zeros(4).long(), "outputs of shape (4, 1) and whole-number targets of shape (4,)"),
        (3, torch.zeros(4, 3).long(), "outputs of shape (4, 3) and whole-number targets of shape (4, 3)"),
        (3, torch.zeros(4).bool(), "no loss can be chosen for outputs a tensor of shape (4, 3)"),
    ],
    ids=["regression", "broadcast", "one logit", "one-hot", "bool"],
)
def test_shapes_for_which_no_loss_can_be_chosen_are_refused(outputs, targets, text):
    said = refused(classifier(outputs), [(labelled(4)[0], targets)])

    # The probe tries a size of its own first.
    assert text.replace("(4", "(") in said.replace("(4", "(").replace("(2", "(")


def test_detector_that_is_called_with_images_alone_is_told_how_to_get_its_targets():
    class Detector(nn.Linear):
        def forward(self, images, targets=None):
            found = super().forward(torch.stack(images))
            return list(found) if targets is None else {"loss": sum(map(torch.sum, found))}

    batch = [torch.zeros(4), torch.ones(4)], [{"boxes": torch.zeros(1, 4)}, {"boxes": torch.zeros(2, 4)}]

    assert "forward=lambda model, batch: model(*batch)" in refused(Detector(4, 4), [batch], target_batch=2)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.KLDivLoss()])
def test_loss_of_elements_is_not_broadcast(loss):
    batch = (labelled(4)[0], torch.rand(4).double())

    said = refused(classifier(1), [batch], loss=loss, micro_batch=4)

    assert f"{type(loss).__name__} compares element by element" in said
    assert "(4, 1) and the targets (4,)" in said


def test_cross_entropy_of_classes_in_the_last_dimension_names_the_remedy():
    batch = (torch.randn(4, 5, 4), torch.randint(3, (4, 5)))

    said = refused(nn.Linear(4, 3), [batch], loss=nn.CrossEntropyLoss(), micro_batch=2)

    assert "takes outputs of shape (N, C, ...)" in said
    assert "movedim(-1, 1)" in said


# --- memory ----------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Takes 128 MiB a sample, and as much again for what it makes of it: more than earlier tests leave behind."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return (inputs.repeat(1, 1 << 23).square() * self.scale).mean(1, keepdim=True)


WIDE = (torch.ones(2, 4), torch.ones(2, 1))


@pytest.fixture
def no_garbage():
    """What earlier tests left in cycles would be room within the limit if it were collected during the call."""
    gc.collect()


@pytest.mark.parametrize("simulated", [True, False], ids=["simulated", "host"])
@pytest.mark.usefixtures("no_garbage")
def test_limit_with_no_room_for_one_sample_does_not_fit(simulated):
    memory = autoaccum.Simulated("1GiB") if simulated else "cpu"

    said = refused(Wide(), [WIDE], kind=DoesNotFitError, target_batch=2, device=memory, memory_limit="20MiB")

    assert "a sample of shapes (4,) and (1,) does not fit on" in said
    assert "; try a higher memory_limit, precision='bf16', " in said


# --- the other entries -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [lambda outputs, targets: outputs.argmax(1) != targets, lambda _, targets: targets])
def test_losses_of_samples_that_are_no_floating_point_numbers_are_refused(model, loader, loss):
    said = refused(model, loader, loss=loss)

    assert "has no gradient, as counts and comparisons have none" in said
    assert "by name beside it" in said


def test_callback_that_cannot_be_called_is_refused_before_anything_is_trained():
    class Counts(autoaccum.Callback):
        def on_step(self, report):
            pass

    model, batch = nn.Linear(3, 2), (torch.randn(6, 3), torch.randint(0, 2, (6,)))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(autoaccum.InvalidInputError, match=r"Counts.on_step .*on_step\(self, report, \*, epoch\)"):
        autoaccum.fit(model, [batch], 6, loss=functional.cross_entropy, callbacks=[Counts()], progress=False)
    assert all(map(torch.equal, before, model.parameters()))
