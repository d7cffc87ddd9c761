"""Two threads on one model are refused, since both would move the same gradients and modes."""

import threading

import pytest
import torch
from torch import nn

import autoaccum
from support.models.small import assert_bitwise

WINDOW = (torch.randn(20, 6), torch.randint(2, (20,)))
QUIET = {"device": "cpu", "progress": False, "micro_batch": 7}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def during_forward(model, act):
    """Let another thread act once, while the model computes."""
    acts = [act]

    def hook(*_):
        if acts:
            thread = threading.Thread(target=acts.pop())
            thread.start()
            thread.join()

    model.register_forward_pre_hook(hook)


def runner_of(model):
    return autoaccum.Runner(model, sgd(model.parameters()), autoaccum.plan(20, 7), device="cpu")


CALLS = {
    "step": lambda model: runner_of(model).step(WINDOW),
    "evaluate": lambda model: runner_of(model).evaluate([WINDOW]),
    "backward": lambda model: autoaccum.Accumulator(model, device="cpu", micro_batch=7).backward(WINDOW),
    "fit": lambda model: autoaccum.fit(model, [WINDOW], 20, optimizer=sgd, **QUIET),
}


@pytest.mark.parametrize("first", CALLS)
@pytest.mark.parametrize("second", CALLS)
def test_a_second_thread_on_the_same_model_is_refused_and_changes_nothing(first, second):
    refused = []

    def other():
        with pytest.raises(autoaccum.InvalidInputError, match=f"{second} was called .* by a second thread") as error:
            CALLS[second](model)
        refused.append(error)

    torch.manual_seed(0)
    model, undisturbed = nn.Linear(6, 2), nn.Linear(6, 2)
    undisturbed.load_state_dict(model.state_dict())
    during_forward(model, other)
    for one in (model, undisturbed):
        torch.manual_seed(1)
        CALLS[first](one)

    assert len(refused) == 1
    assert_bitwise(model.state_dict(), undisturbed.state_dict())


def test_a_runner_is_refused_to_the_second_of_two_threads():
    def other():
        with pytest.raises(autoaccum.InvalidInputError, match="by a second thread"):
            runner.step(WINDOW)
        refused.append(True)

    model, refused = nn.Linear(6, 2), []
    runner = runner_of(model)
    during_forward(model, other)

    runner.step(WINDOW)
    runner.step(WINDOW)

    assert refused == [True]


def test_a_step_within_a_step_is_refused():
    def hook(*_):
        runner.step(WINDOW)

    model = nn.Linear(6, 2)
    runner = runner_of(model)
    model.register_forward_hook(hook)

    with pytest.raises(autoaccum.InvalidInputError, match="step was called within step"):
        runner.step(WINDOW)


def test_a_callback_may_evaluate_the_model_that_is_trained():
    class Evaluates(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            losses.append(runner_of(model).evaluate([WINDOW]))

    model, losses = nn.Linear(6, 2), []

    autoaccum.fit(model, [WINDOW] * 2, 20, callbacks=[Evaluates()], **QUIET)

    assert len(losses) == 2


def test_threads_that_each_train_a_model_of_their_own_are_left_alone():
    model, reports = nn.Linear(6, 2), []
    during_forward(model, lambda: reports.append(runner_of(nn.Linear(6, 2)).step(WINDOW)))

    reports.append(runner_of(model).step(WINDOW))

    assert len(reports) == 2


def test_threads_that_call_one_batched_function_wait_for_each_other():
    at_work, most = [], []

    def function(inputs):
        at_work.append(None)
        most.append(len(at_work))
        if len(inputs) > 4:
            at_work.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        at_work.pop()
        return inputs + 1

    run, found = autoaccum.batched(function, device="cpu"), []
    threads = [threading.Thread(target=lambda: found.append(run(torch.zeros(32)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert max(most) == 1
    assert all(torch.equal(one, torch.ones(32)) for one in found)
    assert len(found) == 8
