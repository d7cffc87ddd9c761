"""What every memory backend promises, asked of each with the same functions.

The host's checks lower the process's own limit, so a child runs them (all in one, it imports PyTorch once); the
others run here. A check returns what it saw, and the test of its name says what that must be.
"""

import contextlib
import json
import sys

import pytest
import torch

from autoaccum import is_oom
from autoaccum._memory.available_devices import backend_for
from autoaccum._memory.simulated import Simulated
from autoaccum._oom import clear_traceback_frames  # frees what an error holds
from autoaccum.errors import InvalidInputError
from memory._child import answered

MIB = 2**20
LIMIT = 96 * MIB
# Of the host, beyond a limit of 96 MiB: allocations fail only there, since its limit is soft.
HARD = 2 * max(4 * LIMIT, LIMIT + 256 * MIB)


def make(kind):
    if kind == "simulated":
        return Simulated(4 * 2**30)
    return backend_for(
        torch.device({"host": "cpu", "accelerator": torch.accelerator.current_accelerator()}.get(kind, kind))
    )


def block(backend, n_bytes):
    return torch.ones(n_bytes // 4, dtype=torch.float32, device=backend.device)


def limit_for(backend, room):
    """The limit that leaves this much room, in the terms of the backend."""
    if backend.device.type == "cpu":
        return room
    backend.release()
    return backend.reading().used_bytes + room


def run_out(action):
    """Whether the action ran out of memory, the exception let go of as the library does."""
    try:
        action()
    except Exception as exception:
        if not is_oom(exception):
            raise
        clear_traceback_frames(exception)
        return True
    return False


def most_of(backend):
    """What the process can take under a limit of `LIMIT` before an allocation fails."""
    return HARD if backend.is_host else LIMIT


def check_limit_runs_out_and_recovers(backend):
    most = most_of(backend)
    with backend.limited(limit_for(backend, LIMIT)):
        beyond = run_out(lambda: block(backend, most + 8 * MIB))
        backend.release()
        nearly = run_out(lambda: block(backend, most - 8 * MIB))
        backend.release()
        twice = run_out(lambda: block(backend, most - 8 * MIB))
    return {"beyond": beyond, "nearly": nearly, "twice": twice}


def check_many_small_blocks_run_out(backend):
    held, most = [], most_of(backend)

    def fill():
        for _ in range(2 * most // (4 * MIB)):
            held.append(block(backend, 4 * MIB))  # noqa: PERF401 - it fails half-way

    with backend.limited(limit_for(backend, LIMIT)):
        ran_out = run_out(fill)
        got = sum(tensor.nbytes for tensor in held)
        held.clear()
        backend.release()
        again = run_out(lambda: block(backend, most - 8 * MIB))
    return {"ran_out": ran_out, "got": got / most, "again": again}


def check_exit_lifts_the_limit(backend):
    with contextlib.suppress(KeyError), backend.limited(limit_for(backend, LIMIT)):
        raise KeyError
    with backend.limited(None):
        beyond = run_out(lambda: block(backend, 2 * most_of(backend)))
    with backend.limited(limit_for(backend, 3 * most_of(backend))):
        larger = run_out(lambda: block(backend, 2 * most_of(backend)))
    return {"beyond": beyond, "larger": larger, "limit": backend.reading().limit_bytes}


def check_bad_limits_are_refused(backend):
    held = None if backend.device.type == "cpu" else block(backend, 64 * MIB)
    said = []
    for limit in (0, -1, *([] if held is None else [32 * MIB])):
        try:
            with backend.limited(limit):
                said.append("entered")
        except InvalidInputError as error:
            said.append(str(error))
    with backend.limited(limit_for(backend, LIMIT)):
        try:
            with backend.limited(limit_for(backend, LIMIT)):
                said.append("entered")
        except InvalidInputError as error:
            said.append(str(error))
        still = run_out(lambda: block(backend, most_of(backend) + 72 * MIB))
    return {"said": said, "still": still}


def check_peak_counts_and_resets(backend):
    with backend.limited(limit_for(backend, LIMIT)):
        base = backend.reading().used_bytes
        backend.reset_peak()
        tensor = block(backend, 48 * MIB)
        backend.synchronize()
        high = backend.peak_bytes()
        del tensor
        after_death = backend.peak_bytes()
        backend.release()
        backend.reset_peak()
        low = backend.peak_bytes()
    return {"high": high, "after_death": after_death, "low": low, "base": base}


def check_reading_is_consistent(backend):
    limit = limit_for(backend, LIMIT)
    with backend.limited(limit):
        before = backend.reading()
        tensor = block(backend, 32 * MIB)
        during = backend.reading()
        del tensor
    after = backend.reading()
    return {
        "limit": [before.limit_bytes, limit, after.limit_bytes],
        "grew": during.used_bytes - before.used_bytes,
        "shrank": before.free_bytes - during.free_bytes,
        "fits": before.free_bytes <= limit <= before.total_bytes,
        "fraction": backend.total_for_fraction() == before.total_bytes,
    }


def check_ensure_asks_before(backend):
    if backend.device.type != "cpu":
        # The allocator of a GPU fails cleanly, so nothing is asked of it.
        return {"little": run_out(lambda: backend.ensure(2**50)), "nothing": False, "much": True, "held": True}
    most = most_of(backend)
    with backend.limited(LIMIT):
        little = run_out(lambda: backend.ensure(most - 8 * MIB))
        nothing = run_out(lambda: backend.ensure(0))
        much = run_out(lambda: backend.ensure(most + 8 * MIB))
        tensor = block(backend, most // 2)
        held = run_out(lambda: backend.ensure(most - 8 * MIB))
        del tensor
    return {"little": little, "nothing": nothing, "much": much, "held": held}


def check_reserve_asks_the_limit(backend):
    with backend.limited(limit_for(backend, LIMIT)):
        return [run_out(lambda: backend.reserve(LIMIT - 16 * MIB)), run_out(lambda: backend.reserve(LIMIT + 8 * MIB))]


def check_soft_limit_is_told_by_the_peak(backend):
    with backend.limited(limit_for(backend, LIMIT)):
        said = []
        for size in (LIMIT // 2, LIMIT + 16 * MIB):
            backend.reset_peak()
            run_out(lambda size=size: block(backend, size))
            said.append(backend.describe_overrun(backend.peak_bytes()))
        return {"said": said, "is_soft": backend.is_soft}


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


def reason_to_skip(kind):
    if kind == "host" and sys.platform != "linux":
        return "host memory limits require Linux"
    if kind == "cuda" and not torch.cuda.is_available():
        return "no CUDA GPU here"
    if kind == "accelerator":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type == "cuda":
            return "no accelerator other than CUDA here"
    return None


@pytest.fixture(
    scope="module",
    params=["host", "simulated", pytest.param("cuda", marks=pytest.mark.gpu), "accelerator"],
)
def saw(request):
    reason = reason_to_skip(request.param)
    if reason is not None:
        pytest.skip(reason)
    if request.param == "host":
        return answered(__file__).__getitem__
    return lambda name: CHECKS[name](make(request.param))


def test_beyond_the_limit_memory_runs_out_and_nearly_all_of_it_is_there_again_afterwards(saw):
    assert saw("limit_runs_out_and_recovers") == {"beyond": True, "nearly": False, "twice": False}


def test_many_small_blocks_run_out_near_the_limit_and_come_back(saw):
    seen = saw("many_small_blocks_run_out")

    assert seen["ran_out"] is True
    assert 0.83 <= seen["got"] <= 1.0
    assert seen["again"] is False


def test_limit_ends_with_its_context_also_on_an_exception(saw):
    assert saw("exit_lifts_the_limit") == {"beyond": False, "larger": False, "limit": None}


def test_limits_that_cannot_be_are_refused_and_change_nothing(saw):
    seen = saw("bad_limits_are_refused")

    assert "entered" not in seen["said"]
    assert "leaves no memory" in seen["said"][0]
    assert "already limited" in seen["said"][-1]
    assert seen["still"] is True


def test_peak_is_at_least_what_was_taken_and_resets(saw):
    seen = saw("peak_counts_and_resets")
    if seen["high"] is None:
        pytest.skip("this system does not count peaks")

    # Resident memory also loses pages that the kernel takes back from elsewhere meanwhile, hence the one MiB.
    assert 47 * MIB <= seen["high"] - seen["base"] <= 64 * MIB
    assert seen["after_death"] == pytest.approx(seen["high"], abs=MIB)
    assert seen["low"] - seen["base"] < 8 * MIB


def test_reading_adds_up(saw):
    seen = saw("reading_is_consistent")

    assert seen["limit"][0] == pytest.approx(seen["limit"][1], abs=MIB)
    assert seen["limit"][2] is None
    assert 32 * MIB <= seen["grew"] <= 40 * MIB
    assert 32 * MIB <= seen["shrank"] <= 40 * MIB
    assert seen["fits"] is True
    assert seen["fraction"] is True


def test_ensure_raises_where_it_would_not_fit_and_only_there(saw):
    assert saw("ensure_asks_before") == {"little": False, "nothing": False, "much": True, "held": True}


def test_reserve_raises_beyond_the_limit_also_where_it_is_soft(saw):
    assert saw("reserve_asks_the_limit") == [False, True]


def test_peak_above_a_soft_limit_is_told_with_the_limit_that_would_do(saw):
    seen = saw("soft_limit_is_told_by_the_peak")

    within, above = seen["said"]
    assert within is None
    assert (above is None) is not seen["is_soft"]
    assert above is None or above.endswith("would do")


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(json.dumps({name: check(make("host")) for name, check in CHECKS.items()}))  # noqa: T201 - read by the test
