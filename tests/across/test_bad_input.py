"""Bad input is refused with the value and the remedy; model and loader stay as they were."""

import copy
import gc
import re
import textwrap
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._launch.recipe import load_recipe
from autoaccum.errors import DoesNotFitError, InvalidInputError
from helpers import CountingLoader, assert_bitwise, batches_of, classifier, labelled, state_of


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


ARGUMENTS = [
    ({"target_batch": 0}, "target_batch must be at least 1, got 0"),
    ({"target_batch": -100}, "target_batch must be at least 1, got -100"),
    ({"target_batch": 100.0}, "target_batch must be a whole number, got 100.0 (float); pass an int"),
    ({"target_batch": True}, "target_batch must be a whole number, got True (bool); pass an int"),
    ({"target_batch": "100"}, "target_batch must be a whole number, got '100' (str); pass an int"),
    ({"target_batch": None}, "there is no target: pass target_batch="),
    ({"micro_batch": 0}, "micro_batch must be at least 1, got 0"),
    ({"micro_batch": 2.5}, "micro_batch must be a whole number, got 2.5"),
    ({"micro_batch": "half"}, "micro_batch='half' is unknown; pass 'auto' or"),
    ({"epochs": 0}, "epochs must be at least 1, got 0"),
    ({"max_steps": -1}, "max_steps must be at least 1, got -1"),
    ({"drop_last": "pad"}, "drop_last='pad' is unknown; choose True or False"),
    ({"precision": "fp8"}, "precision='fp8' is unknown; choose one of 'auto', 'fp32', 'bf16', 'fp16'"),
    ({"precision": 16}, "precision=16 is unknown; choose one of"),
    ({"loss_reduction": "max"}, "loss_reduction='max' is unknown; choose 'mean', 'sum' or None"),
    ({"loss": nn.MSELoss(), "loss_reduction": "sum"}, "contradicts the loss, a MSELoss with reduction='mean'"),
    ({"loss": []}, "a list of losses must hold callables"),
    ({"loss": [functional.mse_loss, None]}, "a list of losses must hold callables"),
    ({"clip_grad_norm": 0}, "clip_grad_norm=0 must be a positive number, or None"),
    ({"clip_grad_norm": -1.0}, "clip_grad_norm=-1.0 must be a positive number"),
    ({"clip_grad_norm": "1"}, "clip_grad_norm='1' must be a positive number"),
    ({"clip_grad_norm": float("nan")}, "clip_grad_norm=nan must be a positive number"),
    ({"lr_scaling": "cubic", "base_batch": 4}, "lr_scaling='cubic' is unknown; choose 'linear' or 'sqrt'"),
    ({"lr_scaling": "linear"}, "lr_scaling='linear' needs base_batch"),
    ({"noise_scale": 0}, "noise_scale must be at least 1"),
    ({"noise_scale": True, "loss_scope": "window"}, "noise_scale=True compares gradients of micro-batches"),
    ({"optimizer": "adam"}, "optimizer='adam' is unknown; choose 'adamw'"),
    ({"optimizer": 3}, "optimizer=3 is neither a torch.optim.Optimizer, nor a list of them"),
    ({"optimizer": over_another_model}, "2 of them not the model's"),
    ({"scheduler": 0.1}, "scheduler=0.1 has no step(), nor is it a function"),
    ({"scheduler_interval": "batch"}, "scheduler_interval='batch' is unknown; choose 'step' or 'epoch'"),
    ({"progress": "loud"}, "'loud'"),
    ({"val_loader": 3}, "val_loader=3 cannot be iterated over; pass a DataLoader"),
    ({"val_loader": [], "metrics": "accuracy"}, "pass a callable of (outputs, targets) or a torchmetrics object"),
    ({"device": "gpu"}, "device='gpu' is not a device that torch knows; this machine has 'cpu'"),
    ({"device": "cuda:99"}, "device='cuda:99' is not available; this machine has 'cpu'"),
    ({"device": "meta"}, "device='meta' is not available; this machine has 'cpu'"),
    ({"memory_limit": "much"}, "memory_limit='much' cannot be read; give bytes"),
    ({"memory_limit": ""}, "memory_limit='' cannot be read; give bytes"),
    ({"memory_limit": "12 parsecs"}, "memory_limit='12 parsecs' has the unknown unit 'parsecs'; give bytes"),
    ({"memory_limit": 0}, "memory_limit=0 leaves no memory; give bytes"),
    ({"memory_limit": -5}, "memory_limit=-5 leaves no memory; give bytes"),
    ({"memory_limit": 1.5}, "memory_limit=1.5 is read as a fraction and must be above 0 and at most 1"),
    ({"memory_limit": "120%"}, "memory_limit='120%' is read as a fraction"),
    ({"memory_limit": float("nan")}, "memory_limit=nan is read as a fraction"),
    ({"memory_limit": True}, "memory_limit=True (bool) cannot be read; give bytes"),
    ({"memory_limit": [1]}, "memory_limit=[1] (list) cannot be read; give bytes"),
]


