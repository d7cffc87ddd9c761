"""Where not even one sample fits: keep less for backward, with the same gradients, and give the model back."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._engine.checkpointing import checkpointed
from autoaccum._engine.fallback import Fallbacks
from autoaccum._engine.offloading import offloaded
from autoaccum._engine.saving_names import check_memory
from autoaccum._memory import Host, Simulated
from fallback_models import Stack, Wide, a_step, data, seed
from helpers import CPU, live_tensors


@pytest.mark.parametrize("way", ["checkpoint", "offload"])
def test_gradients_buffers_and_random_state_are_bitwise_what_they_are_without(way):
    plain, changed = Stack(), Stack()
    fallbacks = Fallbacks([changed], [way], Simulated("1GiB"))

    assert fallbacks.next()
    for _ in range(2):
        for expected, found in zip(a_step(plain), a_step(changed), strict=True):
            assert torch.equal(expected, found)

    fallbacks.end()
    assert "forward" not in vars(changed)
    assert all("forward" not in vars(block) for block in changed.blocks)


def peak_of(model, *contexts):
    memory = Simulated("1GiB")
    seed()
    with memory.limited(None), ExitStack() as changed:
        inputs, targets = torch.randn(512, 32), torch.randint(0, 4, (512,))
        for context in contexts:
            changed.enter_context(context(memory))
        nn.functional.cross_entropy(model(inputs), targets).backward()
        return memory.peak_bytes()


def test_each_way_takes_less_memory_and_both_less_than_checkpointing():
    def by_checkpoint(memory):
        return checkpointed([model], CPU)

    def by_offload(memory):
        return offloaded([model], memory)

    model = Stack(depth=12)
    plain = peak_of(model)
    model = Stack(depth=12)
    less = peak_of(model, by_checkpoint)
    model = Stack(depth=12)
    on_host = peak_of(model, by_offload)
    model = Stack(depth=12)
    both = peak_of(model, by_checkpoint, by_offload)

    assert max(less, on_host) < plain
    assert both < less


class FailsLate(nn.Module):
    """Runs out of memory behind layers whose outputs are kept for the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4), nn.Softmax(1))

    def forward(self, inputs):
        self.inner(inputs)
        raise torch.OutOfMemoryError("simulated lack of memory")


@pytest.mark.parametrize("samples", [2, 2000])
def test_forward_pass_that_fails_under_offloading_keeps_no_tensor(samples):
    model, inputs = FailsLate(), torch.randn(samples, 32)
    before = live_tensors()

    with offloaded([model], Simulated("1GiB")), pytest.raises(torch.OutOfMemoryError):
        model(inputs)

    assert live_tensors() == before


def fit(capacity, **options):
    model = Wide()
    seed()
    options = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
        "loss": nn.CrossEntropyLoss(),
        "progress": "lines",
        "cache": False,
    } | options
    result = autoaccum.fit(model, data(), 16, device=Simulated(capacity), **options)
    return model, result


@pytest.mark.parametrize("probe", ["inline", "before", "off"])
def test_fit_falls_back_where_not_one_sample_fits_and_says_so(probe, capsys):
    with pytest.raises(autoaccum.DoesNotFitError):
        fit("2MiB", probe=probe)

    model, result = fit("2MiB", fallback="checkpoint", probe=probe)

    said = capsys.readouterr().err
    assert "not even one sample fits; from now on activation checkpointing of 4 Feed blocks" in said
    assert result.steps == 3
    assert all("forward" not in vars(block) for block in model.blocks)


def test_training_after_a_fallback_is_bitwise_training_with_the_same_cut_and_memory_for_all():
    model, result = fit("2MiB", fallback="checkpoint")
    assert len({report.micro_batches for report in result.history}) <= 2

    other = Wide()
    seed()
    runner = autoaccum.Runner(
        other, torch.optim.SGD(other.parameters(), lr=0.1), result.plan, device="cpu", precision="fp32"
    )
    for window, report in zip(autoaccum.windows(data(), 16), result.history, strict=True):
        runner.plan = autoaccum.Plan(16, report.micro_batches)
        runner.step(window)

    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_ways_are_taken_in_order_until_one_sample_fits(capsys):
    _, result = fit("1500KiB", fallback=("checkpoint", "offload"))

    said = capsys.readouterr().err
    assert said.index("checkpointing of 4 Feed") < said.index("kept in the host's memory")
    assert result.steps == 3


