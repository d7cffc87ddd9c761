"""A step that fails: what is undone, what is told, and what it cannot undo is never silent."""

import signal

import pytest
import torch
from torch import nn

import autoaccum
from fault_cases import Case, Witnessed
from fault_sweep import Sweep
from fault_training import play
from faults import FailAt, differences, state_of


class FailIn:
    """Raises at a call of a function, before or after it has run.

    Args:
        owner: The class or module in which the function stands.
        name: Its name there.
        error: What is raised.
        call: At which call, counted from 1.
        after: Whether the function runs first.
    """

    def __init__(self, owner, name, error, *, call=1, after=False):
        self._owner, self._name, self._after = owner, name, after
        self._calls, self._call = 0, call
        self.error, self.hits, self.where = error, 0, name

    def __enter__(self):
        self._whole = getattr(self._owner, self._name)

        def instead(*args, **options):  # a function, which a class binds to its objects
            return self._instead(*args, **options)

        setattr(self._owner, self._name, instead)

    def __exit__(self, *_):
        setattr(self._owner, self._name, self._whole)

    def fail(self):
        raise self.error

    def _instead(self, *args, **options):
        self._calls += 1
        if self._calls == self._call and not self._after:
            self.hits += 1
            self.fail()
        result = self._whole(*args, **options)
        if self._calls == self._call and self._after:
            self.hits += 1
            self.fail()
        return result


def out_of_memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. (injected)")


SCALED = Case("mlp", "fp16", "Adam, loop", sizes=(4, 4, 4), clip=0.5, pieces=(7, 5))
SITES = {
    "transfer": (autoaccum.Window, "cut"),
    "forward": (Witnessed, "forward"),
    "loss": (nn.CrossEntropyLoss, "forward"),
    "backward": (torch.Tensor, "backward"),
    "unscale": (torch.amp.GradScaler, "unscale_"),
    "clip": (nn.utils, "clip_grads_with_norm_"),
    "scaler": (torch.amp.GradScaler, "step"),
    "optimizer": (torch.optim.Adam, "step"),
}
MICRO_STEP = ("transfer", "forward", "loss", "backward")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("site", MICRO_STEP)
def test_memory_that_runs_out_in_a_micro_batch_changes_nothing_but_the_cut(site, call, after):
    sweep = Sweep(SCALED)
    fault = FailIn(*SITES[site], out_of_memory(), call=call, after=after)

    played = play(SCALED, {1: fault})

    sweep.judge(played, 1, fault, site)
    assert (sweep.tally.mismatches, sweep.tally.survived) == ([], 1)
    assert played.cuts[1] != SCALED.sizes


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("site", ["unscale", "clip"])
def test_memory_that_runs_out_before_the_optimizer_changes_nothing(site, after):
    sweep = Sweep(SCALED)
    fault = FailIn(*SITES[site], out_of_memory(), after=after)

    played = play(SCALED, {1: fault})

    sweep.judge(played, 1, fault, site)
    assert (sweep.tally.mismatches, sweep.tally.survived) == ([], 1)
    assert played.cuts[1] == SCALED.sizes


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("site", ["scaler", "optimizer"])
@pytest.mark.parametrize("window", [0, 1])
def test_memory_that_runs_out_in_the_optimizer_is_undone_or_told(window, site, after):
    sweep = Sweep(SCALED)
    fault = FailIn(*SITES[site], out_of_memory(), after=after)

    played = play(SCALED, {window: fault})

    sweep.judge(played, window, fault, site)
    assert sweep.tally.mismatches == []
    assert bool(sweep.tally.damaged) == (after and window > 0)