@pytest.mark.parametrize(("arguments", "text"), ARGUMENTS, ids=[text for _, text in ARGUMENTS])
def test_argument_is_refused_before_a_batch_is_drawn(arguments, text, model, loader):
    said = refused(model, loader, **arguments)

    assert text in said
    assert loader.drawn == 0


@pytest.mark.parametrize(
    "arguments", [{"lr_scaling": "cubic"}, {"optimizer": over_another_model}, {"precision": "fp8"}]
)
def test_old_gradients_are_still_there_after_a_refusal(arguments, model, loader):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    refused(model, loader, **arguments)


@pytest.mark.parametrize("model", [3, None, nn.Linear, {}], ids=repr)
@pytest.mark.parametrize("device", ["cpu", None])
def test_what_is_no_module_is_refused(model, device, loader):
    with pytest.raises(InvalidInputError, match=r"not a torch\.nn\.Module"):
        fit(model, loader, device=device)

    assert loader.drawn == 0


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "without parameters"])
def test_model_with_nothing_to_train_is_refused(freeze, model, loader):
    model = model.requires_grad_(False) if freeze else nn.Sequential(nn.Flatten())

    said = refused(model, loader)

    assert ("none of the model's 6 parameters needs a gradient" if freeze else "the model has no parameters") in said
    assert ("requires_grad_(True)" if freeze else "torch.nn.ModuleList") in said
    assert loader.drawn == 0


def test_optimizer_over_another_model_is_left_as_it_was(model, loader):
    other = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.1)
    before, settings = state_of(other), copy.deepcopy(optimizer.state_dict())

    said = refused(model, loader, optimizer=optimizer, lr_scaling="linear", base_batch=2)

    assert "pass a function: optimizer=lambda parameters" in said
    assert_bitwise(state_of(other), before)
    assert optimizer.state_dict() == settings


@pytest.mark.parametrize("loader", [None, 3, object()], ids=["None", "int", "object"])
def test_loader_that_cannot_be_iterated_over_is_refused(loader, model):
    assert "cannot be iterated over; pass a DataLoader" in refused(model, loader)