def test_error_names_what_does_not_fit_where_no_way_is_left():
    with pytest.raises(autoaccum.DoesNotFitError, match="a sample of shapes") as caught:
        fit("800KiB", fallback=("checkpoint", "offload"))

    (note,) = caught.value.__notes__
    assert note.startswith("autoaccum: in force already: activation checkpointing of 4 Feed blocks; what backward")


def test_error_names_what_is_not_in_force_yet():
    with pytest.raises(autoaccum.DoesNotFitError) as neither:
        fit("800KiB")
    with pytest.raises(autoaccum.DoesNotFitError) as one:
        fit("800KiB", fallback="checkpoint")
    with pytest.raises(autoaccum.DoesNotFitError) as both:
        fit("800KiB", fallback=("checkpoint", "offload"))

    assert "memory='checkpoint'" in str(neither.value)
    assert "memory='offload'" in str(neither.value)
    assert "memory='checkpoint'" not in str(one.value)
    assert "memory='offload'" in str(one.value)
    assert "memory='" not in str(both.value)
    assert "less state" not in str(neither.value)  # SGD has none


def lacks_memory(*_):
    raise torch.OutOfMemoryError("simulated lack of memory in the optimizer")


@pytest.mark.parametrize("saving", [{"fallback": "checkpoint"}, {"memory": "auto"}])
def test_nothing_is_computed_again_where_memory_lacks_for_the_optimizers_step(capsys, saving):
    optimizer = None

    def made(parameters):
        nonlocal optimizer
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_pre_hook(lacks_memory)
        return optimizer

    with pytest.raises(autoaccum.DoesNotFitError, match="even with no activations alive") as caught:
        fit("1GiB", optimizer=made, **saving)

    assert not caught.value.saving_helps
    assert "foreach=False" in str(caught.value)
    assert "not even one sample fits" not in capsys.readouterr().err


def test_runner_computes_nothing_again_where_memory_lacks_for_the_optimizers_step():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lacks_memory)
    runner = autoaccum.Runner(
        model, optimizer, autoaccum.plan(16, 8), loss=nn.CrossEntropyLoss(), device=CPU, memory="auto"
    )

    with pytest.raises(autoaccum.DoesNotFitError, match="even with no activations alive"):
        runner.step((torch.randn(16, 32), torch.zeros(16, dtype=torch.long)))

    assert runner.memory == ()


def test_error_in_a_window_names_the_limit_that_is_in_force():
    model = Stack()
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        autoaccum.plan(4, 4),
        loss=nn.CrossEntropyLoss(),
        device=Simulated("1GiB"),
        memory_limit="20KiB",
    )

    with pytest.raises(autoaccum.DoesNotFitError, match=r"20\.0 KiB") as caught:
        runner.step((torch.randn(4, 32), torch.zeros(4, dtype=torch.long)))

    assert "a higher memory_limit" in str(caught.value)


def test_error_names_no_way_that_would_change_nothing():
    model = nn.Linear(32, 4)

    with pytest.raises(autoaccum.DoesNotFitError) as caught:
        autoaccum.find_micro_batch(model, data()[0], device=Simulated("1200B"), optimizer=torch.optim.AdamW)

    assert "fallback='checkpoint'" not in str(caught.value)
    assert "an optimizer with less state than AdamW" in str(caught.value)


def test_model_without_blocks_is_said_to_have_none(capsys):
    model = nn.Linear(32, 4)

    with pytest.raises(autoaccum.DoesNotFitError):
        autoaccum.fit(model, data(), 16, device=Simulated("700B"), fallback="checkpoint", cache=False)

    assert "no repeated blocks to checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("fallback", ["checkpoints", ("offload", 3)])
def test_unknown_way_is_refused(fallback):
    with pytest.raises(autoaccum.InvalidInputError, match="choose from 'checkpoint', 'offload'"):
        check_memory(None, fallback, Simulated("1MiB"))


def test_offloading_from_the_host_to_the_host_is_refused():
    with pytest.raises(autoaccum.InvalidInputError, match="on host memory they already are there"):
        check_memory(None, "offload", Host())
