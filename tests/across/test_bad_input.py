"""Bad input is refused by name and with the remedy, before anything: model, optimizer, loader and files stay."""

import gc
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum.errors import DoesNotFitError, InvalidInputError
from support.bad_input import options, rows
from support.bad_input.calls import CALLS, READ_ONLY, listed, missing
from support.bad_input.engine import judge
from support.models.small import (
    CountingLoader,
    assert_bitwise,
    batches_of,
    classifier,
    fit_quietly,
    labelled,
    runner_of,
    state_of,
)

LISTED = listed()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", rows.cases(), ids=repr)
def test_bad_call_is_refused_in_its_words_and_changes_nothing(case, folder):
    assert judge(case, folder) == ""


def test_every_public_argument_has_bad_values():
    assert not missing(), "say in tests/support/bad_input/calls.py (CALLS) what these may be"
    assert set(CALLS) - {"Runner.step", "Runner.evaluate"} | READ_ONLY == set(autoaccum.__all__)


@pytest.mark.parametrize("cases", LISTED.values(), ids=LISTED)
def test_listed_bad_input_is_refused_by_name_and_changes_nothing(cases, folder):
    assert [wrong for case in cases if (wrong := judge(case, folder))] == []


def test_every_option_of_the_command_line_has_bad_values():
    assert not options.missing(), "say in tests/support/bad_input/options.py what these may not be"


@pytest.mark.parametrize("command", options.BAD)
def test_bad_option_is_refused_by_name_and_leaves_nothing(command, folder):
    cases = [case for case in options.cases() if case[0] == command]

    assert [wrong for case in cases if (wrong := options.judge(case, folder))] == []


# --- after the first window -------------------------------------------------------------------------------------------


def test_bad_batch_in_the_middle_leaves_what_was_done():
    model = classifier()
    batches = [*batches_of(labelled(8), 4, 4), (torch.zeros(4, 4).double(), torch.zeros(3))]
    loader, steps = CountingLoader(batches), []

    class Steps(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            steps.append(report.samples)

    with pytest.raises(InvalidInputError, match=re.escape("0: (4, 4), 1: (3,)")):
        fit_quietly(model, loader, 4, callbacks=[Steps()])

    assert steps == [4, 4]
    assert all(parameter.grad is None for parameter in model.parameters())


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
def test_window_in_which_nothing_counts_is_refused_and_makes_no_update(loss, nothing, windows_before, micro_batch):
    model = classifier()
    inputs, targets = labelled(4)
    runner = runner_of(model, samples=4, micro_batch=micro_batch, loss=loss)
    targets[3] = nothing
    for _ in range(windows_before):
        runner.step((inputs, targets))
    before = state_of(model)

    with pytest.raises(InvalidInputError, match="leave such samples out"):
        runner.step((inputs, torch.full_like(targets, nothing)))

    assert_bitwise(state_of(model), before)


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

    with pytest.raises(DoesNotFitError) as caught:
        fit_quietly(Wide(), [WIDE], 2, device=memory, memory_limit="20MiB")

    said = str(caught.value)
    assert "a sample of shapes (4,) and (1,) does not fit on" in said
    assert "; try a higher memory_limit, precision='bf16', " in said


# --- calls by another convention -------------------------------------------------------------------------------------


def refused(**options):
    with pytest.raises(InvalidInputError) as caught:
        rows.by_step(**options)
    return caught.value


def test_what_is_said_of_a_mapping_works():
    said = refused(model=nn.Linear(4, 3), batch=rows.MAPPING, loss=rows.squares)
    forward, loss = re.search(r"pass forward=(.*) and loss=(.*)$", str(said)).groups()
    names = {"criterion": rows.squares}

    rows.by_step(rows.MAPPING, model=nn.Linear(4, 3), loss=eval(loss, names), forward=eval(forward, names))  # noqa: S307


def test_error_of_the_model_that_does_not_take_a_batch_is_the_cause():
    assert isinstance(refused(model=nn.Linear(4, 3), batch=[rows.X] * 3, loss=None).__cause__, TypeError)


class Wrong(nn.Linear):
    def forward(self, inputs):
        return len(super().forward(inputs), 1)


@pytest.mark.parametrize(
    ("model", "loss", "batch"),
    [
        (Wrong, rows.squares, rows.PAIR),
        (Wrong, [rows.of_model], rows.PAIR),
        (Wrong, rows.squares, {"inputs": rows.X}),
        (nn.Linear, lambda outputs, targets: len(outputs, 1), rows.PAIR),
        (nn.Linear, [lambda model, batch: len(model, 1)], rows.PAIR),
    ],
    ids=["pair", "list of losses", "mapping", "loss", "loss in a list"],
)
def test_error_of_the_model_or_the_loss_itself_arrives_as_it_is(model, loss, batch):
    with pytest.raises(TypeError, match=r"len\(\) takes exactly one argument"):
        rows.by_step(batch, model=model(4, 3), loss=loss)


def test_inputs_and_targets_apart_are_refused_with_how_they_are_passed():
    model = nn.Linear(4, 3)
    accumulator = autoaccum.Accumulator(model, loss=rows.squares, device="cpu")

    with pytest.raises(InvalidInputError, match=r"pass inputs and targets as one: backward\(\(inputs, targets\)\)"):
        accumulator.backward(*rows.PAIR)
    with pytest.raises(InvalidInputError, match="step takes one batch, and got 2 arguments"):
        rows.runner_of(model).step(*rows.PAIR)

    assert all(parameter.grad is None for parameter in model.parameters())


def test_model_that_takes_the_whole_batch_gets_it():
    class Takes(nn.Linear):
        def forward(self, batch):
            inputs, _, targets = batch
            return {"loss": nn.functional.cross_entropy(super().forward(inputs), targets)}

    assert fit_quietly(Takes(4, 3), [[rows.X, rows.LENGTHS, rows.CLASSES]] * 2, 4).steps == 2


def test_functions_with_arguments_of_their_own_are_restarted_and_batched():
    @autoaccum.find_executable_micro_batch(target=4)
    def train(micro_batch, accumulation_steps, config, *, rate):
        return micro_batch, accumulation_steps, config, rate

    def scaled(batch, factor, *, shift):
        return batch * factor + shift

    assert train("config", rate=2) == (4, 1, "config", 2)
    assert autoaccum.batched(scaled)(torch.ones(3), 2, shift=1).tolist() == [3, 3, 3]
    assert autoaccum.batched(scaled)(torch.ones(0), 2, shift=1).tolist() == []
