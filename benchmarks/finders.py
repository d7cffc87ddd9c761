"""The answers of finders of the largest batch, the steps they take, and whether they restore the state.

Every finder runs on every workload in its own process, under the same limit, measured in the same way: see `Meter`; on
a GPU it is a share of its memory. Its answer is compared with the truth: a bracket in which each size trains in a
process of its own under that limit, two steps of which the second has two micro-batches, so that gradients and
optimizer state exist when the last begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import isolated
import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from workloads import GPU_WORKLOADS, WORKLOADS, cut, each, placed

from autoaccum._memory.host import Host
from autoaccum._oom import clear_traceback_frames, first_line, is_oom

FINDERS = {
    "autoaccum": "autoaccum",
    "lightning-power": "Lightning, power",
    "lightning-binsearch": "Lightning, binsearch",
    "accelerate": "Accelerate",
    "halving": "halving, as Composer does",
}
ALL = WORKLOADS | GPU_WORKLOADS
STEPS = 2
TIMEOUT_S = 180


# --- in the child ---------------------------------------------------------------------------------------------------


class Meter:
    """Raises where a step takes more than the limit, as an allocator with so much memory would, if somewhat later.

    It looks after each module's forward pass, after each backward pass, and after the optimizer's step. What counts is
    the memory in use at its highest, as for `fit`: resident memory without file pages, while freed blocks leave the
    process at once. What one pass took does not count towards the next.
    """

    def __init__(self, host, model):
        self._host, self._model, self._over = host, model, False
        self._handles = [
            register_module_forward_pre_hook(lambda module, _: self._begin() if module is model else None),
            register_module_forward_hook(lambda *_: self.check()),
            register_optimizer_step_pre_hook(lambda *_: self.check()),
            register_optimizer_step_post_hook(lambda *_: self.check()),
        ]
        host.reset_peak()

    def _begin(self):
        self.check()
        self._over = False
        self._host.reset_peak()

    def check(self):
        """Raise if more than the limit was in use since the pass began; once, as the attempt ends with it."""
        if self._over:
            return
        peak, limit = self._host.peak_bytes(), self._host.limit_bytes
        if peak > limit:
            self._over = True
            # All finders recognize PyTorch's message of the CPU.
            raise torch.OutOfMemoryError(f"DefaultCPUAllocator: can't allocate memory: {peak:,} bytes of {limit:,}")

    def stop(self):
        """Measure no longer, and let the heap keep freed blocks, as `fit` does after its first windows."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._host.stop_measuring()


@contextlib.contextmanager
def limited(workload, model=None):
    """Limit the memory: on a GPU its own; on the host that beyond what is held now, with the limit and heap of `fit`.

    On the host it yields the `Meter`.
    """
    if workload.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(workload.limit_bytes / total)
        try:
            yield None
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    host = Host()
    with host.limited(workload.limit_bytes):
        meter = Meter(host, model)
        try:
            yield meter
        finally:
            meter.stop()


def state_of(model, optimizer):
    """Return a hash for each of parameters, buffers, optimizer state and random state."""

    def digest(tensors):
        total = hashlib.sha256()
        for name, tensor in tensors:
            total.update(str(name).encode())
            total.update(tensor.detach().cpu().contiguous().numpy().reshape(-1).view(np.uint8))
        return total.hexdigest()

    kept = [
        (f"{index} {name}", value if isinstance(value, torch.Tensor) else torch.tensor(float(value or 0)))
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    ]
    others = hashlib.sha256(repr((random.getstate(), np.random.get_state()[1].tolist())).encode()).hexdigest()  # noqa: NPY002 - the global generator is what is looked at
    return {
        "parameters": digest(model.named_parameters()),
        "buffers": digest(model.named_buffers()),
        "optimizer": digest(kept),
        "random": digest([("torch", torch.get_rng_state())]) + others,
    }


class Watched:
    """Records what a finder does: forward passes, sizes tried, time, and the state it leaves."""

    def __init__(self, model, optimizer, connection):
        self._model, self._optimizer, self._connection = model, optimizer, connection
        self._began_s = self._looking_s = 0.0
        self.before, self.after = {}, {}
        model.register_forward_pre_hook(lambda *_: isolated.tell(connection, "step"))

    def begin(self):
        """Record the state and start the clock."""
        self.before = state_of(self._model, self._optimizer)
        self._began_s = time.perf_counter()

    def look(self):
        """Record the state that training starts with; the clock is paused meanwhile."""
        began_s = time.perf_counter()
        self.after = state_of(self._model, self._optimizer)
        self._looking_s += time.perf_counter() - began_s

    def seconds(self):
        """Return the finder's seconds so far."""
        return time.perf_counter() - self._began_s - self._looking_s

    @contextlib.contextmanager
    def trial(self, size):
        """Record a trial, which is what runs inside."""
        try:
            yield
        except BaseException as error:
            isolated.tell(self._connection, [int(size), False, first_line(error)[:100]])
            raise
        isolated.tell(self._connection, [int(size), True, None])


