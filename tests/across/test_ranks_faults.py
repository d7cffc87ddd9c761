"""Whatever rank runs out of memory, and wherever: nobody is left waiting, nobody diverges, every sample counts once."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import autoaccum
from autoaccum import DoesNotFitError, RankFailedError, StateDamagedError
from support.models.small import a_few_of
from support.ranks import expect, training
from support.ranks.lacking import FailAtPoint, lacking_on
from support.ranks.rows import FOUR, TWO, Row, table
from support.ranks.training import FAR, Seen, assert_alike, far, net, vectors

# --- once, on the last of ranks with unlike memory and unlike numbers of samples --------------------------------------

# Windows of 40 samples on devices that hold some of them at once, and one with fewer samples than there are ranks.
SIZES = ["5KiB", "8KiB", "1MiB", "6KiB"]
WINDOWS = {"data": vectors(122), "target_batch": 40}


class Fails(nn.Module):
    """Lacks memory once, in a forward or a backward pass of the second window."""

    def __init__(self, where):
        super().__init__()
        self.where, self.told, self.may_fail = where, [], False

    def forward(self, inputs):
        if self.may_fail and inputs.requires_grad:
            if self.where == "forward":
                self.fail()
            elif self.where == "backward":
                inputs.register_hook(lambda _: self.fail())
        return inputs * 1.0

    def fail(self):
        if not self.told:
            self.told.append(self.where)
            raise torch.OutOfMemoryError("CUDA out of memory: for this test")


class SecondWindow(autoaccum.Callback):
    def __init__(self, layer):
        self.layer = layer

    def on_step(self, report, *, epoch):
        self.layer.may_fail = True


def in_a_pass(where):
    def arguments(rank, size):
        model, fails = net(), Fails(where if rank == size - 1 > 0 else "nowhere")
        model.insert(2, fails)
        return unlike(rank, size) | {"model": model, "callbacks": [SecondWindow(fails)], "told": fails.told}

    return arguments


def outside(where):
    return lambda rank, size: unlike(rank, size) | lacking_on(size - 1, where, 2)(rank, size)


def unlike(rank, size):
    return WINDOWS | {"micro_batch": "auto", "device": autoaccum.Simulated(SIZES[rank]) if size > 1 else "cpu"}


def all_count_once(found):
    assert [sum(itertools.chain(*cuts)) for cuts in zip(*(one["cuts"] for one in found), strict=True)] == [
        40,
        40,
        40,
        2,
    ]
    assert found[-1]["told"] or found[-1]["oom"]


ROWS = table(
    __file__,
    *(
        Row(f"memory that runs out once changes no update: {where}", given, (TWO, FOUR),
            expect.as_alone(also=all_count_once))
        for where, given in [
            *((where, in_a_pass(where)) for where in ("forward", "backward")),
            *((where, outside(where)) for where in ("reserve", "after the passes")),
        ]
    ),
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)


# --- at points that are drawn -----------------------------------------------------------------------------------------

HERE = "across.test_ranks_faults"
SAMPLES, TARGET = 26, 8


def schedule(seed, size, operators):
    """Draw who fails, and when: one to three of the operators of one to two ranks."""
    chance = random.Random(seed)  # noqa: S311
    who = chance.sample(range(size), chance.randint(1, min(2, size)))
    return {rank: [chance.randint(1, operators) for _ in range(chance.randint(1, 3))] for rank in who}


def faulted(rank, size, *, points=(), lasts=False, loss="mean", optimizer="sgd", clip=None):
    """Train with faults at these operators of this rank; points is by rank."""
    samples, model = Seen(training.LOSSES[loss][0](SAMPLES)), net()
    mode = FailAtPoint(*dict(points).get(rank, ()), lasts=lasts)
    model.register_forward_pre_hook(mode.begin)

    def made_optimizer(parameters):
        made = getattr(training, optimizer)(parameters)
        made.register_step_post_hook(mode.end)
        return made

    given = {"target_batch": TARGET, "micro_batch": 2, "shard_data": True, "clip_grad_norm": clip, "loss": loss}
    given |= {"make_loader": lambda *_: DataLoader(samples, batch_size=5), "optimizer": made_optimizer}
    with mode:
        found = training.train(rank, size, model=model, told=samples.loaded, **given)
    return found | {"hits": mode.hits, "operators": mode.count}


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
    return [tried(rank, size, points=schedule(seed, size, operators), **arguments) for seed in seeds]


def tried(rank, size, **arguments):
    try:
        return faulted(rank, size, **arguments)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("most", [2, pytest.param(10, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("size", "loss", "optimizer", "clip"),
    [
        pytest.param(2, "mean", "sgd", None, marks=pytest.mark.sweep),
        (4, "mean", "adam", 1.0),
        (2, "pair", "adam", None),
        (2, "several", "sgd", 0.5),
    ],
)
def test_memory_that_runs_out_anywhere_changes_nothing_but_cuts(rank_pool, size, loss, optimizer, clip, most):
    arguments = {"size": size, "loss": loss, "optimizer": optimizer, "clip": clip}
    expected = rank_pool.run(f"{HERE}:faulted", **arguments)
    seeds = list(
        range(min(most, 4) if loss == "several" else most)
    )  # which takes many operators to find out what it runs over

    found = rank_pool.run(f"{HERE}:many", seeds, expected[0]["operators"], **arguments)

    hits = 0
    for seed, outcomes in zip(seeds, zip(*found, strict=True), strict=True):
        if is_damage(outcomes) or is_given_up(outcomes):
            continue
        assert not any(isinstance(one, str) for one in outcomes), (seed, outcomes)
        hits += sum(one["hits"] for one in outcomes)
        assert_alike(outcomes)
        assert far(outcomes[0]["parameters"], expected[0]["parameters"]) <= FAR, seed
        assert outcomes[0]["samples"] == expected[0]["samples"]
        loaded = sorted(itertools.chain.from_iterable(one["told"] for one in outcomes))
        assert loaded == list(range(SAMPLES))
    assert hits  # else this test shows little


@pytest.mark.parametrize(("size", "at"), a_few_of([2, 4], [100, 150, 200]))
def test_rank_on_which_nothing_fits_any_more_ends_all_of_them(rank_pool, size, at):
    answers = rank_pool.answers(f"{HERE}:faulted", size=size, points={1: [at]}, lasts=True)

    # The optimizer may have begun to write.
    assert isinstance(answers[1], DoesNotFitError | torch.OutOfMemoryError | StateDamagedError), answers[1]
    for rank in set(range(size)) - {1}:
        assert isinstance(answers[rank], RankFailedError)
        assert "rank 1: " in str(answers[rank])
