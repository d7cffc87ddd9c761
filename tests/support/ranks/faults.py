"""Trainings on several ranks in which one of them, at a point drawn at random, runs out of memory."""

import random

import torch
from torch.utils._pytree import tree_leaves

import autoaccum
from support.faults.modes import FailAt
from support.ranks import training
from support.ranks.training import DataLoader

SAMPLES, TARGET = 26, 8
OPTIMIZERS = {"sgd": training.sgd, "adam": training.adam}


class FailAtPoint(FailAt):
    """Counts what a rank computes from the first forward pass of a window to its update, and not what it says.

    What fails elsewhere, in a loader or in the preparations, is no lack of memory that a smaller cut could mend.
    """

    def __init__(self, *points, lasts=False):
        super().__init__(*points)
        self.lasts = lasts
        self.is_in_window = False

    def begin(self, *_):
        self.is_in_window = True

    def end(self, *_):
        self.is_in_window = False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        takes_none = operator.is_view or operator.namespace == "c10d"
        if not self.is_in_window or takes_none or _has_bytes(args, kwargs or {}):
            return operator(*args, **(kwargs or {}))
        if self.lasts and self.hits:
            self.points.add(self.count + 1)
        return super().__torch_dispatch__(operator, types, args, kwargs)


def _has_bytes(args, kwargs):
    """Whether something works on a message: no model here has bytes."""
    return kwargs.get("dtype") is torch.uint8 or any(
        isinstance(one, torch.Tensor) and one.dtype is torch.uint8 for one in tree_leaves(args)
    )


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
    def __init__(self, mode):
        self.mode, self.ends = mode, []

    def on_step(self, report, *, epoch):
        self.ends.append(self.mode.count)


def faulted(rank, size, *, points=(), lasts=False, loss="mean", optimizer="sgd", clip=None, data=None):
    """Train with faults at these operators of this rank; points is by rank."""
    mine = dict(points).get(rank, ())
    made, function = training.LOSSES[loss]
    samples = Seen(made(SAMPLES) if data is None else data)
    model = training.net(seed=0)
    mode = FailAtPoint(*mine, lasts=lasts)
    windows = Windows(mode)
    model.register_forward_pre_hook(mode.begin)

    def made_optimizer(parameters):
        made = OPTIMIZERS[optimizer](parameters)
        made.register_step_post_hook(mode.end)
        return made

    with mode:
        result = autoaccum.fit(
            model,
            DataLoader(samples, batch_size=5),
            TARGET,
            loss=function,
            optimizer=made_optimizer,
            micro_batch=2,
            shard_data=True,
            device="cpu",
            progress=False,
            clip_grad_norm=clip,
            callbacks=[windows],
        )
    found = training.outcome(model, result)
    return {
        **found,
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


def many(rank, size, seeds, operators, **arguments):
    return [tried(faulted, rank, size, points=schedule(seed, size, operators), **arguments) for seed in seeds]


def tried(function, rank, size, **arguments):
    try:
        return function(rank, size, **arguments)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
