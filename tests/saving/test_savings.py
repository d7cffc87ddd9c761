"""`save_memory=`: by name, or with "auto" added wherever not even one sample fits, kept and remembered."""

import random

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum import Simulated
from support.models.memory_heavy import Feed, Stack, Wide, data, seed
from support.models.small import assert_bitwise, state_of
from support.training.savings import is_plain, trained


def test_next_run_begins_with_what_was_needed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path))
    _, first = trained("3MiB", remembers=True)
    assert "not even one sample fits" in capsys.readouterr().err

    for _ in range(2):
        model, second = trained("3MiB", remembers=True, max_steps=4)

        assert second.savings == first.savings
        assert is_plain(model)
        assert "not even one sample fits" not in capsys.readouterr().err


# --- in a loop of the user's own ---


LOSS = nn.CrossEntropyLoss()
NAMES = ["checkpoint", "checkpoint:Feed", "offload", ["checkpoint", "offload"]]


def stepped(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return autoaccum.Runner(model, optimizer, autoaccum.plan(8, options.pop("micro_batch")), **options).step


def accumulated(model, **options):
    return autoaccum.Accumulator(model, **options).backward


def worked(entry, memory, capacity="1GiB", micro_batch=2):
    model = Wide()
    work = entry(model, loss=LOSS, device=Simulated(capacity), save_memory=memory, micro_batch=micro_batch)
    seed()
    reports = []
    for batch in data()[:2]:
        reports.append(work(batch))
        assert is_plain(model)
    return model, reports


def tensors(model):
    return [tensor for one in model.parameters() for tensor in (one, one.grad) if tensor is not None]


@pytest.mark.parametrize(
    ("entry", "memory"),
    [
        pytest.param(entry, memory, id=f"{memory}-{entry.__name__}", marks=(pytest.mark.sweep,) * ((row + column) % 2))
        for row, entry in enumerate([stepped, accumulated])
        for column, memory in enumerate(NAMES)
    ],
)
def test_updates_are_bitwise_those_without(entry, memory):
    (model, reports), (expected, plain) = worked(entry, memory), worked(entry, None)

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors(model), tensors(expected), strict=True))
    assert [report.loss for report in reports] == [report.loss for report in plain]


@pytest.mark.parametrize("entry", [stepped, accumulated])
def test_auto_saves_memory_once_not_one_sample_fits(entry, capsys):
    (model, reports), (expected, _) = worked(entry, "auto", "2MiB", 1), worked(entry, None, "1GiB", 1)

    assert [report.micro_batches for report in reports] == [(1,) * 8] * 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors(model), tensors(expected), strict=True))
    assert "not even one sample fits; from now on activation checkpointing of" in capsys.readouterr().err


def a_runner(model, **options):
    return autoaccum.Runner(model, torch.optim.SGD(model.parameters(), lr=0.1), autoaccum.plan(8, 4), **options)


def test_block_that_draws_from_pythons_generator_is_refused_each_time():
    class Draws(Feed):
        def forward(self, inputs):
            return super().forward(inputs * (1 + random.random()))  # noqa: S311

    model = Stack(depth=0)
    model.blocks = nn.ModuleList([Draws() for _ in range(2)])
    before = state_of(model)
    runner = a_runner(model, loss=LOSS, device="cpu", precision="fp32", save_memory="checkpoint")

    for _ in range(2):
        seed()
        drawn = random.getstate()
        with pytest.raises(autoaccum.InvalidInputError, match="a Draws draws from Python's or NumPy's generators"):
            runner.step(data()[0])
        assert_bitwise(state_of(model), before)
        assert is_plain(model)
        assert random.getstate() == drawn


@pytest.mark.parametrize("compiles", [lambda model: model, lambda model: model.blocks[1]], ids=["model", "block"])
def test_compiled_blocks_are_not_computed_again(compiles, capsys):
    model = Wide()
    compiles(model).compile(backend="aot_eager")

    with pytest.raises(autoaccum.InvalidInputError, match="save_memory='checkpoint': the blocks are compiled"):
        a_runner(model, loss=LOSS, device="cpu", save_memory="checkpoint")

    _, result = trained("2MiB", model=model, max_steps=1)

    assert result.savings == ("offload",)
    assert "save_memory='auto' leaves out 'checkpoint': the blocks are compiled" in capsys.readouterr().err
    assert is_plain(model)
