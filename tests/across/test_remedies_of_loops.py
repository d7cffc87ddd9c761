"""Other people's loops: what a message about a loss tells to do can be done there."""

import importlib
import inspect
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from autoaccum.errors import DoesNotFitError, InvalidInputError
from support.models.small import WITHOUT_WARNINGS

pytestmark = [WITHOUT_WARNINGS, pytest.mark.usefixtures("accelerate_as_it_was")]
CLASSES = 3


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", "")


class Samples(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(5, generator=generator, dtype=torch.float64), "y": index % CLASSES}


class Own(torch.autograd.Function):
    """A loss whose graph says nothing."""

    @staticmethod
    def forward(ctx, losses):
        ctx.shape = losses.shape
        return losses.square().sum().sqrt()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape)


def losses_of(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


REFUSED = {
    "compares samples": lambda outputs, _: functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs))),
    "a mean and samples": lambda outputs, targets: (losses_of(outputs, targets).mean(), len(targets)),
    "a mean and an accuracy": lambda outputs, targets: (losses_of(outputs, targets).mean(), accuracy(outputs, targets)),
    "a mean and outputs": lambda outputs, targets: (losses_of(outputs, targets).mean(), outputs),
    "matches": lambda outputs, targets: outputs.argmax(1) == targets,
    "all outputs": lambda outputs, _: outputs.square(),
    "relative to the batch": lambda outputs, targets: (
        losses_of(outputs, targets) / losses_of(outputs, targets).mean().detach()
    ),
    "unreadable": lambda outputs, targets: Own.apply(losses_of(outputs, targets)),
    "a number": lambda outputs, targets: losses_of(outputs, targets).mean().item(),
    "detached": lambda outputs, targets: losses_of(outputs, targets).mean().detach(),
    "not finite": lambda outputs, targets: losses_of(outputs, targets).mean() * torch.nan,
    "root": lambda outputs, targets: losses_of(outputs, targets).mean().sqrt(),
}
REMEDIES = {
    "a (sum, weight) pair": lambda outputs, targets: (losses_of(outputs, targets).sum(), len(targets)),
    "terms by name": lambda outputs, targets: {
        "a": (losses_of(outputs, targets)[targets > 0].sum(), (targets > 0).sum()),
        "b": (outputs[:, 0].square().sum(), len(targets)),
    },
    "a vector": losses_of,
    "both by names": lambda outputs, targets: {
        "loss": losses_of(outputs, targets).mean(),
        "accuracy": accuracy(outputs, targets),
    },
}


def by_trainer(loss, folder, **options):
    transformers = pytest.importorskip("transformers")
    from autoaccum.integrations.transformers import auto_accumulate  # noqa: PLC0415 - only where it is installed

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss(model(inputs["x"]), inputs["y"])

    settings = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "optim": "sgd"}
    settings |= {"per_device_train_batch_size": 12, "max_steps": 2, "remove_unused_columns": False, "seed": 1}
    model = network()
    args = transformers.TrainingArguments(str(folder), learning_rate=0.1, **settings)
    auto_accumulate(Trainer, **options)(model, args, train_dataset=Samples()).train()
    return model


def by_lightning(loss, _, **options):
    pl = pytest.importorskip("lightning.pytorch")
    from autoaccum.integrations.lightning import AutoAccumulate  # noqa: PLC0415 - only where it is installed

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = network()

        def training_step(self, batch):
            return loss(self.body(batch["x"]), batch["y"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    callbacks = [AutoAccumulate(**options)]
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **dict.fromkeys(quiet, False))
    module = Module()
    trainer.fit(module, DataLoader(Samples(), batch_size=12))
    return module.body


def by_accelerate(loss, _, **options):
    accelerate = pytest.importorskip("accelerate")
    from autoaccum.integrations.accelerate import auto_accumulate  # noqa: PLC0415 - only where it is installed

    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward = auto_accumulate(accelerator, model, closure=lambda batch: loss(model(batch["x"]), batch["y"]), **options)
    for batch in DataLoader(Samples(), batch_size=12):
        backward(batch)
        optimizer.step()
        optimizer.zero_grad()
    return model


MODULES = {by_trainer: "transformers", by_lightning: "lightning", by_accelerate: "accelerate"}


def network():
    torch.manual_seed(0)
    return nn.Linear(5, CLASSES).double()


def options_in(text):
    """The options that a message names; `loss_scope=` not where the functions that take it are named with it."""
    text = text.replace("loss_scope='window' to fit, Runner or Accumulator", "")
    return {*re.findall(r"\b([a-z_]+)=(?!nan)", text)}


def options_of(loop):
    module = importlib.import_module(f"autoaccum.integrations.{MODULES[loop]}")
    entry = module.AutoAccumulate if loop is by_lightning else module.auto_accumulate
    return {*inspect.signature(entry).parameters}


@pytest.mark.parametrize("loop", MODULES)
@pytest.mark.parametrize("name", REFUSED)
def test_message_about_a_loss_names_only_what_the_loop_takes(loop, name, tmp_path):
    with pytest.raises(InvalidInputError) as caught:
        loop(REFUSED[name], tmp_path, micro_batch=5)

    assert options_in(str(caught.value)) <= options_of(loop)


@pytest.mark.parametrize("loop", MODULES)
def test_message_about_a_sample_that_does_not_fit_names_only_what_the_loop_takes(loop, tmp_path):
    def lacking(*_):
        raise torch.OutOfMemoryError("told to")

    with pytest.raises(DoesNotFitError, match="a sample of shapes") as caught:
        loop(lacking, tmp_path)

    remedies = str(caught.value).partition("; try ")[2]
    assert remedies
    assert options_in(remedies) - {"foreach"} <= options_of(loop)


@pytest.mark.parametrize("loop", MODULES)
@pytest.mark.parametrize("name", REMEDIES)
def test_loss_that_such_a_message_recommends_trains_exactly(loop, name, tmp_path):
    whole, cut = (loop(REMEDIES[name], tmp_path, micro_batch=most) for most in (12, 5))

    torch.testing.assert_close(cut.weight, whole.weight, rtol=0, atol=1e-12)
    assert not torch.equal(cut.weight, network().weight)


@pytest.mark.parametrize("loop", MODULES)
def test_micro_batches_are_averaged_where_that_is_asked_for(loop, tmp_path):
    trained = loop(REFUSED["root"], tmp_path, micro_batch=5, loss_reduction="mean")

    assert not torch.equal(trained.weight, network().weight)
