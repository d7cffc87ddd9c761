"""The examples of examples/batches/: cut by their split, each trains as the whole batch does."""

import copy
import inspect
import warnings
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch

import autoaccum
from support.processes.folders import ROOT
from support.training.calls import call_of, loaded

FOLDER = ROOT / "examples" / "batches"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py"))


def job_of(name):
    """Return an example's job, in float64, with the same random numbers every time."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            # torch_geometric compiles functions and reads annotations when it is imported.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "Failing to pass a value to the 'type_params'", DeprecationWarning)
            arguments = call_of(loaded(FOLDER / f"{name}.py").train)
            return SimpleNamespace(**dict.fromkeys(("loss", "forward", "split")) | arguments)
    finally:
        torch.set_default_dtype(before)


def whole_gradient(job):
    """Return the gradient of the first window's loss, by PyTorch alone, from all its samples in one batch."""
    batches, samples = [], 0
    for batch in job.loader:
        batches.append(batch)
        samples += job.split.count(batch)
        if samples == job.target_batch:
            break
    model, batch = copy.deepcopy(job.model), job.split.join(batches)
    if isinstance(job.loss, list):
        (loss,) = job.loss
        values = loss(model, batch)
    elif job.loss is None:
        values = model(**batch).loss
    elif job.forward is not None:
        values = job.loss(job.forward(model, batch), batch)
    elif isinstance(batch, tuple):
        values = job.loss(model(batch[0]), batch[1])
    elif isinstance(batch, Mapping):
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        values = job.loss(model(**inputs), batch)
    else:
        values = job.loss(model(batch), batch)
    parts = values.values() if isinstance(values, Mapping) else [values]
    sum(part[0] / part[1] if isinstance(part, tuple) else part for part in parts).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradient_of(job, size):
    """Return the gradient of the first window's update by fit, in micro-batches of some size."""
    model = copy.deepcopy(job.model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    changes = {"model": model, "optimizer": lambda p: torch.optim.SGD(p, lr=1.0), "max_steps": 1}
    result = autoaccum.fit(**vars(job) | changes | {"micro_batch": size, "device": "cpu", "progress": False})
    assert [report.micro_batches for report in result.history] == [(size,) * (job.target_batch // size)]
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


def accumulated(job, size):
    """Return the gradient of the first window by an accumulator, in micro-batches of some size."""
    arguments = {name: value for name, value in vars(job).items() if name in OF_ACCUMULATOR}
    model = arguments["model"] = copy.deepcopy(job.model)
    window = next(iter(autoaccum.windows(job.loader, job.target_batch, split=job.split)))
    accumulator = autoaccum.Accumulator(**arguments | {"micro_batch": size, "device": "cpu", "precision": "fp32"})
    assert accumulator.backward(window).micro_batches == (size,) * (job.target_batch // size)
    return {name: p.grad for name, p in model.named_parameters()}


OF_ACCUMULATOR = inspect.signature(autoaccum.Accumulator).parameters.keys() - {"callbacks"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_cut_by_its_split_an_example_has_the_gradient_of_the_whole_batch(name):
    job = job_of(name)
    whole = whole_gradient(job)
    assert whole

    for found in (gradient_of(job, 2), accumulated(job, 2)):
        for key, gradient in whole.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_loader_of_the_example_is_regrouped_into_windows(name):
    job = job_of(name)

    made = list(autoaccum.windows(job.loader, 6, split=job.split))

    assert [
        autoaccum.Window([one], job.split).samples if not isinstance(one, autoaccum.Window) else one.samples
        for one in made
    ] == [6, 6, 4]
