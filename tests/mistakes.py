"""The mistakes that people are most likely to make, each as a function that makes it; `python tests/mistakes.py` prints
what is answered, to be read as a stranger would.
"""

import contextlib
import io
import os
import sys
import tempfile
import textwrap
from pathlib import Path

import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.data import Dataset

import autoaccum
from autoaccum._cli.app import cli

WIDTH = 100
MOST_LINES = 3


def network():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def batches(count=2, samples=8):
    return [(torch.randn(samples, 4), torch.arange(samples) % 3) for _ in range(count)]


def fit(model=None, loader=None, target_batch=8, **options):
    """Call `fit` with everything right but what is given."""
    model = network() if model is None else model
    loader = batches() if loader is None else loader
    defaults = {"device": "cpu", "max_steps": 1, "progress": False}
    return autoaccum.fit(model, loader, target_batch, **{**defaults, **options})


def command(*arguments, **files):
    """Run a command line in an empty folder with some files; raise what it answered as `AnsweredError`."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, text in files.items():
            Path(f"{name}.py").write_text(textwrap.dedent(text))
        done = CliRunner().invoke(cli, list(arguments))
    if done.exit_code:
        raise AnsweredError(done.output.strip())


class AnsweredError(Exception):
    """What a command line answered."""


class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.randn(4), index % 3


class Stubborn(nn.Linear):
    """Does not fit with any number of samples."""

    def forward(self, _inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Divides(nn.Linear):
    """Makes NaN."""

    def forward(self, inputs):
        return super().forward(inputs) / 0.0 * 0.0


class TwoDevices(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3, device="meta")

    def forward(self, inputs):
        return self.one(inputs)


def frozen():
    model = network()
    model.requires_grad_(requires_grad=False)
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_other_optimizer():
    return fit(optimizer=sgd(network()))


def with_scheduler_of_another():
    model, other = network(), network()
    return fit(model, optimizer=sgd(model), scheduler=torch.optim.lr_scheduler.StepLR(sgd(other), 1))


def below_a_file():
    with tempfile.NamedTemporaryFile() as file:
        return fit(checkpoint=Path(file.name) / "below")


def alone_with_batchnorm():
    return fit(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), batches(1, 1), 1)


RECIPE = """
    import torch, autoaccum

    def job():
        batches = [(torch.randn(4, 4), torch.arange(4) % 3)]
        return autoaccum.Job(torch.nn.Linear(4, 3), batches, 4, device="cpu")
