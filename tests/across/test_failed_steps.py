"""An optimizer's step that fails: what is undone, what is told, and what it cannot undo is never silent."""

import collections
import contextlib
import signal
from unittest import mock

import pytest
import torch
from torch import nn

import autoaccum
from support.faults.cases import Case
from support.faults.modes import FailAt, differences, state_of
from support.faults.places import lack
from support.faults.sweep import Sweep
from support.faults.training import LackAt, play
from support.models.small import runner_of


class FailIn:
    """Raises before the n-th call of a function, which is an attribute of a class or module."""

    def __init__(self, owner, name, error, *, call=1):
        self.error, self.hits, self.where = error, 0, name
        self._owner, self._left = owner, call

    def __enter__(self):
        whole = self._whole = getattr(self._owner, self.where)

        def instead(*args, **options):  # a function, which a class binds to its objects
            self._left -= 1
            if self._left == 0:
                self.hits += 1
                raise self.error
            return whole(*args, **options)

        setattr(self._owner, self.where, instead)

    def __exit__(self, *_):
        setattr(self._owner, self.where, self._whole)


@pytest.mark.parametrize("window", [0, 1])
def test_memory_that_runs_out_between_two_parameters_is_undone_or_told(window):
    case = Case("mlp", "fp32", "Adam, loop")
    sweep = Sweep(case)
    fault = FailIn(torch.Tensor, "addcdiv_", lack(), call=3)

    played = play(case, {window: fault})

    sweep.judge(played, window, fault, "the third parameter")
    assert (sweep.tally.mismatches, fault.hits) == ([], 1)
    assert bool(sweep.tally.damaged) == (window > 0)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("foreach", [False, True])
def test_first_step_is_taken_back_wherever_it_fails(foreach, every):
    def run(*points):
        torch.manual_seed(0)
        model, fault = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), FailAt(*points)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
        runner = runner_of(model, optimizer, 12, 6)
        make = optimizer.step

        def step():
            with contextlib.nullcontext() if fault.hits else fault:
                make()

        optimizer.step = step
        report = runner.step((torch.rand(12, 6), torch.arange(12) % 3))
        return fault, report.oom_events, state_of(model, optimizer)

    counted, _, expected = run()

    for point in range(1, counted.count + 1, every):
        fault, failures, found = run(point)
        assert (fault.hits, failures, differences(found, expected)) == (1, 1, [])
    assert counted.count > 20


WITHIN = {
    "a step": lambda model, optimizer, batch: runner_of(model, optimizer, 12, 6).step(batch),
    "a search": lambda model, optimizer, batch: autoaccum.find_micro_batch(
        model, batch, optimizer=optimizer, device="cpu"
    ),
}


@pytest.mark.parametrize("work", WITHIN)
def test_copy_that_the_host_has_no_memory_for_is_not_begun(work, monkeypatch):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr=0.1), (torch.rand(12, 6), torch.arange(12) % 3)
    before = state_of(model, optimizer)
    # No limit of a process lets allocations succeed that the machine has no memory for.
    held = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr("autoaccum._memory.host._machine_free", lambda: held - 1)

    with pytest.raises(autoaccum.DoesNotFitError):
        WITHIN[work](model, optimizer, batch)

    assert differences(state_of(model, optimizer), before) == []


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("foreach", [False, True])
def test_step_for_newly_trained_layers_is_undone_wherever_memory_runs_out(foreach, every):
    def run(*points):
        torch.manual_seed(0)
        model, fault = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), FailAt(*points)
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
        runner, make, window = (
            runner_of(model, optimizer, 12, 6),
            optimizer.step,
            (torch.rand(12, 6), torch.arange(12) % 3),
        )
        for _ in range(2):  # the first two windows are checked
            runner.step(window)

        def step():
            with contextlib.nullcontext() if fault.hits else fault:
                make()

        optimizer.step = step
        model[0].requires_grad_(True)
        report = runner.step(window)
        return fault, report.oom_events, state_of(model, optimizer)

    counted, _, expected = run()

    for point in range(1, counted.count + 1, every):
        fault, failures, found = run(point)
        assert (fault.hits, failures, differences(found, expected)) == (1, 1, [])


def test_reservation_that_cannot_be_had_leaves_everything_as_it_was():
    class Short(autoaccum.Simulated):
        is_short = False

        def reserve(self, extra_bytes):
            if self.is_short:
                raise torch.OutOfMemoryError("out of memory (refused)")
            super().reserve(extra_bytes)

    device, model = Short("1GiB"), nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.3))
    runner = runner_of(model, torch.optim.Adam(model.parameters(), foreach=True), 12, 6, device=device)
    batch = torch.rand(12, 6), torch.arange(12) % 3
    runner.step(batch)
    before, device.is_short = state_of(model, runner.optimizer), True

    with pytest.raises(autoaccum.DoesNotFitError, match="the optimizer's step does not fit"):
        runner.step(batch)

    assert differences(state_of(model, runner.optimizer), before) == []


