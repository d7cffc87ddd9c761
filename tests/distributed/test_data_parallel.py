"""What ranks send each other in a window, and what becomes of a rank that does not answer."""

import contextlib
import os
import signal
import subprocess
import time
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from support.ranks import expect
from support.ranks.rows import FOUR, THREE, TWO, Row, sweep, table
from support.ranks.training import CLASSES, net, train, vectors

# --- messages ---------------------------------------------------------------------------------------------------------

# "My part is done", and "ready to step"; gradients in one bucket, and losses.
STEADY = ["all_gather", "all_gather", "all_reduce", "all_reduce"]


class Counting(autoaccum.Callback):
    """Notes after each window what was sent so far: what a function says of a call of the network."""

    def __init__(self):
        self.sent, self.after = [], []

    def on_step(self, report, *, epoch):
        self.after.append(len(self.sent))

    def by_window(self):
        return [self.sent[start:stop] for start, stop in zip([0, *self.after], self.after, strict=False)]

    @contextlib.contextmanager
    def noting(self, said, *kinds):
        with contextlib.ExitStack() as patched:
            for kind in kinds:
                real = getattr(distributed, kind)

                def called(*given, kind=kind, real=real, **named):
                    self.sent.append(said(kind, given))
                    return real(*given, **named)

                patched.enter_context(mock.patch.object(distributed, kind, called))
            yield


def counted(**given):
    def arguments(rank, size):
        counting = Counting()
        noting = counting.noting(lambda kind, _: kind, "all_gather", "all_reduce", "broadcast")
        options = {"target_batch": 8, "micro_batch": 2, "callbacks": [counting]}
        return options | {"during": noting, "told": counting.by_window} | given

    return arguments


def sixth_is(*expected):
    def claim(found):
        assert [sorted(one["told"][5]) for one in found] == [list(expected)] * 2

    return expect.outcomes(claim)


def lengths(rank, size, layers):
    """Train a model of so many layers; return how many bytes this rank has sent in messages, window by window."""
    counting, model = Counting(), net()
    model.extend(nn.Linear(CLASSES, CLASSES).double() for _ in range(layers))
    given = {"target_batch": 8, "micro_batch": 4, "shard_data": True, "max_steps": 6, "callbacks": [counting]}
    with counting.noting(lambda _, given: given[1].nbytes, "all_gather"):
        train(rank, size, model=model, **given)
    return list(map(sum, counting.by_window()))


def test_messages_grow_in_proportion_to_the_parameters_and_in_steady_windows_not_at_all(rank_pool):
    run = "distributed.test_data_parallel:lengths"
    none, some, many = (rank_pool.run(run, layers, size=2)[0] for layers in (0, 50, 200))

    assert many[0] - none[0] <= 4.2 * (some[0] - none[0])
    assert none[1:] == some[1:] == many[1:]


def groups(rank, size):
    """Train twice with a group that has no network between hosts; return how many further groups were made."""
    real, made = distributed.new_group, []

    def new_group(*given, **named):
        made.append(named)
        return real(*given, **named)

    with (
        mock.patch.object(distributed, "get_backend_config", return_value="cuda:nccl"),
        mock.patch.object(distributed, "new_group", new_group),
    ):
        for _ in range(2):
            train(rank, size, target_batch=16, micro_batch=4, shard_data=True)
    return len(made)


def test_group_between_hosts_is_made_once_for_all_calls(rank_pool):
    assert rank_pool.run("distributed.test_data_parallel:groups", size=2) == [1, 1]


# --- a rank that does not answer, cannot send or lacks memory ---------------------------------------------------------


class NotAnswering(autoaccum.Callback):
    """After the second window this process ends, stops for a second, or sleeps."""

    def __init__(self, how):
        self.how = how

    def on_step(self, report, *, epoch):
        if report.step == 2 and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if report.step == 2 and self.how == "stopped":
            own = os.getpid()
            waits = f"until grep -q '^State:.T' /proc/{own}/status; do sleep 0.1; done"
            subprocess.Popen(["/bin/sh", "-c", f"{waits}; sleep 1; kill -CONT {own}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if report.step == 2 and self.how == "asleep":
            time.sleep(4)


def not_answering(how):
    def arguments(rank, size):
        callbacks = [NotAnswering(how)] if rank == 1 else []
        return {"target_batch": 12, "micro_batch": 2, "epochs": 2, "callbacks": callbacks}

    return arguments


def is_gone(run):
    answers = run.answers(wait_s=8)
    assert "exit code -9" in str(answers.pop(1))
    assert all(isinstance(answer, autoaccum.RankFailedError) for answer in answers), answers


def without_network(rank, size):
    """Rank 1 cannot send a gradient, for a reason of its own."""
    fails = mock.patch.object(distributed, "all_reduce", side_effect=RuntimeError("Invalid scalar type"))
    return {"during": fails if rank == 1 else contextlib.nullcontext()}


class Lacking:
    """A loss without memory for its third call on rank 0."""

    def __init__(self, rank):
        self.rank, self.calls = rank, 0

    def __call__(self, outputs, targets):
        self.calls += outputs.requires_grad
        if self.rank == 0 and self.calls == 3:
            self.calls += 1
            raise torch.OutOfMemoryError("CUDA out of memory: for this test")
        return functional.cross_entropy(outputs, targets)


def lacking_once(rank, size):
    """Simulated devices, of which the last has twice as much; memory runs out once, on rank 0 alone."""
    given = {"device": autoaccum.Simulated(["1GiB", "1GiB", "2GiB"][rank]), "loss": Lacking(rank)}
    loader = DataLoader(vectors(96), batch_size=16)
    return given | {"loss_reduction": "mean", "micro_batch": 8, "make_loader": lambda *_: loader}


def those_with_as_much_cut_too(found):
    assert [[len(cut) for cut in one["cuts"][:4]] for one in found] == [[1, 1, 2, 2], [1, 1, 1, 2], [1, 1, 1, 1]]


FAILED = autoaccum.RankFailedError
ROWS = table(
    __file__,
    *(
        Row(f"a steady window takes two messages beside gradients and losses, {given}", counted(**given),
            holds=sixth_is(*STEADY))
        for given in ({"shard_data": shard, "drop_last": drop} for shard in (False, True) for drop in (False, True))
    ),
    Row("a clipped window takes the norm in addition", counted(clip_grad_norm=1.0),
        holds=sixth_is(*STEADY, "all_reduce")),
    Row("a rank that is killed ends the others", not_answering("killed"), (TWO, FOUR), is_gone),
    Row("a rank that answers too late ends with all others", not_answering("asleep"), (TWO, sweep(FOUR)),
        expect.ends((FAILED,), wait_s=2)),
    Row("a rank that is stopped for a while is waited for", not_answering("stopped"), (TWO, sweep(FOUR))),
    Row("a rank that cannot send says why, and does not accuse another", without_network, holds=expect.ends(
        (FAILED,), (FAILED, "rank 1 could not exchange data with the others (Invalid scalar type)"), wait_s=3)),
    Row("what ran out of memory on one rank is not tried by those with as much", lacking_once, (THREE,),
        expect.outcomes(those_with_as_much_cut_too)),
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)
