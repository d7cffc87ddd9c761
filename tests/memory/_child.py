"""Checks of the host backend that lower this process's own limit; run by `run_checks`, one process for many of them.

Each check is a function `check_<name>`; what it returns is printed as JSON and asserted on by the test of that name.
The process ends at once where one fails badly (a signal), so the tests that use its output fail with what it said.
"""

# ruff: noqa: BLE001, TRY301 - what is raised, by whomever, is what the checks look at
# ruff: noqa: PLC0415, T201 - only the child imports the package, and it answers on stdout

import contextlib
import json
import os
import resource
import subprocess
import sys
import traceback
from pathlib import Path

_MIB = 2**20


def run_checks(*names):
    """Run checks in one child process and return what each returned, or its traceback as a string."""
    import warm

    source = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [*warm.python(), "-W", "error", __file__, *names],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert done.returncode == 0, f"the child ended with {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def _soft():
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def check_exit_puts_the_limit_back(host, torch):
    before = _soft()
    with host.limited(200 * _MIB):
        inside = _soft()
    try:
        with host.limited(200 * _MIB):
            raise KeyError
    except KeyError:
        after_exception = _soft()
    return {"before": before, "inside": inside, "after": _soft(), "after_exception": after_exception}


def check_lifted_puts_the_old_limit_in_force(host, torch):
    before = _soft()
    with host.limited(200 * _MIB):
        limited = _soft()
        try:
            with host.lifted():
                lifted = _soft()
                seen_by_a_process = subprocess.run(
                    [sys.executable, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_DATA)[0])"],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
                raise KeyError
        except KeyError:
            again = _soft()
    return {
        "before": before,
        "limited": limited,
        "lifted": lifted,
        "process": int(seen_by_a_process),
        "again": again,
    }


def check_tighter_limit_of_the_process_stays_in_force(host, torch):
    host.trim()  # what the heap gives back later would be free then, beyond the limit that is set here
    held = host.reading().used_bytes  # the backend was made a moment ago
    old = resource.getrlimit(resource.RLIMIT_DATA)
    data = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (data + 300 * _MIB, old[1]))
    try:
        with host.limited(2000 * _MIB):
            limit = host.reading().limit_bytes
        free = host.reading().free_bytes
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, old)
    return {"limit": limit, "free": free, "held": held}


