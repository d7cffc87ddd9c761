"""Checks of the host backend that lower this process's own limit; run by `run_checks`, one process for many of them.

Each check is a function `check_<name>`; what it returns is printed as JSON and asserted on by the test of that name.
The process ends at once where one fails badly (a signal), so the tests that use its output fail with what it said.
"""

# ruff: noqa: BLE001 - what is raised, by whomever, is what the checks look at
# ruff: noqa: PLC0415, T201 - only the child imports the package, and it answers on stdout

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None

_MIB = 2**20


def run_checks(*names, is_fresh=False, **environment):
    """Run checks in one child process and return what each returned, or its traceback as a string."""
    return answered(__file__, *names, is_fresh=is_fresh, **environment)


def answered(file, *arguments, is_fresh=False, **environment):
    """Run a file in a child process, and return what it prints as JSON.

    One that is not fresh has the memory of the process that it was forked from, as all others of that process have.
    """
    from support.processes import fork_server
    from support.processes.folders import ROOT, TESTS

    done = subprocess.run(
        [*([sys.executable] if is_fresh else fork_server.python()), "-W", "error", file, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])} | environment,
    )
    assert done.returncode == 0, f"the child ended with {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def _data_bytes():
    return int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024


def _soft():
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def check_tighter_limit_of_the_process_stays_in_force(host, torch):
    old = resource.getrlimit(resource.RLIMIT_DATA)
    bound = _data_bytes() + 300 * _MIB
    resource.setrlimit(resource.RLIMIT_DATA, (bound, old[1]))
    try:
        with host.limited(2000 * _MIB):
            limit, room = host.reading().limit_bytes, bound - _data_bytes()
        free = host.reading().free_bytes
        room = max(room, bound - _data_bytes())
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, old)
    return {"limit": limit, "free": free, "room": room}


def check_process_at_its_own_limit_is_refused(host, torch):
    with host.limited(None):
        old = resource.getrlimit(resource.RLIMIT_DATA)
        data = _data_bytes()
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


def check_random_state_is_untouched(host, torch):
    before = torch.get_rng_state()
    with host.limited(100 * _MIB):
        pass
    return bool(torch.equal(before, torch.get_rng_state()))


def check_system_without_limits_refuses_one_and_works_without(host, torch):
    from autoaccum._memory import host as module
    from autoaccum._memory.host import Host

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


def check_onednn_that_is_lost_is_told_where_little_is_free(host, torch):
    """Let oneDNN run out of memory for a kernel, and leave a few MiB free then."""
    from autoaccum import is_oom
    from autoaccum._memory.host import _warm_up

    _warm_up()

    def convolve(width):
        try:
            torch.nn.functional.conv2d(torch.ones(4, 8, 8, width), torch.ones(16, 8, 3, 3))
        except RuntimeError as error:
            return str(error)
        return "worked"

    old = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + 8 * _MIB, old[1]))
        host.release()
        # Room for tensors, which the heap of a process that has done little does not have, and not for many kernels.
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + _MIB, old[1]))
        tried = [convolve(width) for width in range(200, 210)]
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + 4 * _MIB, old[1]))
        host.release()
        said, is_lack = "nothing", True
    except Exception as exception:
        said, is_lack = f"{type(exception).__name__}: {exception}", is_oom(exception)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, old)
    return {"tried": tried, "said": said, "is lack of memory": is_lack}


def check_second_thread_is_refused(host, torch):
    import threading

    from autoaccum._memory.host import Host
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


ASK = "import resource; print(resource.getrlimit(resource.RLIMIT_DATA)[0])"


def _asked():
    return int(subprocess.run([sys.executable, "-S", "-c", ASK], capture_output=True, text=True, check=True).stdout)


def check_processes_do_not_inherit_the_limit(host, torch):
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


def check_limit_is_lifted_until_the_outermost_block_ends(host, torch):
    before, seen = _soft(), []
    with host.limited(16 * _MIB):
        with host.lifted():
            with host.lifted():
                seen.append(_soft() == before)
            seen.append(_soft() == before)
        seen.append(_soft() == before)
    return seen


def check_batches_of_the_loader_are_exempt(host, torch):
    def allocates():
        try:
            torch.empty(32 * _MIB, dtype=torch.uint8)
        except RuntimeError:
            return False
        return True

    with host.limited(16 * _MIB):
        host.exclude_loader_batches(4 * _MIB)
        with host.lifted():
            batch = torch.empty(600 * _MIB, dtype=torch.uint8)
        before = allocates()
        host.exclude_loader_batches(batch.nbytes)
        batch[: 64 * _MIB] = 1
        return {"before": before, "then": allocates(), "used": host.reading().used_bytes, "free": _free_of(host)}


def _free_of(host):
    host.trim()
    return host.reading().free_bytes


def check_runner_is_limited_within_its_steps(host, torch):
    import autoaccum

    before, seen, limit = _soft(), {}, 24 * _MIB

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(2, 20_000), torch.nn.Linear(20_000, 1)

        def forward(self, inputs):
            seen[seen["place"]] = _soft()
            return self.last(self.first(inputs).exp())

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
    )
    seen["place"] = "step"
    largest = [max(runner.step(batch).micro_batches)]
    seen["between"] = _soft()
    seen["place"] = "later step"
    largest += [max(runner.step(batch).micro_batches) for _ in range(7)]
    seen["place"] = "evaluation"
    runner.evaluate(batches())
    return {**seen, "before": before, "after": _soft(), "largest": largest}