# --- what the loader yields ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "arguments", "text"),
    [
        ([], {}, "the loader gave no batch, so there is nothing to train on"),
        ([(torch.zeros(0, 4), torch.zeros(0))] * 3, {}, "the loader gave no batch"),
        (
            batches_of(labelled(3), 3),
            {"drop_last": True},
            "less than target_batch=4 samples, which drop_last=True",
        ),
        ([["a", "b"]], {}, "a batch of type list holds no tensor"),
        ([{"text": "a"}], {}, "a batch of type dict holds no tensor"),
        ([None], {}, "a batch of type NoneType holds no tensor"),
        ([torch.tensor(1.0)], {}, "a batch of type Tensor holds no tensor with samples"),
        ([(torch.zeros(4, 4), torch.zeros(3))], {}, "0: (4, 4), 1: (3,)"),
        ([{"x": torch.zeros(4, 4), "y": torch.zeros(5)}], {}, "x: (4, 4), y: (5,)"),
        ([(torch.zeros(4, 4).to_sparse(), torch.zeros(4))], {}, "a batch holds a sparse_coo tensor"),
        (
            [(torch.zeros(4, 4), SimpleNamespace(boxes=torch.zeros(4)))],
            {},
            "a batch holds a SimpleNamespace with tensors",
        ),
        ([(nn.utils.rnn.pack_sequence([torch.zeros(4, 4)]), torch.zeros(4))], {}, "a batch holds a PackedSequence"),
    ],
    ids=[
        "empty",
        "empty batches",
        "all dropped",
        "no tensor",
        "no tensor in a dict",
        "none",
        "no samples",
        "unequal",
        "unequal in a dict",
        "sparse",
        "object",
        "packed",
    ],
)
@pytest.mark.parametrize("micro_batch", ["auto", 2])
def test_loader_of_bad_batches_is_refused(batches, arguments, text, micro_batch, model):
    loader = CountingLoader(batches)

    said = refused(model, loader, micro_batch=micro_batch, **arguments)

    assert text in said
    assert loader.drawn == len(batches)


@pytest.mark.parametrize("micro_batch", ["auto", 2])
def test_bad_batch_in_the_middle_leaves_what_was_done(micro_batch, model):
    batches = [*batches_of(labelled(8), 4, 4), (torch.zeros(4, 4).double(), torch.zeros(3))]
    loader, steps = CountingLoader(batches), []

    class Steps(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            steps.append(report.samples)

    with pytest.raises(InvalidInputError, match=re.escape("0: (4, 4), 1: (3,)")):
        fit(model, loader, micro_batch=micro_batch, callbacks=[Steps()])

    assert steps == [4, 4]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "message", ["CUDA out of memory. Tried to allocate 2 GiB", "could not create a primitive", "no file"]
)
@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError, MemoryError])
def test_error_of_the_loader_arrives_as_it_is_whatever_its_text(kind, message, model):
    error = kind(message)

    def loader():
        yield labelled(4)
        raise error

    with pytest.raises(kind) as caught:
        fit(model, loader(), micro_batch=2)

    assert caught.value is error


# --- what the loss returns -------------------------------------------------------------------------------------------


def detached(outputs, targets):
    return functional.cross_entropy(outputs, targets).detach()


def a_float(outputs, targets):
    return functional.cross_entropy(outputs, targets).item()


def nothing(outputs, targets):
    return None


def not_a_number(outputs, targets):
    return functional.cross_entropy(outputs, targets) * float("nan")


def infinite(outputs, targets):
    return functional.cross_entropy(outputs, targets) - torch.log(torch.zeros((), dtype=torch.float64))


def matrix(outputs, targets):
    return outputs.square()


def too_short(outputs, targets):
    return outputs.square().mean(1)[1:]


def of_nothing(outputs, targets):
    return outputs.sum(), torch.zeros(())