def check_room_that_an_earlier_training_left_in_the_heap_counts(host, torch):
    from autoaccum._memory import _linux
    from autoaccum._oom import is_oom

    with host.limited(100 * _MIB):
        pass  # from here on, blocks below 32 MiB are in the heap
    held = [torch.ones(_MIB // 4) for _ in range(240)]
    pins = held[::3]  # between two free blocks there is always one in use
    del held
    with host.limited(50 * _MIB):
        pass
    mapped = _linux.status_bytes("VmData")[0]
    again = [torch.ones(_MIB // 4) for _ in range(60)]
    mapped = _linux.status_bytes("VmData")[0] - mapped
    del again
    taken, ran_out = [], False
    with host.limited(50 * _MIB):
        used, anonymous = host.reading().used_bytes, _linux.status_bytes("RssAnon")[0]
        try:
            for _ in range(150):
                taken.append(torch.ones(_MIB // 4))  # noqa: PERF401 - it fails half-way
        except Exception as error:
            ran_out = is_oom(error)
        peak = host.peak_bytes()
        resident = _linux.status_bytes("RssAnon")[0] - anonymous
        count = len(taken)
        taken.clear()
    del pins
    return {"used": used, "count": count, "ran_out": ran_out, "peak": peak, "resident": resident, "mapped": mapped}


def check_process_at_its_own_limit_is_refused(host, torch):
    with host.limited(None):
        old = resource.getrlimit(resource.RLIMIT_DATA)
        data = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
    # Lowered between the warm-up and the limit, as a batch system might.
    resource.setrlimit(resource.RLIMIT_DATA, (data // 2, old[1]))
    try:
        with host.limited(100 * _MIB):
            said = "entered"
    except Exception as exception:
        said = f"{type(exception).__name__}: {exception}"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, old)
    return said


def check_threads_started_under_a_limit_do_not_end_the_process(host, torch):
    with _threads(torch, 4), host.limited(24 * _MIB):
        return float((torch.ones(1024, 256) @ torch.ones(256, 64)).sum())


@contextlib.contextmanager
def _threads(torch, number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_twenty_failing_steps_leave_nothing_behind(host, torch):
    from autoaccum._oom import is_oom, let_go

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3))
    with host.limited(100 * _MIB):
        failed = 0
        used = []
        for turn in range(20):
            try:
                model(torch.ones(32 + turn, 3, 96, 96)).sum().backward()
            except Exception as exception:
                failed += is_oom(exception)
                let_go(exception)
            model.zero_grad()
            host.release()
            used.append(host.reading().used_bytes)
        model(torch.ones(4, 3, 96, 96)).sum().backward()
    # The least of the last few: on a busy machine a thread may still be about to give back what it held.
    return {"failed": failed, "left": min(used[-5:]) - used[0], "used_mib": [u >> 20 for u in used]}


# Rows, inner side and columns. MKL has kernels of its own for AMD's processors; their largest buffers belong to other
# products than those of the kernels for Intel's.
_PRODUCTS = (
    *((rows, 1024, 1024) for rows in (2, 8, 64, 256)),
    (11, 2698, 1931),
    (35, 3265, 2050),
    (64, 512, 4096),
    (256, 512, 4096),
    (4096, 128, 2048),
    (8192, 192, 96),
)


def check_matrix_products_of_many_sizes_leave_nothing_behind(host, torch):
    from autoaccum._memory import _glibc, _mkl

    def used_bytes(*, is_limited):
        _glibc.Settled()  # else the heap keeps the products themselves
        factors = [
            (torch.ones(rows, inner, dtype=dtype), torch.ones(columns, inner, dtype=dtype).t())
            for rows, inner, columns in _PRODUCTS
            for dtype in (torch.float32, torch.float64)
        ]
        with host.limited(400 * _MIB if is_limited else None):
            before = host.reading().used_bytes
            for left, right in factors:
                torch.mm(left, right)
            kept = host.reading().used_bytes - before
            host.trim()
            return {"kept": kept, "trimmed": host.reading().used_bytes - before}

    seen = {"has_mkl": _mkl._library() is not None}
    for number in (torch.get_num_threads(), 4):
        with _threads(torch, number):
            seen[f"free, {number} threads"] = used_bytes(is_limited=False)
            seen[f"limited, {number} threads"] = used_bytes(is_limited=True)
    hold, _mkl.hold_buffers = _mkl.hold_buffers, lambda: None
    host.trim()
    try:
        seen["limited, nothing held"] = used_bytes(is_limited=True)
    finally:
        _mkl.hold_buffers = hold
    return seen


def check_matrix_products_have_the_same_bits_where_a_limit_is_used_up(host, torch):
    tried, other = 0, []
    for number in (torch.get_num_threads(), 4):
        with _threads(torch, number):
            host.trim()
            with host.limited(64 * _MIB):
                for rows, inner, columns in _USED_UP:
                    tried += 1
                    if not _has_the_same_bits(host, torch, rows, inner, columns):
                        other.append((number, rows, inner, columns))
    return {"tried": tried, "other": other}


_USED_UP = ((768, 16, 256), (8, 512, 1536), (12, 384, 3072), (64, 512, 4096), (512, 512, 512), (8192, 192, 96))


def _has_the_same_bits(host, torch, rows, inner, columns):
    left, right = torch.randn(inner, rows).t(), torch.randn(inner, columns)
    under, free = torch.empty(rows, columns), torch.empty(rows, columns)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (4096, hard))  # not a byte more; Linux takes 0 for none
    try:
        torch.mm(left, right, out=under)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    with host.lifted():
        torch.mm(left, right, out=free)
    return torch.equal(under, free)


def check_random_state_is_untouched(host, torch):
    before = torch.get_rng_state()
    with host.limited(100 * _MIB):
        pass
    return bool(torch.equal(before, torch.get_rng_state()))


def check_environment_is_as_before(host, torch):
    before = dict(os.environ)
    with host.limited(100 * _MIB):
        return dict(os.environ) == before


def check_peak_is_none_where_it_cannot_be_reset(host, torch):
    from autoaccum._memory import _linux

    _linux.reset_high_water = lambda: False
    with host.limited(100 * _MIB):
        return host.peak_bytes()


def check_system_without_limits_refuses_one_and_works_without(host, torch):
    from autoaccum._memory import Host
    from autoaccum._memory import host as module

    module.resource = None
    module._linux.status_bytes = lambda *fields: None
    host = Host()
    with host.limited(None):
        host.ensure(_MIB)
        host.release()
        reading, peak = host.reading(), host.peak_bytes()
    try:
        with host.limited(100 * _MIB):
            said = "entered"
    except Exception as exception:
        said = f"{type(exception).__name__}: {exception}"
    return {"free": reading.free_bytes, "peak": peak, "said": said}


def check_onednn_that_refuses_everything_is_told(host, torch):
    from autoaccum._oom import is_oom

    with host.limited(100 * _MIB):
        host.release()
        whole, torch.nn.functional.conv2d = torch.nn.functional.conv2d, _refuse
        try:
            host.release()
            said = "nothing"
        except Exception as exception:
            said, oom = f"{type(exception).__name__}: {exception}", is_oom(exception)
        torch.nn.functional.conv2d = whole
    return {"said": said, "oom": oom}


def check_onednn_that_refuses_everything_is_told_where_little_is_free(host, torch):
    # Refused by hand: where memory really runs out inside native code, this process may end by it.
    whole = torch.nn.functional.conv2d
    with host.limited(64 * _MIB):
        held = torch.empty(host.reading().free_bytes - 8 * _MIB, dtype=torch.uint8)
        torch.nn.functional.conv2d = _refuse
        try:
            host.release()
            said = "nothing"
        except Exception as exception:
            said = f"{type(exception).__name__}: {exception}"
        torch.nn.functional.conv2d = whole
        del held
    return said


def _refuse(*arguments):
    raise RuntimeError("could not create a primitive")


def check_second_thread_is_refused(host, torch):
    import threading

    from autoaccum._memory import Host
    from autoaccum.errors import InvalidInputError

    before, entered, seen = _soft(), threading.Event(), {}
    refused = threading.Event()

    def first():
        with host.limited(200 * _MIB):
            seen["limited"] = _soft()
            entered.set()
            refused.wait(60)

    thread = threading.Thread(target=first, name="first")
    thread.start()
    entered.wait(60)
    try:
        with Host().limited(100 * _MIB):
            pass
    except InvalidInputError as error:
        seen["refusal"] = str(error)
    refused.set()
    thread.join()
    after = _soft()
    with Host().limited(100 * _MIB):
        seen["afterwards"] = "limited" if _soft() != before else "not limited"
    return {"before": before, "after": after, **seen}


def check_limits_nest_and_end_in_any_order(host, torch):
    from autoaccum._memory import Host, _glibc

    before, seen, said, thresholds = _soft(), {}, [], []
    libc = _glibc._libc()
    mallopt = libc.mallopt

    def set_option(which, value):
        if which == _glibc._M_MMAP_THRESHOLD:
            said.append(value)
        return mallopt(which, value)

    libc.mallopt = set_option

    def look(name):
        seen[name] = _soft()
        thresholds.append(said[-1])

    outer, inner = host.limited(200 * _MIB), Host().limited(100 * _MIB)
    outer.__enter__()
    look("outer")
    with Host().limited(10_000 * _MIB):
        look("wider")
    inner.__enter__()
    look("inner")
    outer.__exit__(None, None, None)
    look("outer_ended_first")
    inner.__exit__(None, None, None)
    look("after")
    libc.mallopt = mallopt
    return {"before": before, "thresholds": thresholds, **seen}


def check_limit_within_a_lifted_one_holds(host, torch):
    from autoaccum._memory import Host

    before, seen, other = _soft(), {}, Host()
    with host.limited(200 * _MIB):
        seen["outer"] = _soft()
        with host.lifted():
            seen["lifted"] = _soft()
            with other.limited(10_000 * _MIB):
                seen["within"] = _soft()
                seen["room"] = other.reading().limit_bytes
            seen["lifted_again"] = _soft()
        seen["lowered_again"] = _soft()
    return {"before": before, **seen}


def check_interrupt_at_every_line_leaves_no_limit(host, torch):
    import threading

    from autoaccum._memory import Host, _process
    from autoaccum._memory import host as module

    module._warm_up = lambda: None  # which takes milliseconds and sets nothing
    files, before, tries, left = (module.__file__, _process.__file__), _soft(), 0, []
    own = Host()
    own.release = lambda: None
    done = False
    while not done:
        interrupt = _Interrupt(tries, files)
        sys.settrace(interrupt)
        try:
            with own.limited(200 * _MIB), own.lifted():
                pass
        except KeyboardInterrupt:
            pass
        sys.settrace(None)
        done, tries = interrupt.where is None, tries + 1
        own.is_limited = own._is_counted = False
        # A trace function runs where no signal is delivered, too: between the end of a block and its lock's release.
        _process.owner._lock = threading.RLock()
        if _soft() != before or _process.owner._entered or module._ONEDNN_CACHE in os.environ:
            left.append(interrupt.where)
            _process.owner._forget()
    return {"tries": tries, "left": left}


class _Interrupt:
    """Raises KeyboardInterrupt before one line of some files, as a signal would where none are held back."""

    def __init__(self, number, files):
        self._left, self._files = number, files
        self.where = None

    def __call__(self, frame, event, argument):
        import signal

        if frame.f_code.co_filename not in self._files or frame.f_code.co_name == "__del__":
            return None  # Python drops what is raised in __del__
        if event == "line" and self.where is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            if self._left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
            self._left -= 1
        return self


def check_limit_that_cannot_be_set_leaves_nothing(host, torch):
    from autoaccum._memory import Host

    before, said = _soft(), "nothing"
    set_limit, resource.setrlimit = resource.setrlimit, _refuse_to_set
    try:
        with host.limited(200 * _MIB):
            pass
    except ValueError as error:
        said = f"{type(error).__name__}: {error}"
    resource.setrlimit = set_limit
    after = _soft()
    with Host().limited(100 * _MIB):
        following = "limited" if _soft() != before else "not limited"
    return {"before": before, "after": after, "said": said, "next": following}


def _refuse_to_set(kind, limits):
    raise ValueError("refused")


def check_hard_limit_that_was_lowered_meanwhile_stays(host, torch):
    # The last of the checks: a hard limit cannot be raised again.
    with host.limited(200 * _MIB):
        resource.setrlimit(resource.RLIMIT_DATA, (_soft(), 2**40))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    return {"after": soft, "hard": hard}


ASK = "import resource; print(resource.getrlimit(resource.RLIMIT_DATA)[0])"


def _asked():
    return int(subprocess.run([sys.executable, "-S", "-c", ASK], capture_output=True, text=True, check=True).stdout)


def check_processes_do_not_inherit_the_limit(host, torch):
    import multiprocessing

    import autoaccum

    before, seen = _soft(), {}

    class Model(torch.nn.Linear):
        def forward(self, inputs):
            if "limited" not in seen:
                seen["limited"] = _soft()
                reading, writing = os.pipe()
                child = os.fork()
                if child == 0:
                    os.write(writing, str(_soft()).encode())
                    os._exit(0)
                os.waitpid(child, 0)
                seen["fork in a step"] = int(os.read(reading, 100))
                queue = multiprocessing.get_context("fork").SimpleQueue()
                process = multiprocessing.get_context("fork").Process(target=lambda: queue.put(_soft()))
                process.start()
                seen["multiprocessing fork in a step"] = queue.get()
                process.join()
            return super().forward(inputs)

    class Starts(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            seen.setdefault("callback", _asked())

    def batches():
        for _ in range(2):
            seen["loader"] = _asked()
            yield torch.ones(4, 2), torch.ones(4, 1)

    autoaccum.fit(
        Model(2, 1),
        batches(),
        4,
        device="cpu",
        micro_batch=4,
        memory_limit="200MiB",
        callbacks=[Starts()],
        progress=False,
    )
    return {"before": before, **seen}


def check_runner_is_limited_within_its_steps(host, torch):
    import autoaccum
    from autoaccum._memory import _glibc

    before, seen, limit = _soft(), {}, 24 * _MIB

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(2, 20_000), torch.nn.Linear(20_000, 1)

        def forward(self, inputs):
            seen[seen["place"]] = _soft()
            return self.last(self.first(inputs).exp())

    class Looks(autoaccum.Callback):
        def on_oom(self, event, *, step):
            seen["callback"] = _soft()

    def batches():
        seen["loader"] = _soft()
        yield batch

    # 20 MiB for the activations of 128 samples and as much for their gradients.
    batch = torch.zeros(128, 2), torch.zeros(128, 1)
    runner = autoaccum.Runner(
        Model(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        autoaccum.plan(128, 128),
        device="cpu",
        memory_limit=limit,
        callbacks=[Looks()],
        notices=_silent(),
    )
    seen["place"] = "step"
    report = runner.step(batch)
    seen["between"] = _soft()
    settled = len(_glibc.Settled._every)
    seen["place"] = "second step"
    runner.step(batch)
    seen["place"] = "evaluation"
    runner.evaluate(batches())
    peak = report.peak_bytes
    del runner
    settled = settled, len(_glibc.Settled._every)
    told = {"oom_events": report.oom_events, "peak": peak, "limit": limit, "settled": settled}
    return {**seen, "before": before, "after": _soft(), **told}


def _silent():
    from autoaccum._system.notices import Notices

    return Notices(silent=True)


def check_fit_in_a_second_thread_and_in_a_callback(host, torch):
    import threading

    import autoaccum
    from autoaccum.errors import InvalidInputError

    before, steps, refusals, nested = _soft(), [], [], []

    def train(callbacks=()):
        batches = [(torch.ones(4, 2), torch.ones(4, 1))] * 3
        return autoaccum.fit(
            torch.nn.Linear(2, 1),
            batches,
            4,
            device="cpu",
            micro_batch=4,
            memory_limit="200MiB",
            callbacks=list(callbacks),
            progress=False,
        ).steps

    class Nests(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            nested.append(train())

    def until_it_may():
        while True:
            try:
                steps.append(train([Nests()] if not nested else ()))
            except InvalidInputError as error:
                refusals.append(str(error))
            else:
                return

    threads = [threading.Thread(target=until_it_may) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = refusals[0] if refusals else ""
    return {
        "before": before,
        "after": _soft(),
        "steps": steps,
        "in_a_callback": nested[0],
        "refusals": len(refusals),
        "said": said,
    }


def main(names):
    import torch

    from autoaccum._memory import Host

    torch.set_num_threads(2)
    results = {}
    for name in names:
        try:
            results[name] = globals()[f"check_{name}"](Host(), torch)
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
