"""`memory=` by names in a loop of the user's own: steps take less, updates stay bitwise, and the model is as it was."""

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum import Simulated
from fallback_models import Wide, data, seed

NAMES = ["checkpoint", "checkpoint:2", "offload", ["checkpoint", "offload"]]


def is_plain(model):
    return all(not {"forward", "__getstate__"} & set(vars(part)) for part in model.modules())


def stepped(memory, capacity="1GiB", micro_batch=2):
    model = Wide()
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
        autoaccum.plan(8, micro_batch),
        loss=nn.CrossEntropyLoss(),
        device=Simulated(capacity),
        memory=memory,
    )
    seed()
    reports = []
    for batch in data()[:2]:
        reports.append(runner.step(batch))
        assert is_plain(model)
    return model, reports


def accumulated(memory, capacity="1GiB", micro_batch=2):
    model = Wide()
    accumulator = autoaccum.Accumulator(
        model,
        loss=nn.CrossEntropyLoss(),
        device=Simulated(capacity),
        memory=memory,
        micro_batch=micro_batch,
        cache=False,
    )
    seed()
    reports = []
    for batch in data()[:2]:
        reports.append(accumulator.backward(batch))
        assert is_plain(model)
    return model, reports


def tensors(model):
    return [tensor for one in model.parameters() for tensor in (one, one.grad) if tensor is not None]


@pytest.mark.parametrize("work", [stepped, accumulated])
@pytest.mark.parametrize("memory", NAMES, ids=str)
def test_updates_are_bitwise_those_without(work, memory):
    (model, reports), (expected, plain) = work(memory), work(None)

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors(model), tensors(expected), strict=True))
    assert [report.loss for report in reports] == [report.loss for report in plain]


@pytest.mark.parametrize("work", [stepped, accumulated])
def test_one_sample_fits_that_does_not_without(work):
    with pytest.raises(autoaccum.DoesNotFitError):
        work(None, "2MiB", 1)

    _, reports = work("checkpoint", "2MiB", 1)

    assert [report.micro_batches for report in reports] == [(1,) * 8] * 2


@pytest.mark.parametrize("work", [stepped, accumulated])
def test_auto_saves_memory_once_not_one_sample_fits(work, capsys):
    (model, reports), (expected, _) = work("auto", "2MiB", 1), work(None, "1GiB", 1)

    assert [report.micro_batches for report in reports] == [(1,) * 8] * 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors(model), tensors(expected), strict=True))
    assert "not even one sample fits; from now on activation checkpointing of" in capsys.readouterr().err


@pytest.mark.parametrize("work", [stepped, accumulated])
def test_auto_changes_nothing_where_batches_fit(work, capsys):
    (model, _), (expected, _) = work("auto"), work(None)

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors(model), tensors(expected), strict=True))
    assert "memory=" not in capsys.readouterr().err


def test_error_where_nothing_helps_names_what_is_in_force():
    for work in (stepped, accumulated):
        with pytest.raises(autoaccum.DoesNotFitError) as caught:
            work("auto", "800KiB", 1)
        (note,) = caught.value.__notes__
        assert note.startswith("autoaccum: in force already: activation checkpointing of 4 Feed blocks; what backward")


def test_runner_says_what_saves_memory():
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = autoaccum.Runner(
        model,
        optimizer,
        autoaccum.plan(8, 8),
        loss=nn.CrossEntropyLoss(),
        device=Simulated("2MiB"),
        memory="auto",
    )
    before = runner.memory

    report = runner.step(data()[0])

    assert (before, runner.memory) == ((), ("checkpoint",))
    assert sum(report.micro_batches) == 8
    assert runner.plan.target_batch == 8


def test_error_in_a_step_leaves_the_model_as_it_was():
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(8, 8), device="cpu", memory="checkpoint")

    with pytest.raises(autoaccum.InvalidInputError):
        runner.step((torch.randn(8, 32), "no targets"))

    assert is_plain(model)


def test_evaluation_is_what_it_is_without():
    def evaluated(memory):
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runner = autoaccum.Runner(model, optimizer, autoaccum.plan(8, 4), device="cpu", memory=memory)
        return runner.evaluate(data())

    assert evaluated("checkpoint") == evaluated(None)


def a_runner(model, **options):
    return autoaccum.Runner(model, torch.optim.SGD(model.parameters(), lr=0.1), autoaccum.plan(8, 4), **options)


@pytest.mark.parametrize("make", [autoaccum.Accumulator, a_runner])
@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ("nope", "is unknown"),
        ("offload", "already are there"),
        ("chunked_loss", "no layer that makes logits was found"),
        ("checkpoint", "no repeated blocks"),
    ],
)
def test_what_has_no_effect_is_refused_when_it_is_made(make, memory, said):
    with pytest.raises(autoaccum.InvalidInputError, match=said):
        make(nn.Linear(4, 4), device="cpu", memory=memory)