def find(connection, name, finder):
    """Run one finder on one workload."""
    workload = ALL[name]
    model, optimizer = workload.made()
    watched = Watched(model, optimizer, connection)
    run = {"autoaccum": by_autoaccum, "accelerate": by_accelerate, "halving": by_halving}.get(finder, by_lightning)
    answer, seconds = run(workload, model, optimizer, watched, finder)
    kept = {part: watched.after[part] == watched.before[part] for part in watched.before}
    return {"answer": int(answer), "seconds": seconds, "kept": kept}


def by_autoaccum(workload, model, optimizer, watched, _finder):
    import autoaccum  # noqa: PLC0415 - each process needs its own finder's library only

    batch = workload.batch(8)
    watched.begin()
    found = autoaccum.find_micro_batch(
        model,
        batch,
        loss=workload.criterion,
        optimizer=optimizer,
        device=workload.device,
        precision=workload.precision,
        memory_limit=workload.limit_bytes,
        max_micro_batch=workload.target,
    )
    seconds = watched.seconds()
    watched.look()
    for trial in found.trials:
        with contextlib.suppress(torch.OutOfMemoryError), watched.trial(trial.size):
            if not trial.fits:
                raise torch.OutOfMemoryError("did not fit")
    return found.micro_batch, seconds


class Samples(torch.utils.data.Dataset):
    """More samples than any finder requests, repeated from a few; each batch is a copy, as after collating."""

    def __init__(self, workload, length=100_000):
        self._pool, self._length = workload.batch(64), length

    def __len__(self):
        return self._length

    def __getitems__(self, indices):
        chosen = torch.tensor(indices) % 64
        return each(self._pool, lambda part: part[chosen])


def loader_of(samples, size):
    return torch.utils.data.DataLoader(samples, batch_size=size, collate_fn=lambda batch: batch)


def by_lightning(workload, model, optimizer, watched, finder):
    """Run the tuner with its defaults."""
    import lightning.pytorch as lightning  # noqa: PLC0415 - as above
    from lightning.pytorch.tuner import Tuner, batch_size_scaling  # noqa: PLC0415

    class Module(lightning.LightningModule):
        def __init__(self, model, optimizer, samples, loss):
            super().__init__()
            self.model, self.batch_size = model, 2
            self._made = (optimizer, samples, loss)

        def training_step(self, batch, _index):
            return self._made[2](self.model, batch)

        def configure_optimizers(self):
            return self._made[0]

        def train_dataloader(self):
            return loader_of(self._made[1], self.batch_size)

    def trainer(**arguments):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        where = {"accelerator": "cpu" if workload.device == "cpu" else "gpu", "devices": 1}
        return lightning.Trainer(enable_checkpointing=False, default_root_dir=folder, **where, **quiet, **arguments)

    attempt = batch_size_scaling._try_loop_run

    def watched_attempt(of_trainer, params):
        with watched.trial(of_trainer.lightning_module.batch_size):
            attempt(of_trainer, params)

    with tempfile.TemporaryDirectory() as folder:
        # Once without a limit on something small, so that the library's own memory is already allocated.
        small = torch.nn.Linear(2, 2)
        pairs = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 2))
        warm = Module(small, torch.optim.SGD(small.parameters(), lr=0.0), pairs, lambda net, pair: net(pair[0]).sum())
        trainer(max_steps=1).fit(warm, torch.utils.data.DataLoader(pairs, batch_size=2))
        batch_size_scaling._try_loop_run = watched_attempt
        module = Module(model, optimizer, Samples(workload), workload.loss)
        tuner = Tuner(trainer(max_epochs=1))
        with limited(workload, model):
            watched.begin()
            answer = tuner.scale_batch_size(module, mode=finder.removeprefix("lightning-"))
            seconds = watched.seconds()
            watched.look()
    return answer, seconds


def by_accelerate(workload, model, optimizer, watched, _finder):
    """Decorate a training function, as in Accelerate's documentation; it starts with the wanted batch."""
    from accelerate.utils import find_executable_batch_size  # noqa: PLC0415 - as above

    samples = Samples(workload)

    @find_executable_batch_size(starting_batch_size=workload.target)
    def train(batch_size):
        watched.look()
        with watched.trial(batch_size):
            for step, batch in enumerate(loader_of(samples, batch_size), 1):
                workload.step(model, optimizer, [batch])
                if step == STEPS:
                    break
        return batch_size

    with limited(workload, model):
        watched.begin()
        return train(), watched.seconds()