@pytest.mark.parametrize("window", [0, 1])
def test_memory_that_runs_out_between_two_parameters_is_undone_or_told(window):
    case = Case("mlp", "fp32", "Adam, loop")
    sweep = Sweep(case)
    fault = FailIn(torch.Tensor, "addcdiv_", out_of_memory(), call=3)

    played = play(case, {window: fault})

    sweep.judge(played, window, fault, "the third parameter")
    assert (sweep.tally.mismatches, fault.hits) == ([], 1)
    assert bool(sweep.tally.damaged) == (window > 0)


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
        fault = FailIn(torch, kernel, out_of_memory())
        played = play(case, {1: fault})
        sweep.judge(played, 1, fault, kernel)
        assert (sweep.tally.mismatches, fault.hits) == ([], 1)
        told.append(bool(sweep.tally.damaged))

    assert told == [False] + [True] * (len(kernels) - 1)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("site", SITES)
def test_error_of_the_users_own_arrives_unchanged_with_its_traceback_whole(site, after):
    mine = LookupError("the user's own")
    sweep = Sweep(SCALED)
    fault = FailIn(*SITES[site], mine, after=after)

    played = play(SCALED, {1: fault}, again=True)

    sweep.judge_error(played, fault, mine, site)
    assert sweep.tally.mismatches == []
    assert bool(sweep.tally.damaged) == (after and site in ("scaler", "optimizer"))


def test_error_of_a_callback_arrives_unchanged_and_leaves_the_state_before_the_window():
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    mine = LookupError("the user's own")

    class Careless(autoaccum.Callback):
        def on_oom(self, event, *, step):
            raise mine

    runner = autoaccum.Runner(
        model, None, autoaccum.plan(12, 6), loss=nn.CrossEntropyLoss(), device="cpu", callbacks=[Careless()]
    )
    window = torch.rand(12, 6), torch.randint(0, 3, (12,))
    runner.step(window)
    before = state_of(model, runner.optimizer)

    with FailAt(30), pytest.raises(LookupError) as caught:
        runner.step(window)

    assert caught.value is mine
    assert differences(state_of(model, runner.optimizer), before) == []


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_interrupt_that_the_optimizer_itself_raises_leaves_no_half_update_in_silence(after):
    interrupt = KeyboardInterrupt()
    case = Case("mlp", "fp32", "Adam, loop")
    fault = FailIn(torch.Tensor, "addcdiv_", interrupt) if after else FailIn(torch.optim.Adam, "step", interrupt)

    played = play(case, {1: fault})

    if after:
        assert isinstance(played.error, autoaccum.StateDamagedError)
        assert played.error.__cause__ is interrupt
    else:
        assert played.error is interrupt
        assert differences(played.left, played.states[1]) == []


def test_a_fault_in_the_first_optimizer_step_takes_back_the_state_it_had_begun_to_make():
    torch.manual_seed(0)
    model, undone = nn.Linear(4, 3), []

    class Watch(autoaccum.Callback):
        def on_oom(self, event, *, step):
            undone.append((event.phase, differences(state_of(model, runner.optimizer), before)))

    runner = autoaccum.Runner(
        model,
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        autoaccum.plan(8, 8),
        loss=nn.CrossEntropyLoss(),
        device="cpu",
        precision="fp32",
        callbacks=[Watch()],
    )
    window = torch.randn(8, 4), torch.randint(0, 3, (8,))

    class InOptimizer(FailAt):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if "zeros_like" in str(operator):
                self.count += 1
                if self.count == 3:
                    self.fail()
            return operator(*args, **(kwargs or {}))

    before = state_of(model, runner.optimizer)
    with InOptimizer():
        report = runner.step(window)

    assert undone == [("optimizer", [])]
    assert report.micro_batches == (8,)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_during_the_update_waits_for_its_end(number):
    class Stop(BaseException):
        pass

    def stop(*_):
        raise Stop

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(8, 8), loss=nn.CrossEntropyLoss(), device="cpu")
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


class InPlace(nn.Module):
    """Normalises its input in place, as a careless transform does; no more than `most` samples fit."""

    def __init__(self, most):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.most = nn.Linear(6, 3), most

    def forward(self, inputs):
        inputs.sub_(0.5).div_(0.25)
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.head(inputs)


