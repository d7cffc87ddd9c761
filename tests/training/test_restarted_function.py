"""A function that trains is called again with smaller micro-batches, and each update keeps its samples."""

import os
import re
import signal
import socket
import time
import weakref
from unittest import mock

import pytest
import torch
from torch import distributed

import autoaccum
from autoaccum._training import restarted_function


def asked(most, calls):
    def train(micro_batch, accumulation_steps, *args, **kwargs):
        calls.append((micro_batch, accumulation_steps))
        if micro_batch > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return args, kwargs

    return train


def test_sizes_are_divisors_whose_product_with_the_steps_is_the_target():
    calls = []
    train = autoaccum.find_executable_micro_batch(target=12)(asked(2, calls))

    assert train("a", b=1) == (("a",), {"b": 1})

    assert calls == [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6)]


def test_later_call_begins_with_the_size_that_fitted():
    calls = []
    train = autoaccum.find_executable_micro_batch(target=12, micro_batch=6)(asked(4, calls))

    train()
    train()

    assert calls == [(6, 2), (4, 3), (4, 3)]


def test_memory_of_a_failed_attempt_is_free_before_the_next():
    alive = []

    @autoaccum.find_executable_micro_batch(target=2)
    def train(micro_batch, _steps):
        held = torch.zeros(3)
        assert not any(one() is not None for one in alive)
        alive.append(weakref.ref(held))
        if micro_batch > 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    train()

    assert len(alive) == 2


def test_sample_that_does_not_fit_alone_is_said():
    with pytest.raises(autoaccum.DoesNotFitError, match=r"one sample at a time does not fit \(CUDA out of memory"):
        autoaccum.find_executable_micro_batch(target=4)(asked(0, []))()


# --- several ranks ----------------------------------------------------------------------------------------------------


def on_rank(rank, size, target, most):
    calls = []
    autoaccum.find_executable_micro_batch(target=target)(asked(most if rank == 1 else target, calls))()
    return calls


def with_an_error(rank, size):
    @autoaccum.find_executable_micro_batch(target=4)
    def train(micro_batch, accumulation_steps):
        raise KeyError("mine") if rank else torch.OutOfMemoryError("CUDA out of memory.")

    train()


def with_a_killed_rank(rank, size, who):
    @autoaccum.find_executable_micro_batch(target=3)
    def train(micro_batch, accumulation_steps):
        if rank == who:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.dict(os.environ, AUTOACCUM_RANK_TIMEOUT_S="3"):
        train()


def free_port():
    with socket.create_server(("localhost", 0)) as taken:
        return taken.getsockname()[1]


def with_a_store_that_ends(rank, size, port, who):
    """Meet by a store in rank 0, which ends with it: in the function if it is `who`, or at once after it."""
    distributed.destroy_process_group()
    distributed.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=size)
    distributed.barrier()  # or rank 0 could end while rank 1 still connects to it

    @autoaccum.find_executable_micro_batch(target=2)
    def train(micro_batch, accumulation_steps):
        if rank == who:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(restarted_function, "_LOOK_S", 0.05 + rank):
        train()
    if rank == 0:
        os._exit(0)
    return "returned"


def with_a_late_rank(rank, size):
    @autoaccum.find_executable_micro_batch(target=2)
    def train(micro_batch, accumulation_steps):
        time.sleep(6.0 * rank)

    with mock.patch.dict(os.environ, AUTOACCUM_RANK_TIMEOUT_S="3"):
        train()


def test_all_ranks_begin_again_where_one_runs_out(rank_pool):
    first, second = rank_pool.run("training.test_restarted_function:on_rank", 12, 2, size=2)

    assert first == second == [(6, 1), (3, 2), (2, 3)]


def test_target_that_ranks_cannot_share_is_refused(rank_pool):
    with pytest.raises(autoaccum.InvalidInputError, match="such as 14"):
        rank_pool.run("training.test_restarted_function:on_rank", 13, 2, size=2)


def test_error_on_one_rank_ends_the_others(rank_pool):
    first, second = rank_pool.answers("training.test_restarted_function:with_an_error", size=2)

    assert isinstance(first, autoaccum.RankFailedError)
    assert isinstance(second, KeyError)


@pytest.mark.slow  # they wait for 3 s
@pytest.mark.parametrize("who", [0, 1])
def test_rank_that_is_killed_is_not_waited_for_longer_than_ranks_wait(rank_pool, who):
    answers = rank_pool.answers("training.test_restarted_function:with_a_killed_rank", who, size=3)

    for rank, answer in enumerate(answers):
        if rank != who:
            assert isinstance(answer, autoaccum.RankFailedError), answer
            assert re.search(rf"^no word of .*rank {who}\b.* in the 3 s", str(answer))


def test_store_that_ends_with_a_killed_rank_ends_the_others(rank_pool):
    _, other = rank_pool.answers("training.test_restarted_function:with_a_store_that_ends", free_port(), 0, size=2)

    assert isinstance(other, autoaccum.RankFailedError)
    assert "the store of torch.distributed" in str(other)


def test_store_that_ends_right_after_the_function_has_been_read_by_all(rank_pool):
    _, other = rank_pool.answers("training.test_restarted_function:with_a_store_that_ends", free_port(), None, size=2)

    assert other == "returned"


@pytest.mark.slow  # they wait for 3 s
def test_rank_that_comes_too_late_ends_with_those_that_gave_it_up(rank_pool):
    first, second = rank_pool.answers("training.test_restarted_function:with_a_late_rank", size=2)

    assert isinstance(first, autoaccum.RankFailedError)
    assert "no word of rank 1 in the 3 s" in str(first)
    assert isinstance(second, autoaccum.RankFailedError)
    assert "rank 0" in str(second)