def by_halving(workload, model, optimizer, watched, _finder):
    """Reimplement Composer: start with the whole batch, halve on failure, train the batch again.

    Composer zeroes the gradients and restores nothing else. It does so only on CUDA and by CUDA's messages; here
    autoaccum recognizes out-of-memory errors. The clock stops at the second micro-batch of the attempt that succeeds.
    """
    size, window = workload.target, workload.batch(workload.target)
    with limited(workload, model):
        watched.begin()
        while True:
            watched.look()
            parts = cut(
                window, (size,) * (workload.target // size) + (workload.target % size,) * (workload.target % size > 0)
            )
            try:
                with watched.trial(size):
                    for number, part in enumerate(parts, 1):
                        workload.loss(model, placed(part, workload.device)).backward()
                        if number <= STEPS:
                            seconds = watched.seconds()
                    optimizer.step()
            except Exception as error:
                if not is_oom(error):
                    raise
                clear_traceback_frames(error)
            else:
                return size, seconds
            optimizer.zero_grad()
            if size == 1:
                raise RuntimeError("one sample does not fit")
            size //= 2


def fits(_connection, name, size):
    """Whether plain training with this size works."""
    workload = ALL[name]
    model, optimizer = workload.made()
    pool, chosen = workload.batch(64), torch.arange(size) % 64
    try:
        with limited(workload, model):
            batch = each(pool, lambda part: part[chosen])
            workload.step(model, optimizer, [batch])
            workload.step(model, optimizer, [batch, batch])
    except Exception as error:
        if not is_oom(error):
            raise
        clear_traceback_frames(error)
        return False
    return True


# --- in the parent --------------------------------------------------------------------------------------------------


def bracket(answer, fit, at_once=1, has_time=lambda: True):
    """Close a bracket around the largest size that fits, starting at an answer.

    Args:
        answer: A size near the truth.
        fit: Returns for each of several sizes whether it fits, or None if that could not be found out.
        at_once: Sizes to try at a time.
        has_time: Whether there is time for another round.

    Returns:
        The largest size seen to fit (0 if none), the smallest above it seen not to (None if none), and all sizes tried.
    """
    tried, low, high = {}, 0, None
    sizes = sorted({answer, answer + 1, *(math.ceil(answer * factor) for factor in (1.02, 1.05, 1.1))})[:at_once]
    while sizes and has_time():
        told = {n: fits for n, fits in fit(sizes).items() if fits is not None}
        if not told:
            break
        tried |= told
        low = max((n for n, fits in tried.items() if fits), default=0)
        high = min((n for n, fits in tried.items() if not fits and n > low), default=None)
        if high is None:
            sizes = sorted({low + 1, *(math.ceil(low * factor) for factor in (1.15, 1.3, 1.7, 2.5))})[-at_once:]
        else:
            inside = range(low + 1, high)
            number = min(at_once, len(inside))
            sizes = sorted({inside[(2 * k + 1) * len(inside) // (2 * number)] for k in range(number)})
    return low, high, tried


def truth(name, hint, *, at_once=1, left_s=lambda: math.inf):
    """Return what `bracket` does, each size in a process of its own."""

    def fit(sizes):
        def ask(size):
            _, value, why = isolated.call(fits, name, size, timeout_s=max(1.0, min(120.0, left_s() - 1)))
            return False if why is not None and why.startswith("died") else value

        return dict(zip(sizes, pool.map(ask, sizes), strict=True))

    with ThreadPoolExecutor(at_once) as pool:
        return bracket(hint, fit, at_once, lambda: left_s() > 8)


def run_once(name, finder, timeout_s=TIMEOUT_S):
    """Run a finder in a process of its own; return its answer, or how it ended, and its trials."""
    told, value, why = isolated.call(find, name, finder, timeout_s=timeout_s)
    trials = [message for message in told if message != "step"]
    return {
        "finder": finder,
        "answer": None,
        "trials": [trial[:2] for trial in trials],
        "failed": sum(not trial[1] for trial in trials),
        "steps": told.count("step"),
        "said": sorted({trial[2] for trial in trials if trial[2]}),
        "ended": why or "answered",
    } | (value or {})


def measure(name, finders, say):
    """Run every finder on a workload, and find the truth."""
    rows = []
    for finder in finders:
        rows.append(run_once(name, finder))
        say(f"{name}, {finder}: {rows[-1]}")
    hint = next((row["answer"] for row in rows if row["answer"]), 8)
    largest, _, tried = truth(name, hint)
    say(f"{name}, truth: {largest}")
    for row in rows:
        row["share"] = row["answer"] / largest if row["answer"] else None
    return {"workload": name, "truths": {"settled": {"largest": largest, "tried": sorted(tried.items())}}, "rows": rows}
