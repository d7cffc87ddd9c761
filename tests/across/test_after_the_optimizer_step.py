"""Once the optimizer has stepped there is no way back: no update is made twice, and half of one is never kept."""

import os
import signal

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum import StepCompleteError
from support.faults import after_step
from support.models.small import batches_of, classifier, fit_quietly, labelled
from support.training.long_runs import Run, checkpoints


@pytest.fixture(scope="module")
def undisturbed():
    return after_step.after_each_window()


# --- memory runs out at each point ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "every"), [("call", 149), ("operator", 3), pytest.param("call", 37, marks=pytest.mark.sweep)]
)
def test_memory_that_runs_out_after_the_step_makes_no_update_twice(tmp_path, undisturbed, kind, every):
    points = after_step.points_of(tmp_path / "counted", 3, kind, checkpoint_every=2)

    losses, ends = [], set()
    for point in range(1, points + 1, every):
        found, end = after_step.judged(tmp_path / str(point), 3, point, kind, undisturbed, checkpoint_every=2)
        losses += found
        ends.add(end)

    assert not losses
    assert "StepCompleteError" in ends


def test_memory_that_stays_out_after_the_step_makes_no_update_twice(tmp_path, undisturbed):
    losses = []
    for point in (1, 9):
        losses += after_step.judged(
            tmp_path / str(point), 3, point, "call", undisturbed, lasts=True, checkpoint_every=2
        )[0]

    assert not losses


@pytest.mark.parametrize("who", [0, 1])
def test_rank_that_lacks_memory_after_the_step_ends_all_with_the_same_parameters(rank_pool, tmp_path, who):
    tries = [(3, 3, "operator"), (3, 2, "call"), (3, 13, "call")]

    answers = rank_pool.run("support.faults.after_step:on_ranks", str(tmp_path), who, tries, size=2)

    assert all(one.fault["hits"] for one in answers[who])
    assert not after_step.judged_on_ranks(tries, answers, who)
    assert "StepCompleteError" in {one.kind for one in answers[who]}


def test_rank_that_fails_behind_its_last_update_is_heard_of_where_no_checkpoint_is_written(rank_pool, tmp_path):
    tries = [(after_step.WINDOWS, point, "call") for point in (2, 9)]

    answers = rank_pool.run("support.faults.after_step:on_ranks", str(tmp_path), 1, tries, keeps=False, size=2)

    assert not after_step.judged_on_ranks(tries, answers, 1)
    assert {one.kind for one in answers[0]} == {"RankFailedError"}


# --- what is the user's -----------------------------------------------------------------------------------------------


class Failing(torch.optim.lr_scheduler.StepLR):
    """Fails when it moves for the n-th time."""

    def __init__(self, optimizer, moves=6):
        self.moves = moves
        super().__init__(optimizer, 4)

    def step(self, *arguments):
        if self.last_epoch == self.moves - 1:
            self.fail()
        super().step(*arguments)

    def fail(self):
        raise MemoryError("the scheduler's")


@pytest.mark.parametrize(("interval", "moves", "update"), [("step", 6, 6), ("epoch", 1, 5)])
def test_scheduler_without_memory_ends_training_with_the_update_named(tmp_path, interval, moves, update):
    changes = {"scheduler": lambda optimizer: Failing(optimizer, moves), "scheduler_interval": interval}
    run = Run(checkpoint=tmp_path, checkpoint_every=3, val_loader=None, **changes)
    stepped = []
    run.optimizer.register_step_post_hook(lambda *_: stepped.append(1))

    with pytest.raises(StepCompleteError, match=f"step {update} is made, and not all that moves with it") as caught:
        run.fit()

    assert len(stepped) == caught.value.step == update
    assert isinstance(caught.value.__cause__, MemoryError)
    assert not autoaccum.is_oom(caught.value)
    assert checkpoints(tmp_path) == ["step-00000003"]
    assert "the last one is" in caught.value.__notes__[-1]


def test_rates_stay_as_the_update_was_made_with_where_its_scheduler_fails_in_the_first_window():
    class Fails:
        def step(self):
            raise ValueError("the scheduler's")

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"device": "cpu", "progress": False, "lr_scaling": "linear", "base_batch": 2}

    with pytest.raises(StepCompleteError, match="optimizer step 1 is made"):
        autoaccum.fit(
            model, [(torch.randn(4, 3), torch.randn(4, 2))], 4, optimizer=optimizer, scheduler=Fails(), **settings
        )

    assert optimizer.param_groups[0]["lr"] == 0.2


def test_sigterm_beside_a_failing_scheduler_does_not_make_the_window_again(tmp_path):
    class Interrupted(Failing):
        def fail(self):
            os.kill(os.getpid(), signal.SIGTERM)
            super().fail()

    run = Run(checkpoint=tmp_path, checkpoint_every=3, scheduler=Interrupted, val_loader=None)
    stepped, heard = [], []
    run.optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    former = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with pytest.raises(StepCompleteError, match="optimizer step 6 is made"):
            run.fit()
    finally:
        signal.signal(signal.SIGTERM, former)

    assert (len(stepped), heard) == (6, [1])
    assert checkpoints(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(autoaccum.DoesNotFitError("a call of its own"), autoaccum.DoesNotFitError), (MemoryError(), StepCompleteError)],
)
def test_callback_that_fails_after_the_update_makes_no_other_one(error, expected):
    class Planned(autoaccum.Callback):
        def on_plan(self, plan, *, step, probe):
            raise error

    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))

    with pytest.raises(expected) as caught:
        fit_quietly(
            model,
            batches_of(labelled(32), 8, 8, 8, 8),
            8,
            optimizer=optimizer,
            callbacks=[Planned()],
            save_memory="auto",
        )

    told = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert any(f"step {len(stepped)} is made, and everything that moves with it has moved" in text for text in told)


# --- under a real limit -----------------------------------------------------------------------------------------------


def test_the_sweep_itself_sees_a_window_that_is_made_again(tmp_path, undisturbed, monkeypatch):
    def twice(optimizer, closure=None):
        made(optimizer)
        made(optimizer)

    made = after_step.Counting.step
    monkeypatch.setattr(after_step.Counting, "step", twice)

    assert after_step.judged(tmp_path, 3, 20, "call", undisturbed)[0]


def test_callback_that_fails_once_a_gradient_is_added_is_noted():
    class Fails(autoaccum.Callback):
        def on_plan(self, plan, *, step, probe):
            raise RuntimeError("mine")

    model, (inputs, targets) = nn.Linear(3, 2), (torch.randn(6, 3), torch.randint(0, 2, (6,)))
    accumulator = autoaccum.Accumulator(
        model, loss=nn.functional.cross_entropy, device=autoaccum.Simulated("1MiB"), callbacks=[Fails()]
    )

    def train():
        for _ in range(8):
            model.zero_grad()
            accumulator.backward((inputs, targets))

    with pytest.raises(RuntimeError, match="mine") as caught:
        train()
    assert model.weight.grad is not None
    assert "gradient of this batch is in .grad" in " ".join(caught.value.__notes__)
