"""A function that trains is called again with smaller micro-batches, and each update keeps its samples."""

import weakref

import pytest
import torch

import autoaccum


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


def test_all_ranks_begin_again_where_one_runs_out(crew):
    first, second = crew.run("training.test_restarted_function:on_rank", 12, 2, size=2)

    assert first == second == [(6, 1), (3, 2), (2, 3)]


def test_target_that_ranks_cannot_share_is_refused(crew):
    with pytest.raises(autoaccum.InvalidInputError, match="such as 14"):
        crew.run("training.test_restarted_function:on_rank", 13, 2, size=2)


def test_error_on_one_rank_ends_the_others(crew):
    first, second = crew.answers("training.test_restarted_function:with_an_error", size=2)

    assert isinstance(first, autoaccum.RankFailedError)
    assert isinstance(second, KeyError)
