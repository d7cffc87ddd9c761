"""Trainings on several ranks in which one of them, at a point drawn at random, runs out of memory."""

import random
from contextlib import ExitStack
from unittest import mock

import torch

import autoaccum
import overlap_training
import rank_training
from autoaccum._distributed.process_group import Ranks
from autoaccum._engine.runner import WindowRunner
from faults import FailAt
from rank_training import DataLoader

SAMPLES, TARGET = 26, 8
OPTIMIZERS = {"sgd": rank_training.sgd, "adam": rank_training.adam}


class FailAtPoint(FailAt):
    """Counts what a rank computes in its windows, and not what it says to the others.

    What fails elsewhere, in a loader or in the preparations, is no lack of memory that a smaller cut could mend.
    """

    def __init__(self, *points, lasts=False):
        super().__init__(*points)
        self.lasts = lasts
        self.is_talking = True

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if self.is_talking or operator.is_view:  # which takes no memory
            return operator(*args, **(kwargs or {}))
        if self.lasts and self.hits:
            self.points.add(self.count + 1)
        return super().__torch_dispatch__(operator, types, args, kwargs)

    def while_called(self, method, *, is_talking):
        def call(owner, *args, **kwargs):
            before, self.is_talking = self.is_talking, is_talking
            try:
                return method(owner, *args, **kwargs)
            finally:
                self.is_talking = before

        return call


class Seen(torch.utils.data.Dataset):
    """Samples that know how often each was loaded."""

    def __init__(self, samples):
        self.samples = samples
        self.loaded = []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.loaded.append(index)
        return self.samples[index]


def schedule(seed, size, operators):
    """Draw who fails, and when: one to three of the operators of one to two ranks."""
    chance = random.Random(seed)  # noqa: S311
    who = chance.sample(range(size), chance.randint(1, min(2, size)))
    return {rank: [chance.randint(1, operators) for _ in range(chance.randint(1, 3))] for rank in who}


class Windows(autoaccum.Callback):
    """Notes how many operators each window has come to."""

    def __init__(self, mode):
        self.mode, self.ends = mode, []

    def on_step(self, report, *, epoch):
        self.ends.append(self.mode.count)


# What a rank says to the others, or waits for.
TALK = ("_exchange", "add_up", "spread", "ask", "begin_adding_up", "end_adding_up", "_hear")


def faulted(rank, size, *, points=(), lasts=False, loss="mean", optimizer="sgd", clip=None, data=None, overlap=False):
    """Train with faults at these operators of this rank; points is by rank."""
    mine = dict(points).get(rank, ())
    made, function = rank_training.LOSSES[loss]
    samples = Seen(made(SAMPLES) if data is None else data)
    model = rank_training.net(seed=0)
    mode = FailAtPoint(*mine, lasts=lasts)
    windows = Windows(mode)
    with ExitStack() as patches:
        sends = patches.enter_context(overlap_training.watched())
        for owner, name in ((WindowRunner, "step"), *((Ranks, name) for name in TALK)):
            method = mode.while_called(getattr(owner, name), is_talking=owner is Ranks)
            patches.enter_context(mock.patch.object(owner, name, method))
        patches.enter_context(mode)
        result = autoaccum.fit(
            model,
            DataLoader(samples, batch_size=5),
            TARGET,
            loss=function,
            optimizer=OPTIMIZERS[optimizer],
            micro_batch=2,
            strategy="balanced",
            shard=True,
            device="cpu",
            progress=False,
            cache=False,
            clip_grad_norm=clip,
            overlap=overlap,
            callbacks=[windows],
        )
    found = rank_training.outcome(model, result)
    return {
        **found,
        **vars(sends),
        "loaded": samples.loaded,
        "hits": mode.hits,
        "operators": mode.count,
        "where": mode.where,
        "ends": windows.ends,
    }


def is_damage(outcomes):
    """Whether an optimizer that had begun to write failed, which is told, and ended the training of all.

    A later step of a kernel over lists of tensors moves no version counter under a dispatch mode: nothing is provable.
    """
    if not any(isinstance(one, str) and one.startswith("StateDamagedError") for one in outcomes):
        return False
    return all(isinstance(one, str) and one.startswith(("StateDamagedError", "RankFailedError")) for one in outcomes)


def is_given_up(outcomes):
    """Whether a second failure met the second attempt at what no cut makes smaller, which ends the training of all."""
    ends = ("DoesNotFitError", "RankFailedError")
    found = [isinstance(one, str) and one.startswith(ends) for one in outcomes]
    told = [isinstance(one, str) and "DoesNotFitError" in one for one in outcomes]
    return all(found) and all(told)


def at_each(rank, size, who, points, **arguments):
    """Train once for each point at which one rank fails, without starting the ranks anew; exceptions are returned."""
    return [_tried(rank, size, points={who: [point]}, **arguments) for point in points]


def many(rank, size, seeds, operators, **arguments):
    """Train once for each seed, without starting the ranks anew; exceptions are returned."""
    return [_tried(rank, size, points=schedule(seed, size, operators), **arguments) for seed in seeds]


def _tried(rank, size, **arguments):
    try:
        return faulted(rank, size, **arguments)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