@pytest.mark.parametrize("micro_batch", ["auto", 4, 2])
@pytest.mark.parametrize(
    ("loss", "texts"),
    [
        (detached, ["'loss' has no gradient", ".detach()"]),
        (a_float, ["'loss' is a float", "no .item()"]),
        (nothing, ["'loss' is a NoneType", "return a scalar tensor"]),
        (not_a_number, ["not finite from the start (loss=nan)", "look for NaN in the inputs"]),
        (infinite, ["not finite from the start (loss=inf)", "log(0)"]),
        (matrix, ["shape (", ", 3)", "per-sample losses, or a (sum, weight) pair"]),
        (too_short, ["shape (", "samples; return a scalar"]),
        (of_nothing, ["does not exist; leave such samples out"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_loss_that_cannot_be_minimised_is_refused_with_what_it_returned(loss, texts, micro_batch, model, loader):
    said = refused(model, loader, loss=loss, micro_batch=micro_batch)

    assert all(text in said for text in texts)
    assert loader.drawn == 1


def kind_of(loss):
    return getattr(loss, "__name__", type(loss).__name__)


def masked_error(outputs, targets):
    mask = (targets >= 0).double()
    return (outputs.square().mean(1) * mask).sum(), mask.sum()


def token_mean(outputs, targets):
    return functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize("micro_batch", [4, 2])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), token_mean, None, masked_error], ids=kind_of)
def test_later_window_in_which_nothing_counts_is_refused_and_makes_no_update(loss, micro_batch, model):
    inputs, targets = labelled(4)
    targets[3] = -100
    runner = autoaccum.Runner(model, None, autoaccum.plan(4, micro_batch), loss=loss, device="cpu")
    runner.step((inputs, targets))
    before = state_of(model)

    with pytest.raises(InvalidInputError, match="leave such samples out"):
        runner.step((inputs, torch.full_like(targets, -100)))

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
@pytest.mark.parametrize("micro_batch", ["auto", 4])
def test_shapes_for_which_no_loss_can_be_chosen_are_refused(outputs, targets, text, micro_batch):
    said = refused(classifier(outputs), [(labelled(4)[0], targets)], micro_batch=micro_batch)

    # The probe tries a size of its own first.
    assert text.replace("(4", "(") in said.replace("(4", "(").replace("(2", "(")


def test_detector_that_is_called_with_images_alone_is_told_how_to_get_its_targets():
    class Detector(nn.Linear):
        def forward(self, images, targets=None):
            found = super().forward(torch.stack(images))
            return list(found) if targets is None else {"loss": sum(map(torch.sum, found))}

    batch = [torch.zeros(4), torch.ones(4)], [{"boxes": torch.zeros(1, 4)}, {"boxes": torch.zeros(2, 4)}]

    assert "forward=lambda model, batch: model(*batch)" in refused(Detector(4, 4), [batch], target_batch=2)


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), nn.L1Loss(), nn.PoissonNLLLoss(), nn.KLDivLoss(), nn.HingeEmbeddingLoss()]
)
def test_loss_of_elements_is_not_broadcast(loss):
    batch = (labelled(4)[0], torch.rand(4).double())

    said = refused(classifier(1), [batch], loss=loss, micro_batch=4)

    assert f"{type(loss).__name__} compares element by element" in said
    assert "(4, 1) and the targets (4,)" in said


def test_batch_without_targets_or_loss_is_refused(model):
    said = refused(model, [labelled(4)[0]], micro_batch=4)

    assert "no loss: the model returned a tensor of shape (4, 3)" in said
    assert "pass loss=" in said


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


@pytest.mark.parametrize("micro_batch", ["auto", 2])
@pytest.mark.parametrize("simulated", [True, False], ids=["simulated", "host"])
@pytest.mark.usefixtures("no_garbage")
def test_limit_with_no_room_for_one_sample_does_not_fit(micro_batch, simulated):
    memory = autoaccum.Simulated("1GiB") if simulated else "cpu"

    said = refused(
        Wide(),
        [WIDE],
        kind=DoesNotFitError,
        target_batch=2,
        device=memory,
        memory_limit="20MiB",
        micro_batch=micro_batch,
    )

    assert "a sample of shapes (4,) and (1,) does not fit on" in said
    assert "; try a higher memory_limit, precision='bf16', " in said


@pytest.mark.parametrize("device", [autoaccum.Simulated("1GiB"), "cpu"], ids=["simulated", "host"])
@pytest.mark.usefixtures("no_garbage")
def test_probe_with_no_room_for_one_sample_names_the_limit(device):
    with pytest.raises(DoesNotFitError, match=r"\(4,\) and \(1,\).*memory_limit=20\.0 MiB.*a higher memory_limit"):
        autoaccum.find_micro_batch(Wide(), WIDE, device=device, memory_limit="20MiB")


# --- the other entries -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [given for given, _ in ARGUMENTS if given.keys() & {"precision", "device"}], ids=str
)
def test_runner_and_probe_refuse_what_fit_refuses(arguments, model):
    calls = [
        partial(autoaccum.Runner, model, None, autoaccum.plan(4, 2)),
        partial(autoaccum.find_micro_batch, model, labelled(4)),
    ]

    for call in calls:
        with pytest.raises(InvalidInputError, match=next(iter(arguments))):
            call(**arguments)