"""
MISTAKES = {
    # the model
    "the class of a model": lambda: fit(nn.Linear),
    "a function for a model": lambda: fit(lambda inputs: inputs),
    "a state dict for a model": lambda: fit(network().state_dict()),
    "a model without parameters": lambda: fit(nn.ReLU()),
    "a model that is frozen": lambda: fit(frozen()),
    "a model on two devices": lambda: fit(TwoDevices()),
    # the data
    "no loader": lambda: fit(loader=0),
    "an empty loader": lambda: fit(loader=[]),
    "a tensor for a loader": lambda: fit(loader=torch.randn(8, 4)),
    "inputs and targets for a loader": lambda: fit(loader=(torch.randn(8, 4), torch.arange(8) % 3)),
    "a dataset for a loader": lambda: fit(loader=Samples()),
    "one batch for a loader": lambda: fit(loader=batches()[0]),
    "a loader that is a string": lambda: fit(loader="data/train"),
    "batches of strings": lambda: fit(loader=[["a cat", "a dog"]]),
    "batches of numbers": lambda: fit(loader=[1.0, 2.0]),
    "inputs without targets": lambda: fit(loader=[torch.randn(8, 4)]),
    "a mapping without labels": lambda: fit(loader=[{"input": torch.randn(8, 4)}]),
    "more inputs than targets": lambda: fit(loader=[(torch.randn(8, 4), torch.arange(7) % 3)]),
    "a batch without samples": lambda: fit(loader=[(torch.randn(0, 4), torch.arange(0))]),
    "an empty loader of validation": lambda: fit(val_loader=[]),
    "a split that is none": lambda: fit(split=1),
    # the loss
    "the name of a loss": lambda: fit(loss="cross_entropy"),
    "the class of a loss": lambda: fit(loss=nn.CrossEntropyLoss),
    "a loss of each sample in a matrix": lambda: fit(loss=lambda outputs, targets: outputs),
    "a loss that returns nothing": lambda: fit(loss=lambda outputs, targets: None),
    "a loss that is a number": lambda: fit(loss=lambda outputs, targets: outputs.sum().item()),
    "a loss without a graph": lambda: fit(loss=lambda outputs, targets: outputs.sum().detach()),
    "a loss of another shape": lambda: fit(loader=[(torch.randn(8, 4), torch.randn(8))], loss=nn.MSELoss()),
    "a loss that is not finite": lambda: fit(Divides(4, 3)),
    "a reduction that is none": lambda: fit(loss_reduction="average"),
    # the optimizer and the scheduler
    "the name of an optimizer": lambda: fit(optimizer="adam"),
    "an optimizer of another model": with_other_optimizer,
    "the class of a scheduler": lambda: fit(scheduler=torch.optim.lr_scheduler.StepLR),
    "a scheduler of another optimizer": with_scheduler_of_another,
    "clipping to nothing": lambda: fit(clip_grad_norm=0),
    # sizes
    "a target batch of 0": lambda: fit(target_batch=0),
    "a target batch in words": lambda: fit(target_batch="100"),
    "a target batch that is a fraction": lambda: fit(target_batch=100.5),
    "micro-batches of 0": lambda: fit(micro_batch=0),
    "micro-batches that are not known": lambda: fit(micro_batch="max"),
    "no epochs": lambda: fit(epochs=0, max_steps=None),
    "steps that are negative": lambda: fit(max_steps=-1),
    # the device and its memory
    "a device by another name": lambda: fit(device="gpu"),
    "a card that is not there": lambda: fit(device="cuda:7"),
    "a precision by another name": lambda: fit(precision="float16"),
    "a limit in words": lambda: fit(memory_limit="a lot"),
    "a limit above all": lambda: fit(memory_limit=1.5),
    "a limit that is too small": lambda: fit(memory_limit="1MiB"),
    "a sample that does not fit": lambda: fit(Stubborn(4, 3)),
    "offloading on the CPU": lambda: fit(memory="offload"),
    "logits that are not there": lambda: fit(memory="chunked_loss"),
    "blocks that are not there": lambda: fit(memory="checkpoint:Block"),
    "choosing and naming at once": lambda: fit(memory=["auto", "checkpoint"]),
    # what goes on around
    "a single callback": lambda: fit(callbacks=autoaccum.Callback()),
    "a function for a callback": lambda: fit(callbacks=[print]),
    "a checkpoint below a file": below_a_file,
    "resuming without a folder": lambda: fit(resume=True),
    "metrics without data for them": lambda: fit(metrics=lambda outputs, targets: 1.0),
    "progress by another name": lambda: fit(progress="loud"),
    "noise measured how often": lambda: fit(noise_scale="often"),
    "one sample and BatchNorm": alone_with_batchnorm,
    # the command line
    "a recipe that is not there": lambda: command("report", "recipe.py"),
    "a function that is not there": lambda: command("report", "recipe.py:jobs", recipe=RECIPE),
    "a recipe without a function": lambda: command("report", "recipe.py", recipe="x = 1"),
    "a recipe that returns nothing": lambda: command("report", "recipe.py", recipe="def job(): pass"),
    "a recipe with an error of syntax": lambda: command("report", "recipe.py", recipe="def job(:"),
    "an option that is not there": lambda: command("report", "recipe.py", "--batch-size", "8", recipe=RECIPE),
    "a number that is none": lambda: command("report", "recipe.py", "--target-batch", "many", recipe=RECIPE),
    "a card that is not known": lambda: command("report", "recipe.py", "--gpu", "rtx-9090", recipe=RECIPE),
    "a command without a placeholder": lambda: command("run", "--target-batch", "8", "--", "python", "train.py"),
    "no command at all": lambda: command("run", "--target-batch", "8"),
}


def answer(name):
    """Make a mistake; return the error."""
    with warnings_silenced(), contextlib.redirect_stderr(io.StringIO()):
        try:
            MISTAKES[name]()
        except Exception as error:  # noqa: BLE001 - that is the question
            return error
    return None


@contextlib.contextmanager
def warnings_silenced():
    import warnings  # noqa: PLC0415 - for this alone

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def lines_of(error):
    """Return an answer as it is printed."""
    text = str(error) if isinstance(error, AnsweredError) else f"{type(error).__name__}: {error}"
    paragraphs = [*text.splitlines(), *getattr(error, "__notes__", ())]
    return [line for paragraph in paragraphs for line in textwrap.wrap(paragraph, WIDTH) or [""]]


def main():
    for name in MISTAKES:
        error = answer(name)
        sys.stdout.write(f"\n{name}\n")
        for line in ["accepted"] if error is None else lines_of(error):
            sys.stdout.write(f"    {line}\n")


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", str(WIDTH))
    main()
