"""Calls a function that trains again, with smaller micro-batches and more accumulation, when memory runs out in it.

For what no adapter can wrap: FSDP1, DeepSpeed, Megatron, any function. Ranks agree through the store of
torch.distributed, so that no collective is added to those of the function.
"""

from __future__ import annotations

import functools
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import distributed

from autoaccum._arguments import check_function, check_positive_int
from autoaccum._memory.available_devices import backend_for, find_accelerator
from autoaccum._oom import clear_traceback_frames, first_line, is_device_lost, is_oom, is_too_large
from autoaccum._system import launched
from autoaccum._system.notices import Notices
from autoaccum._system.reason_file import writes_reason
from autoaccum.errors import DoesNotFitError, InvalidInputError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_P = ParamSpec("_P")
_T = TypeVar("_T")
# How an attempt has ended on a rank; the last says that it has waited for another in vain.
_DONE, _RAN_OUT, _FAILED, _ALONE = "done", "ran out", "failed", "alone"
# Between two looks at what other ranks have said.
_LOOK_S = 0.05


def find_executable_micro_batch(
    *, target: int, micro_batch: int | None = None
) -> Callable[[Callable[Concatenate[int, int, _P], _T]], Callable[_P, _T]]:
    """Decorate a function that trains, to be called with the largest micro-batch that fits; the batch stays the same.

        @autoaccum.find_executable_micro_batch(target=256)
        def train(micro_batch, accumulation_steps, config):
            loader = DataLoader(data, batch_size=micro_batch)
            ...

        train(config)

    The function gets two numbers before its own arguments. Their product is this process's share of `target`. When
    memory runs out in it, memory is released, and it is called again *from its beginning* with the next smaller divisor
    of the share. What it did until then is done again, so it should create model, optimizer and loader itself, or load
    its own checkpoint. A later call begins with the size that fitted.

    On several ranks, all begin again when one of them runs out, once each has returned or run out, for which they wait
    for AUTOACCUM_RANK_TIMEOUT_S (1800). A rank that waits in a collective for one that ran out ends by that
    collective's timeout; `autoaccum run` restarts such a job.

    Args:
        target: Samples of one optimizer step on all ranks together, a multiple of their number.
        micro_batch: The largest size to try; None for the whole share.

    Raises:
        InvalidInputError: An argument cannot be used. When the function is called: `target` is no multiple of the
            number of ranks, or `torch.distributed` is not set up, which it must be until the function has returned.
        DoesNotFitError: When the function is called: not even one sample at a time fits.
        RankFailedError: When the function is called: it raised another error on another rank, or that rank is gone.
    """
    check_positive_int("target", target)
    most = target if micro_batch is None else check_positive_int("micro_batch", micro_batch)
    notices = Notices()

    def decorate(function: Callable[Concatenate[int, int, _P], _T]) -> Callable[_P, _T]:
        check_function("function", function, "micro_batch, accumulation_steps", takes_more=True)

        @functools.wraps(function)
        @writes_reason
        def restarted(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            nonlocal most
            share, said = _share_of(target), ""
            for size in _sizes(share, min(most, launched.max_micro_batch() or most)):
                attempt = _new_attempt()
                done: list[_T] = []
                try:
                    done.append(function(size, share // size, *args, **kwargs))
                except BaseException as error:
                    ran_out = isinstance(error, Exception) and (is_oom(error) or is_too_large(error))
                    if not ran_out or is_device_lost(error):
                        with suppress(RankFailedError):  # the error itself says more
                            _tell(attempt, _FAILED)
                        raise
                    said = first_line(error)
                    clear_traceback_frames(error)
                # The handler has ended: inside it the traceback would still pin the activations.
                if not _ran_out_somewhere(attempt, _DONE if done else _RAN_OUT):
                    most = size
                    return done.pop()
                said = "on another rank" if done else said
                done.clear()
                backend_for(find_accelerator() or torch.device("cpu")).release()
                notices.say(f"micro_batch={size} does not fit ({said}); {function.__name__} is called again")
            raise DoesNotFitError(
                f"one sample at a time does not fit ({said}); try shorter samples, lower precision, activation "
                "checkpointing or a smaller model"
            )

        return restarted

    return decorate


def _share_of(target: int) -> int:
    ranks = launched.world_size()
    if target % ranks:
        raise InvalidInputError(
            f"target={target} is no multiple of the {ranks} ranks, so they cannot have equal shares; choose a "
            f"multiple, such as {target - target % ranks + ranks}"
        )
    if ranks > 1 and not distributed.is_initialized():
        raise InvalidInputError(
            "torch.distributed is not set up, by which ranks agree on a size; call init_process_group() before the "
            "decorated function, not in it"
        )
    return target // ranks


def _sizes(share: int, most: int) -> list[int]:
    """Return the divisors of a share from the largest that is at most `most`."""
    return [size for size in range(min(share, most), 0, -1) if share % size == 0]


def _store() -> Any:
    """Return the store by which ranks agree; None for a single process."""
    if launched.world_size() == 1 or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def _new_attempt() -> int:
    """Return the number of a new attempt, which is the same on all ranks: it counts those that the store knows of."""
    store = _store()
    if store is None:
        return 0
    with _store_explained():
        return int(store.add(f"autoaccum/attempts/{distributed.get_rank()}", 1))


def _tell(attempt: int, how: str) -> tuple[Any, list[str]]:
    """Tell other ranks how an attempt has ended; return the store, and the key of each rank."""
    if (store := _store()) is None:
        return None, []
    keys = [f"autoaccum/attempt-{attempt}/{rank}" for rank in range(distributed.get_world_size())]
    with _store_explained():
        store.set(keys[distributed.get_rank()], how)
    return store, keys


@contextmanager
def _store_explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankFailedError(
            f"the store of torch.distributed, by which ranks agree, cannot be reached ({first_line(error)}); if the "
            "process that holds it (mostly rank 0) is gone, its log says why"
        ) from error


def _ran_out_somewhere(attempt: int, how: str) -> bool:
    """Whether memory ran out on any rank, once each has ended the attempt.

    Raises:
        RankFailedError: One of them raised another error, or is not heard of for as long as ranks wait for each other.
    """
    store, keys = _tell(attempt, how)
    if store is None:
        return how == _RAN_OUT
    limit_s = launched.timeout_s()
    began = time.monotonic()
    with _store_explained():
        while not store.check(keys):
            if time.monotonic() - began > limit_s:
                _tell(attempt, _ALONE)
                missing = ", ".join(f"rank {rank}" for rank, key in enumerate(keys) if not store.check([key]))
                raise RankFailedError(
                    f"no word of {missing} in the {limit_s:g} s since the function has ended here; see what is logged "
                    "there, and if it only had more to do, set AUTOACCUM_RANK_TIMEOUT_S to more seconds"
                )
            time.sleep(_LOOK_S)
        said = [store.get(key).decode() for key in keys]
    if _FAILED in said:
        raise RankFailedError(f"the function raised an error on rank {said.index(_FAILED)}; that rank's log says which")
    if _ALONE in said:
        raise RankFailedError(f"rank {said.index(_ALONE)} has ended, since a rank took too long to end the function")
    with _store_explained():
        has_read = f"autoaccum/attempt-{attempt}/read"
        store.add(has_read, 1)
        while distributed.get_rank() == 0 and store.add(has_read, 0) < len(keys) and time.monotonic() - began < limit_s:
            time.sleep(_LOOK_S)  # since it may hold the store, and end with it before others have looked
    return _RAN_OUT in said