@pytest.mark.parametrize("plan", [None, 4, (2, 2), "balanced"])
def test_runner_without_a_plan_is_refused(plan, model):
    with pytest.raises(
        InvalidInputError, match=rf"plan={re.escape(repr(plan))} is not an autoaccum\.Plan; autoaccum\.plan"
    ):
        autoaccum.Runner(model, None, plan)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4"])
def test_probe_up_to_no_size_is_refused(size, model):
    with pytest.raises(InvalidInputError, match=rf"max_micro_batch.*{size}"):
        autoaccum.find_micro_batch(model, labelled(4), max_micro_batch=size)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (("a", "b"), "holds no tensor"),
        ((torch.zeros(4, 4), torch.zeros(3)), "0: (4, 4), 1: (3,)"),
        ((torch.zeros(0, 4), torch.zeros(0)), "0 samples"),
    ],
    ids=["no tensor", "unequal", "empty"],
)
def test_probe_and_runner_refuse_a_bad_batch(batch, text, model):
    before = state_of(model)
    runner = autoaccum.Runner(model, None, autoaccum.plan(4, 2), device="cpu")

    for call in (partial(autoaccum.find_micro_batch, model), runner.step):
        with pytest.raises(InvalidInputError, match=re.escape(text)):
            call(batch)

    assert_bitwise(state_of(model), before)


RECIPES = {
    "no job": ("x = 1", InvalidInputError, r"has no function job\(\).*autoaccum\.Job"),
    "another function": ("def train(): pass", InvalidInputError, r"has no function job\(\); its functions: train\(\)"),
    "raising": ("def job(): raise KeyError('data')", InvalidInputError, r"job\(\).* raised KeyError: 'data'; correct"),
    "raising when imported": ("raise OSError('no disk')", InvalidInputError, "raised OSError: no disk"),
    "no Python": ("def job(:", InvalidInputError, "SyntaxError"),
    "no Job": ("def job(): return 3", InvalidInputError, r"returned int; return autoaccum\.Job"),
    "arguments": ("def job(rate): pass", InvalidInputError, r"needs arguments \(rate\).*give them defaults"),
}


@pytest.mark.parametrize(("text", "kind", "said"), RECIPES.values(), ids=RECIPES)
def test_recipe_that_gives_no_job_is_refused(text, kind, said, tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(textwrap.dedent(text))

    with pytest.raises(kind, match=said) as caught:
        load_recipe(str(path))

    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["missing.py", "missing.py:job", "folder", ""])
def test_recipe_that_is_not_there_is_refused(name, tmp_path):
    (tmp_path / "folder").mkdir()

    with pytest.raises(InvalidInputError, match=r"does not exist|is a folder"):
        load_recipe(str(tmp_path / name))


@pytest.mark.parametrize("limit", [1, "1KiB", "512KiB", "3MiB"])
def test_host_limit_in_which_native_code_could_die_is_refused(limit, model, loader):
    said = refused(model, loader, memory_limit=limit)

    assert "give at least 4.0 MiB" in said


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss": "mse"}, "loss='mse' cannot be called"),
        ({"callbacks": [print]}, "must be a list of autoaccum.Callback"),
        ({"callbacks": autoaccum.Callback()}, "single callback"),
        ({"metrics": lambda outputs, targets: 0.0}, "val_loader="),
    ],
    ids=["loss", "no callback", "single callback", "metrics"],
)
def test_arguments_of_the_wrong_kind_are_refused_with_what_they_should_be(options, text, model, loader):
    assert text in refused(model, loader, **options)


@pytest.mark.parametrize("loss", [lambda outputs, targets: outputs.argmax(1) != targets, lambda _, targets: targets])
def test_losses_of_samples_that_are_no_floating_point_numbers_are_refused(model, loader, loss):
    said = refused(model, loader, loss=loss)

    assert "has no gradient, as counts and comparisons have none" in said
    assert "metrics=" in said
