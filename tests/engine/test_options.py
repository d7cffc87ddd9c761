"""Arguments that `fit` shares with other entry points are one: the same default, the same check, described by `fit`."""

import inspect
import re

import pytest
from torch import nn

import autoaccum
from autoaccum._engine.options import SHARED

ENTRIES = (autoaccum.Runner, autoaccum.Accumulator, autoaccum.find_micro_batch, autoaccum.preflight)
BAD = {
    "loss_reduction": "median",
    "loss_scope": "epoch",
    "split": 3,
    "batchnorm": "freeze",
    "clip_grad_norm": -1.0,
    "noise_scale": "often",
    "precision": "fp8",
    "micro_batch": 0,
    "cache": "yes",
    "memory_limit": "many",
    "save_memory": "less",
    "oom_report": 3,
    "callbacks": print,
}


def arguments_of(entry):
    return inspect.signature(entry).parameters


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_shared_arguments_have_the_defaults_of_fit(entry):
    fits = arguments_of(autoaccum.fit)
    for name, argument in arguments_of(entry).items():
        if name in SHARED and name in fits and argument.default is not inspect.Parameter.empty:
            assert argument.default == fits[name].default, name


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_shared_arguments_are_described_by_fit_alone(entry):
    found = re.findall(r"^ {8}(\w+): (.*)", inspect.getdoc(entry).replace("\n    ", "\n        "), re.MULTILINE)
    own = {"micro_batch", "device", "loss", "callbacks"}  # what differs is said

    assert found
    for name, text in found:
        if name in SHARED - own and name in arguments_of(autoaccum.fit):
            assert re.match(r"As for `(fit|Accumulator)`", text), (name, text)


def adapters():
    """The entry point of each adapter, and a call of it with options."""
    from accelerate import Accelerator  # noqa: PLC0415

    from autoaccum.integrations import accelerate, lightning, transformers  # noqa: PLC0415

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(3, 2))
    yield accelerate.auto_accumulate, lambda **options: accelerate.auto_accumulate(accelerator, model, **options)
    yield lightning.AutoAccumulate, lightning.AutoAccumulate
    yield transformers.auto_accumulate, lambda **options: transformers.auto_accumulate(transformers.Trainer, **options)


def test_adapters_have_the_defaults_and_the_checks_of_fit():
    fits = arguments_of(autoaccum.fit)
    for entry, call in adapters():
        taken = arguments_of(entry)
        for name in SHARED & taken.keys() & fits.keys():
            assert taken[name].default == fits[name].default, (entry, name)
        for name in BAD.keys() & taken.keys():
            with pytest.raises(autoaccum.InvalidInputError, match=name):
                call(**{name: BAD[name]})