def _convolutional(torch):
    nn = torch.nn
    body = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*body, nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4096, 10))


def check_peak_counts_what_the_heap_has_kept(host, torch):
    with host.counted(None):
        _allocated(torch)
        host.reset_peak()
        held = host.peak_bytes()
        _allocated(torch)
        return (host.peak_bytes() - held) / _MIB


def _allocated(torch):
    return [torch.ones(2 * _MIB) for _ in range(8)]  # 64 MiB, which the heap has once the list is gone


def check_small_convolutional_net_trains(host, torch):
    import autoaccum

    loader = [(torch.randn(256, 1, 16, 16), torch.randint(10, (256,)))] * 4
    options = {"device": "cpu", "memory_limit": f"{os.environ['MIB']}MiB", "progress": False}
    result = autoaccum.fit(_convolutional(torch), loader, 256, **options)
    sizes = [max(report.micro_batches) for report in result.history]
    peak = result.history[-1].peak_bytes  # the fourth window is measured, and trials are over
    larger = -(-256 // (len(result.plan.micro_batches) - 1))
    one_less = _peak_of(host, torch, larger)
    return {"steps": result.steps, "largest": sizes[-1], "peak": peak, "one micro-batch less": one_less}


def _peak_of(host, torch, samples):
    model, loss = _convolutional(torch), torch.nn.CrossEntropyLoss()
    inputs, targets = torch.randn(samples, 1, 16, 16), torch.randint(10, (samples,))
    with host.limited(1000 * _MIB):
        loss(model(inputs[:2]), targets[:2]).backward()  # gradients are there in all but a window's first
        host.reset_peak()
        loss(model(inputs), targets).backward()
        return host.peak_bytes()


def check_limit_too_small_for_one_sample(host, torch):
    import autoaccum
    from autoaccum.errors import DoesNotFitError

    model, updates = _convolutional(torch), []
    loader = [(torch.randn(4, 1, 64, 64), torch.randint(10, (4,)))]
    model[-1] = torch.nn.Linear(64 * 32 * 32, 10)
    then = [parameter.clone() for parameter in model.parameters()]

    class Counts(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            updates.append(report)

    options = {"device": "cpu", "memory_limit": "6MiB", "progress": False, "callbacks": [Counts()]}
    try:
        autoaccum.fit(model, loader, 4, **options)
        said = "trained"
    except DoesNotFitError as error:
        said = f"DoesNotFitError: {error}"
    is_as_before = all(map(torch.equal, then, model.parameters()))
    return {"said": said, "updates": len(updates), "then": int(is_as_before)}


def _wide(torch):
    # Not GELU: oneDNN computes it, whose kernels may be what does not fit, and then it is lost in this thread.
    nn = torch.nn
    return nn.Sequential(
        *(
            layer
            for width in (9000, 15000, 21000)
            for layer in (nn.LayerNorm(16), nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 16))
        )
    )


def check_limit_of_the_process(host, torch):
    """Train with sizes that are found where memory really runs out, or try one size by hand."""
    import autoaccum
    from autoaccum import is_oom
    from autoaccum._memory.host import _warm_up

    how, size = os.environ["HOW"], int(os.environ["SIZE"])
    model, loss = _wide(torch), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(size, 16), torch.randint(16, (size,))
    _warm_up()
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + int(os.environ["MIB"]) * _MIB, resource.RLIM_INFINITY))
    trials = []

    class Notes(autoaccum.Callback):
        def on_trial(self, trial):
            trials.append(trial.fits)

    if how == "by hand":
        try:
            for _ in range(4):
                loss(model(batch[0]), batch[1]).backward()
                loss(model(batch[0]), batch[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError as error:
            return not is_oom(error)
        return True
    options = {"loss": loss, "device": "cpu"}
    if how == "find":
        found = autoaccum.find_micro_batch(model, batch, optimizer=optimizer, **options)
        return {"size": found.micro_batch, "failures": sum(not trial.fits for trial in found.trials)}
    options |= {"optimizer": optimizer, "progress": False, "callbacks": [Notes()]}
    sizes = autoaccum.fit(model, [batch] * 4, size, **options).history[-1].micro_batches
    return {"size": max(sizes), "steps": len(sizes), "failures": trials.count(False)}


def check_room_after_failures(host, torch):
    """Let a large allocation fail, then fill a limit of the process with small ones, and free all."""
    old = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + 64 * _MIB, old[1]))
    try:
        with host.limited(None):
            before = host.reading().free_bytes
            for block in (128 * _MIB, 96 * 1024):
                blocks = []
                try:
                    while True:
                        blocks.append(torch.empty(block, dtype=torch.uint8))
                except RuntimeError:
                    del blocks
                    host.release()
            return {"before": before, "after": host.reading().free_bytes}
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, old)


def main(names):
    import torch

    from autoaccum._memory.host import Host

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