@pytest.mark.parametrize(
    ("optimizer", "kernels"),
    [
        ("SGD, foreach", ("_foreach_mul_", "_foreach_add_")),
        ("Adam, foreach", ("_foreach_add_", "_foreach_lerp_", "_foreach_addcmul_", "_foreach_addcdiv_")),
    ],
)
def test_kernels_over_lists_that_fail_before_they_write_are_undone_and_later_ones_told(optimizer, kernels):
    case, told = Case("mlp", "fp32", optimizer), []

    for kernel in kernels:
        sweep = Sweep(case)
        fault = FailIn(torch, kernel, lack())
        played = play(case, {1: fault})
        sweep.judge(played, 1, fault, kernel)
        assert (sweep.tally.mismatches, fault.hits) == ([], 1)
        told.append(bool(sweep.tally.damaged))

    assert told == [False] + [True] * (len(kernels) - 1)


def test_memory_that_runs_out_again_after_a_check_of_the_loss_is_no_damage_to_frozen_layers():
    sweep, hits = Sweep(Case("frozen layers")), 0

    for point in range(150, 450, 25):
        fault = LackAt(point, point + 1)
        played = play(sweep.case, {1: fault})
        sweep.judge(played, 1, fault, f"operators {point} and {point + 1}")
        hits += fault.hits

    assert (sweep.tally.mismatches, hits) == ([], 24)