def in_place_runner(most):
    model = InPlace(most)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, autoaccum.Runner(model, optimizer, autoaccum.plan(12, 12), loss=nn.CrossEntropyLoss(), device="cpu")


def test_model_that_changes_its_input_is_given_copies_once_that_is_seen():
    model, runner = in_place_runner(12)
    inputs, targets = torch.rand(12, 6), torch.randint(0, 3, (12,))
    runner.step((inputs.clone(), targets))
    model.most = 5
    given = inputs.clone()

    report = runner.step((given, targets))

    assert report.micro_batches == (4, 4, 4)
    assert torch.equal(given, inputs)


def test_window_whose_data_the_model_has_changed_is_not_silently_done_again():
    _, runner = in_place_runner(5)

    with pytest.raises(autoaccum.InvalidInputError, match="changed its input in place"):
        runner.step((torch.rand(12, 6), torch.randint(0, 3, (12,))))


def test_losses_that_could_not_be_tried_for_lack_of_memory_are_told():
    class Picky(nn.Linear):
        def forward(self, inputs):
            if len(inputs) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(inputs)

    def plain(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    runner = autoaccum.Runner(Picky(6, 3), None, autoaccum.plan(12, 1), loss=plain, device="cpu")

    with pytest.warns(autoaccum.LossWarning, match="two samples .* do not fit at once, so .* not checked"):
        report = runner.step((torch.rand(12, 6), torch.randint(0, 3, (12,))))

    assert report.micro_batches == (1,) * 12
    assert len(report.warnings) == 1


def test_optimizer_that_fails_with_an_error_of_its_own_after_writing_says_so():
    class Checked(torch.optim.SGD):
        errors = ()

        def step(self, closure=None):
            super().step(closure)
            for error in self.errors:
                raise error

    model = nn.Linear(6, 3)
    optimizer = Checked(model.parameters(), lr=0.1, foreach=False)
    optimizer.register_step_post_hook(lambda *_: None)  # a hook that does not fail is not what failed
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(12, 6), loss=nn.CrossEntropyLoss(), device="cpu")
    mine = ValueError("mine")
    runner.step((torch.rand(12, 6), torch.randint(0, 3, (12,))))  # the first is guarded by a copy
    optimizer.errors = (mine,)

    with pytest.raises(autoaccum.StateDamagedError) as caught:
        runner.step((torch.rand(12, 6), torch.randint(0, 3, (12,))))

    assert caught.value.__cause__ is mine


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


def test_plain_function_with_class_weights_has_the_gradient_of_the_whole_window():
    weight = torch.tensor([0.1, 1.0, 1.0])
    targets = torch.zeros(64, dtype=torch.long)
    targets[[5, 9, 20]] = 1
    inputs, model = torch.randn(64, 4), nn.Linear(4, 3)
    before = model.weight.detach().clone()

    def weighted(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, weight=weight)

    (expected,) = torch.autograd.grad(weighted(model(inputs), targets), [model.weight])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(64, 10), loss=weighted, device="cpu")

    runner.step((inputs, targets))

    torch.testing.assert_close(before - model.weight.detach(), expected)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_fused_step_that_failed_is_made_again_with_one_scale(name):
    def trained(fails):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, fused=True)
        if fails:
            first = optimizer.register_step_pre_hook(lambda *_: (first.remove(), FailAt().fail()))
        runner = autoaccum.Runner(
            model,
            optimizer,
            autoaccum.plan(6, 3),
            loss=nn.CrossEntropyLoss(),
            precision="fp16",
        )
        batch = torch.randn(6, 4), torch.arange(6) % 3
        return runner.step(batch).oom_events, state_of(model, optimizer)

    (none, expected), (once, found) = trained(fails=False), trained(fails=True)

    assert (none, once) == (0, 1)
    assert differences(found, expected) == []
