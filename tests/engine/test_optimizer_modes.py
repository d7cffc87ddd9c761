"""Optimizers with modes for training and for evaluation: each part of a run gets the weights that are meant for it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum.errors import StateDamagedError
from support.models.small import assert_bitwise, batches_of, labelled, state_of

SAMPLES, BATCH = 32, 8
DATA = labelled(SAMPLES)


class Averaging(torch.optim.SGD):
    """Keeps the average of the parameters, and swaps it in for an evaluation; its mode is an attribute."""

    is_training = False

    def train(self):
        self._swap(to_training=True)

    def eval(self):
        self._swap(to_training=False)

    def _swap(self, *, to_training):
        for state in self.state.values() if self.is_training is not to_training else ():
            parameter, average = state["of"], state["average"]
            kept = parameter.detach().clone()
            parameter.data.copy_(average)
            average.copy_(kept)
        self.is_training = to_training

    def step(self, closure=None):
        assert self.is_training
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "average" not in state:
                state.update(of=parameter, average=parameter.detach().clone())
            state["average"].lerp_(parameter.detach(), 0.1)


def averaging(parameters):
    return Averaging(parameters, lr=0.1)


def schedule_free(kind):
    def make(parameters):
        library = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
        return getattr(library, f"{kind}ScheduleFree")(parameters, lr=0.05)

    make.__name__ = kind
    return make


LIBRARY = [schedule_free(kind) for kind in ("AdamW", "SGD", "RAdam")]
every = pytest.mark.parametrize("make", [averaging, *LIBRARY], ids=lambda make: make.__name__)
of_library = pytest.mark.parametrize("make", LIBRARY, ids=lambda make: make.__name__)


def a_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batches():
    return batches_of(DATA, *[BATCH] * (SAMPLES // BATCH))


def trained_by_hand(make):
    """As the authors of schedule-free optimizers ask for; return model, optimizer, and a copy in training mode."""
    model = a_model()
    optimizer = make(list(model.parameters()))
    optimizer.train()
    for inputs, targets in batches():
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    training = copy.deepcopy(model.state_dict())
    optimizer.eval()
    return model, optimizer, training


def loss_of(model):
    with torch.no_grad():
        return float(functional.cross_entropy(model(DATA[0]), DATA[1]))


def fit(model, optimizer, **options):
    settings = {"loss": functional.cross_entropy, "micro_batch": BATCH, "device": "cpu", "progress": False} | options
    return autoaccum.fit(model, batches(), BATCH, optimizer=optimizer, **settings)


def runner_of(model, optimizer, **options):
    settings = {"loss": functional.cross_entropy, "device": "cpu"} | options
    return autoaccum.Runner(model, optimizer, autoaccum.plan(BATCH, BATCH), **settings)


@every
def test_fit_evaluates_and_returns_with_the_weights_for_evaluation_and_trains_with_the_others(make):
    model = a_model()
    expected, _, _ = trained_by_hand(make)

    result = fit(model, make, val_loader=[DATA], val_every=1)

    assert_bitwise(model.state_dict(), expected.state_dict())
    assert result.evaluations[-1].loss == pytest.approx(loss_of(expected), rel=1e-12)


@every
def test_second_call_goes_on_training_with_an_optimizer_that_the_first_has_left_for_evaluation(make):
    model, other = a_model(), a_model()
    optimizer = make(list(model.parameters()))

    for _ in range(2):
        fit(model, optimizer)
    fit(other, make, epochs=2)

    for one, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, its, rtol=1e-9, atol=1e-12)


@every
@pytest.mark.parametrize("was_evaluating", [False, True])
def test_evaluation_of_a_runner_leaves_weights_state_and_mode_as_they_were(make, was_evaluating):
    model = a_model()
    runner = runner_of(model, make)
    for batch in batches():
        runner.step(batch)
    if was_evaluating:
        runner.optimizer.eval()
    before = copy.deepcopy([state_of(model), list(runner.optimizer.state.values()), runner.optimizer.param_groups])
    expected, _, training = trained_by_hand(make)

    found = runner.evaluate([DATA])

    assert found == pytest.approx(loss_of(expected), rel=1e-12)
    assert_bitwise([state_of(model), list(runner.optimizer.state.values()), runner.optimizer.param_groups], before)
    assert_bitwise(model.state_dict(), expected.state_dict() if was_evaluating else training)


@every
def test_window_after_memory_ran_out_is_that_of_its_sizes_from_the_start(make):
    model, other = a_model(), a_model()
    runner, plain = runner_of(model, make), runner_of(other, make)
    short = iter([torch.OutOfMemoryError("CUDA out of memory.")])

    def lacking(*_):
        if (error := next(short, None)) is not None:
            raise error

    for number, batch in enumerate(batches()):
        hook = model.register_forward_hook(lacking) if number == 2 else None
        report = runner.step(batch)
        if hook is not None:
            hook.remove()
        plain.plan = autoaccum.Plan(BATCH, report.micro_batches)
        plain.step(batch)

    assert next(short, None) is None
    assert_bitwise(model.state_dict(), other.state_dict())


# --- checkpoints ------------------------------------------------------------------------------------------------------


@every
def test_checkpoints_hold_the_weights_for_evaluation_as_the_model(make, tmp_path):
    model = a_model()

    result = fit(model, make, val_loader=[DATA], val_every=1, checkpoint=tmp_path, max_steps=3)

    losses = [evaluation.loss for evaluation in result.evaluations]
    for path, loss in ((result.best_checkpoint, min(losses)), (result.checkpoint, losses[-1])):
        kept = a_model()
        kept.load_state_dict(torch.load(path / "state.pt", weights_only=True)["modules"][0]["state"])
        assert loss_of(kept) == pytest.approx(loss, rel=1e-12)
    assert loss_of(model) == loss_of(kept)


@of_library
def test_finished_run_that_is_called_again_returns_the_same_weights(make, tmp_path):
    model, again = a_model(), a_model()
    fit(model, make, checkpoint=tmp_path)

    fit(again, make, checkpoint=tmp_path)

    assert_bitwise(again.state_dict(), model.state_dict())


# --- failures ---------------------------------------------------------------------------------------------------------


def failing_in(name, make):
    """An optimizer that has changed the first parameter when memory runs out in `name`, once there is something."""

    def made(parameters):
        optimizer = make(parameters)
        whole = getattr(optimizer, name)

        def half():
            if optimizer.state and optimizer.fails[0]:
                with torch.no_grad():
                    parameters[0].add_(1.0)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            whole()

        setattr(optimizer, name, half)
        optimizer.fails = [True]
        return optimizer

    return made


@every
def test_memory_that_runs_out_in_eval_leaves_everything_as_it_was(make):
    model = a_model()
    runner = runner_of(model, failing_in("eval", make))
    for batch in batches():
        runner.step(batch)
    before = copy.deepcopy([state_of(model), list(runner.optimizer.state.values()), runner.optimizer.param_groups])

    with pytest.raises(torch.OutOfMemoryError):
        runner.evaluate([DATA])

    assert_bitwise([state_of(model), list(runner.optimizer.state.values()), runner.optimizer.param_groups], before)
    runner.optimizer.fails[0] = False
    assert runner.evaluate([DATA]) == pytest.approx(loss_of(trained_by_hand(make)[0]), rel=1e-12)


def test_memory_that_runs_out_in_train_before_a_window_is_told_as_damage():
    model = a_model()
    runner = runner_of(model, failing_in("train", averaging))
    runner.step(batches()[0])
    runner.optimizer.eval()

    with pytest.raises(StateDamagedError, match=r"train\(\) failed"):
        runner.step(batches()[1])


# --- elsewhere --------------------------------------------------------------------------------------------------------


@of_library
def test_one_of_several_optimizers_may_have_modes(make):
    def two(model):
        return [make(list(model[0].parameters())), torch.optim.SGD(model[2].parameters(), lr=0.1)]

    model, other = a_model(), a_model()
    optimizers = two(other)
    optimizers[0].train()
    for inputs, targets in batches():
        functional.cross_entropy(other(inputs), targets).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    optimizers[0].eval()

    fit(model, two(model), val_loader=[DATA], val_every=2)

    assert_bitwise(model.state_dict(), other.state_dict())


@of_library
def test_search_and_report_make_their_steps_in_training_mode_and_leave_the_mode(make):
    model = a_model()
    optimizer = make(list(model.parameters()))
    before = copy.deepcopy([state_of(model), optimizer.param_groups])

    found = autoaccum.find_micro_batch(
        model, DATA, loss=functional.cross_entropy, optimizer=optimizer, device="cpu", memory_limit="1GiB"
    )
    autoaccum.preflight(model, DATA, BATCH, loss=functional.cross_entropy, optimizer=optimizer, device="cpu")

    assert found.micro_batch == SAMPLES
    assert_bitwise([state_of(model), optimizer.param_groups], before)
    assert len(optimizer.state) == 0