def test_error_of_a_callback_arrives_unchanged_and_leaves_the_state_before_the_window():
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    mine = LookupError("the user's own")

    class Careless(autoaccum.Callback):
        def on_oom(self, event, *, step):
            raise mine

    runner = runner_of(model, samples=12, micro_batch=6, loss_reduction="mean", callbacks=[Careless()])
    window = torch.rand(12, 6), torch.randint(0, 3, (12,))
    runner.step(window)
    before = state_of(model, runner.optimizer)

    with FailAt(30), pytest.raises(LookupError) as caught:
        runner.step(window)

    assert caught.value is mine
    assert differences(state_of(model, runner.optimizer), before) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_during_the_update_waits_for_its_end(number):
    class Stop(BaseException):
        pass

    def stop(*_):
        raise Stop

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = runner_of(model, optimizer, 8, 8)
    optimizer.register_step_pre_hook(lambda *_: signal.raise_signal(number))
    before = model.weight.detach().clone()
    former = signal.signal(number, stop)

    try:
        with pytest.raises(Stop):
            runner.step((torch.randn(8, 4), torch.randint(0, 3, (8,))))
    finally:
        signal.signal(number, former)

    assert not torch.equal(model.weight, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_losses_that_could_not_be_tried_for_lack_of_memory_are_told():
    class Picky(nn.Linear):
        def forward(self, inputs):
            if len(inputs) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(inputs)

    def plain(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    runner = runner_of(Picky(6, 3), samples=12, micro_batch=1, loss=plain)

    with pytest.warns(autoaccum.LossWarning, match="two samples .* do not fit at once, so .* not checked"):
        report = runner.step((torch.rand(12, 6), torch.randint(0, 3, (12,))))

    assert report.micro_batches == (1,) * 12
    assert len(report.warnings) == 1


def test_hooks_on_the_optimizer_do_not_count_trials():
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    batch = torch.rand(12, 6), torch.randint(0, 3, (12,))

    autoaccum.find_micro_batch(model, batch, optimizer=optimizer, device="cpu")

    assert calls == []
    optimizer.step()
    assert calls == [1]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_fused_step_that_failed_is_made_again_with_one_scale(name):
    def trained(fails):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, fused=True)
        if fails:
            first = optimizer.register_step_pre_hook(lambda *_: (first.remove(), FailAt().fail()))
        runner = autoaccum.Runner(model, optimizer, autoaccum.plan(6, 3), loss=nn.CrossEntropyLoss(), precision="fp16")
        batch = torch.randn(6, 4), torch.arange(6) % 3
        return runner.step(batch).oom_events, state_of(model, optimizer)

    (none, expected), (once, found) = trained(fails=False), trained(fails=True)

    assert (none, once) == (0, 1)
    assert differences(found, expected) == []


class Counting(torch.optim.Optimizer):
    """SGD that counts its steps in several places before it writes."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.param_groups[0] |= {"tensor": torch.zeros(()), "list": [], "set": set()}
        self.fails = False

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        state = self.state[group["params"][0]]
        state.setdefault("counter", collections.Counter())["n"] += 1
        state.setdefault("set", set()).add(len(state["set"]))
        factors = state.setdefault("factors", [torch.zeros(2)])
        factors[0] = factors[0] + 1
        by_name = state.setdefault("by name", {"of": torch.zeros(2)})
        by_name["of"] = by_name["of"] + 1
        group["list"].append(0)
        group["set"].add(len(group["set"]))
        self._maybe_fail()
        for parameter in group["params"]:
            self.state[parameter]["is_there"] = True
            parameter.sub_(group["lr"] * parameter.grad)

    def _maybe_fail(self):
        if self.fails:
            self.fails = False
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")


@pytest.mark.parametrize("at", [0, 1, 2])
def test_containers_in_state_and_groups_are_put_back(at):
    model = nn.Linear(3, 2)
    optimizer = Counting(model.parameters())
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(6, 3), loss=nn.functional.cross_entropy)
    for number in range(3):
        optimizer.fails = number == at
        runner.step((torch.randn(6, 3), torch.randint(0, 2, (6,))))
    (group,) = optimizer.param_groups
    state = optimizer.state[model.weight]
    assert (len(group["list"]), len(group["set"]), state["counter"]["n"], len(state["set"])) == (3, 3, 3, 3)
    assert state["factors"][0].tolist() == state["by name"]["of"].tolist() == [3.0, 3.0]


def test_step_that_fails_after_it_wrote_a_tensor_of_its_group_is_not_repeated():
    class Writes(Counting):
        def _maybe_fail(self):
            self.param_groups[0]["tensor"].add_(1)
            super()._maybe_fail()

    model = nn.Linear(3, 2)
    optimizer = Writes(model.parameters())
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(6, 3), loss=nn.functional.cross_entropy)
    runner.step((torch.randn(6, 3), torch.randint(0, 2, (6,))))
    runner.step((torch.randn(6, 3), torch.randint(0, 2, (6,))))
    optimizer.fails = True
    with pytest.raises(autoaccum.errors.StateDamagedError):
        runner.step((torch.randn(6, 3), torch.randint(0, 2, (6,))))


# --- what a step of torch's optimizers writes before it fails ---------------------------------------------------------


def test_step_counters_that_are_numbers_go_back_with_a_step_that_failed():
    model = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True, mode="mean"))
    optimizer = torch.optim.SparseAdam(model.parameters())
    runner = runner_of(model, optimizer, 8, 8, loss=lambda outputs, targets: (outputs - targets).square().mean())
    batch = torch.randint(0, 20, (8, 3)), torch.randn(8, 4)
    for _ in range(3):
        runner.step(batch)

    with FailIn(torch.optim._functional, "sparse_adam", lack()):
        runner.step(batch)

    assert [state["step"] for state in optimizer.state.values()] == [4]


def test_state_that_was_emptied_is_empty_again_after_a_step_that_failed():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    runner = runner_of(model, optimizer, 8, 8, loss=nn.MSELoss())
    batch = torch.randn(8, 3), torch.randn(8, 2)
    for _ in range(3):
        runner.step(batch)
    for state in optimizer.state.values():
        state.clear()

    with FailIn(torch, "zeros_like", lack(), call=2):
        runner.step(batch)

    assert [state["step"].item() for state in optimizer.state.values()] == [1, 1]


def test_what_is_written_of_parameters_that_have_replaced_others_is_seen():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters())
    runner = runner_of(model, optimizer, 8, 8, loss=nn.MSELoss())
    batch = torch.randn(8, 3), torch.randn(8, 3)
    for _ in range(5):
        runner.step(batch)
    model[0], model[1] = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    for _ in range(2):
        runner.step(batch)

    def begun(_params, _grads, averages, *rest, **_):
        rest[2][0] += 1
        averages[0].mul_(0.9)
        raise lack()

    with mock.patch("torch.optim.adam._single_tensor_adam", begun), pytest.raises(autoaccum.errors.StateDamagedError):
        runner.step(batch)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.used = nn.Linear(4, 8), "one"
        self.heads = nn.ModuleDict({"one": nn.Linear(8, 3), "other": nn.Linear(8, 3)})

    def forward(self, inputs):
        return self.heads[self.used](self.body(inputs))


def two_heads():
    model = TwoHeads()
    groups = [{"params": part.parameters()} for part in (model.body, *model.heads.values())]
    return model, runner_of(model, optimizer=torch.optim.Adam(groups, 0.1, foreach=False))


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, ValueError])
def test_step_that_makes_state_for_another_head_is_undone_when_it_fails(kind):
    (model, runner), (undisturbed, other) = two_heads(), two_heads()
    batch = torch.randn(8, 4), torch.arange(8) % 3
    for _ in range(3):
        runner.step(batch)
        other.step(batch)
    model.used = undisturbed.used = "other"
    before = state_of(model, runner.optimizer)

    with FailIn(torch, "zeros_like", kind("CUDA out of memory."), call=2):
        if kind is ValueError:
            with pytest.raises(ValueError, match="CUDA"):
                runner.step(batch)
            assert differences(state_of(model, runner.optimizer), before) == []
        runner.step(batch)
    other.step(batch)

    assert differences(state_of(model, runner.optimizer), state_of(undisturbed, other.optimizer)) == []
