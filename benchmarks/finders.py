"""Part A: the answers of finders of the largest batch, the steps they take, and whether they restore the state.

Every finder runs on every workload in its own process, under the same limit. Its answer is compared with the truth: a
bisection in which each size runs plain training steps in its own process. There are two truths, because what fits
depends on the allocator:

* `settled`: glibc's allocator as autoaccum settles it under a limit, the second update of two micro-batches (so that
  gradients and optimizer state exist when the last begins); for autoaccum's answers;
* `plain`: the same limit and glibc's defaults, three updates of one batch each; for the others' answers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path

import isolated
import numpy as np
import torch
from workloads import WORKLOADS

from autoaccum._memory import Host
from autoaccum._oom import first_line, is_oom, let_go

FINDERS = {
    "autoaccum": "autoaccum",
    "lightning-power": "Lightning, power",
    "lightning-binsearch": "Lightning, binsearch",
    "accelerate": "Accelerate",
    "halving": "halving, as Composer does",
}
# Finders that search by training itself: it restarts, or continues, with every size.
WITHIN_TRAINING = ("accelerate", "halving")
STEPS = 2
TIMEOUT_S = 180
TRUTH_TIMEOUT_S = 120
# The precision of the search for the plain truth, and where it starts: its usual share of the settled one here.
LOOSE = 0.05
PLAIN_SHARE = 0.6


# --- in the child ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(limit_bytes: int):
    """Set RLIMIT_DATA to the memory held now plus the limit, with threads started and glibc's default allocator."""
    with Host().limited(None):
        held = next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmData:")
        )
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (held + limit_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def state_of(model, optimizer):
    """Return a hash for each of parameters, buffers, optimizer state and random state."""

    def digest(tensors):
        total = hashlib.sha256()
        for name, tensor in tensors:
            total.update(str(name).encode())
            total.update(tensor.detach().contiguous().numpy().reshape(-1).view(np.uint8))
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
        self.steps = 0
        self.limit = None
        self.before, self.after = {}, {}
        model.register_forward_pre_hook(self._count)

    def _count(self, _module, inputs):
        self.steps += 1
        isolated.tell(self._connection, {"forward": int(inputs[0].shape[0])})

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

    def tried(self, size, fits, error=None):
        """Record a trial."""
        said = None if error is None else first_line(error)[:100]
        isolated.tell(self._connection, {"trial": [int(size), bool(fits)], "said": said})


def limit_for(conditions, limit_bytes):
    """Return a context with the limit, and the allocator settled as by autoaccum or left alone."""
    return Host().limited(limit_bytes) if conditions == "settled" else limited(limit_bytes)


def find(connection, name, finder, peers):
    """Run one finder on one workload; `peers` are the conditions of all finders except autoaccum's."""
    workload = WORKLOADS[name]
    model, optimizer = workload.made()
    watched = Watched(model, optimizer, connection)
    watched.limit = functools.partial(limit_for, peers, workload.limit_bytes)
    run = {"autoaccum": by_autoaccum, "accelerate": by_accelerate, "halving": by_halving}.get(finder, by_lightning)
    answer, seconds = run(workload, model, optimizer, watched, finder)
    return {
        "answer": int(answer),
        "seconds": seconds,
        "steps": watched.steps,
        "kept": {part: watched.after[part] == watched.before[part] for part in watched.before},
    }


def by_autoaccum(workload, model, optimizer, watched, _finder):
    import autoaccum  # noqa: PLC0415 - each process needs its own finder's library only

    batch = workload.batch(8)
    watched.begin()
    found = autoaccum.find_micro_batch(
        model,
        batch,
        loss=workload.loss,
        optimizer=optimizer,
        device="cpu",
        precision="fp32",
        memory_limit=workload.limit_bytes,
        max_micro_batch=workload.target,
    )
    seconds = watched.seconds()
    watched.look()
    for trial in found.trials:
        watched.tried(trial.size, trial.fits)
    return found.micro_batch, seconds


class Samples(torch.utils.data.Dataset):
    """More samples than any finder requests, repeated from a few; each batch is a copy, as after collating."""

    def __init__(self, workload, length=100_000):
        self._pool, self._length = workload.batch(64), length

    def __len__(self):
        return self._length

    def __getitems__(self, indices):
        chosen = torch.tensor(indices) % 64
        return tuple(part[chosen] for part in self._pool)


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
            return self._made[2](self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return self._made[0]

        def train_dataloader(self):
            return loader_of(self._made[1], self.batch_size)

    def trainer(**arguments):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return lightning.Trainer(
            accelerator="cpu", devices=1, enable_checkpointing=False, default_root_dir=folder, **quiet, **arguments
        )

    attempt = batch_size_scaling._try_loop_run

    def watched_attempt(of_trainer, params):
        size = of_trainer.lightning_module.batch_size
        try:
            attempt(of_trainer, params)
        except BaseException as error:
            watched.tried(size, fits=False, error=error)
            raise
        watched.tried(size, fits=True)

    with tempfile.TemporaryDirectory() as folder:
        # Once without a limit on something small, so that the library's own memory is already allocated.
        small = torch.nn.Linear(2, 2)
        pairs = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 2))
        warm = Module(small, torch.optim.SGD(small.parameters(), lr=0.0), pairs, torch.nn.functional.mse_loss)
        trainer(max_steps=1).fit(warm, torch.utils.data.DataLoader(pairs, batch_size=2))
        batch_size_scaling._try_loop_run = watched_attempt
        module = Module(model, optimizer, Samples(workload), workload.loss)
        tuner = Tuner(trainer(max_epochs=1))
        with watched.limit():
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
        try:
            for step, (inputs, targets) in enumerate(loader_of(samples, batch_size)):
                optimizer.zero_grad()
                workload.loss(model(inputs), targets).backward()
                optimizer.step()
                if step + 1 == STEPS:
                    break
        except BaseException as error:
            watched.tried(batch_size, fits=False, error=error)
            raise
        watched.tried(batch_size, fits=True)
        return batch_size

    with watched.limit():
        watched.begin()
        return train(), watched.seconds()


def by_halving(workload, model, optimizer, watched, _finder):
    """Reimplement Composer: start with the whole batch, halve on failure, train the batch again.

    Composer zeroes the gradients and restores nothing else. It does so only on CUDA and by CUDA's messages; here
    autoaccum recognizes out-of-memory errors. The clock stops at the second micro-batch of the attempt that
    succeeds.
    """
    size, attempts = workload.target, iter(range(100))
    window = workload.batch(workload.target)
    seconds = 0.0
    with watched.limit():
        watched.begin()
        done = 0
        while done < STEPS and next(attempts) is not None:
            if done == 0:
                watched.look()
            failed = False
            try:
                for count, (inputs, targets) in enumerate(zip(*(part.split(size) for part in window), strict=True)):
                    part = len(inputs) / workload.target
                    (workload.loss(model(inputs), targets) * part).backward()
                    if done == 0 and count < STEPS:
                        seconds = watched.seconds()
                optimizer.step()
            except Exception as error:
                watched.tried(size, fits=False, error=error)
                if not is_oom(error):
                    raise
                let_go(error)
                failed = True
            optimizer.zero_grad()
            if not failed:
                done += 1
                continue
            if size == 1:
                raise RuntimeError("one sample does not fit")
            size //= 2
        watched.tried(size, fits=True)
    return size, seconds


def fits(_connection, name, size, conditions):
    """Whether plain training with this size works: three updates, or two of which the second is in two parts."""
    workload = WORKLOADS[name]
    model, optimizer = workload.made()
    pool = workload.batch(64)
    chosen = torch.arange(size) % 64
    settled = conditions == "settled"
    try:
        with limit_for(conditions, workload.limit_bytes):
            for parts in (1, 2) if settled else (1, 1, 1):
                for _ in range(parts):
                    inputs, targets = (part[chosen] for part in pool)
                    workload.loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
    except Exception as error:
        if not is_oom(error):
            raise
        let_go(error)
        return False
    return True


# --- in the parent --------------------------------------------------------------------------------------------------


def truth(name, conditions, hint):
    """Return the largest size up to the workload's target that trains, by a bisection that starts near a hint.

    Returns:
        The size, by how much it may be too low (0 if exact), and all trials.
    """
    tried: dict[int, bool] = {}
    largest = WORKLOADS[name].target

    def asks(size):
        _, value, why = isolated.call(fits, name, size, conditions, timeout_s=TRUTH_TIMEOUT_S)
        if why is not None and not why.startswith("died"):
            raise RuntimeError(f"truth of {name} at {size}, {conditions}: {why}")
        tried[size] = bool(value)
        return tried[size]

    # The truth for the others' answers need not be exact to the sample.
    loose = 0.0 if conditions == "settled" else LOOSE
    low, high, size, step = 0, largest + 1, min(max(1, hint), largest), max(0.02, 2 * loose)
    while high - low > max(1, int(low * loose)):
        if asks(size):
            low = size
        else:
            high = size
        if high > largest and low < largest:
            size = min(largest, max(low + 1, int(low * (1 + step))))
        elif low == 0:
            size = max(1, min(high - 1, int(high * (1 - step))))
        else:
            size = (low + high) // 2
        step = min(0.5, 2 * step)
    return low, high - 1 - low, [[size, ok] for size, ok in sorted(tried.items())]


def run_once(name, finder, peers):
    told, value, why = isolated.call(find, name, finder, peers, timeout_s=TIMEOUT_S)
    trials = [message["trial"] for message in told if "trial" in message]
    record = {
        "trials": trials,
        "failed": sum(not ok for _, ok in trials),
        "steps": sum("forward" in message for message in told),
        "ended": why or "answered",
        "said": sorted({message["said"] for message in told if message.get("said")}),
        "answer": None,
    }
    return record | (value or {})


def measure(name, finders, repeats, peers, say):
    """Run every finder on a workload; those whose seconds are compared run in turn, several times."""
    runs = {finder: [] for finder in finders}
    for turn in range(repeats):
        again = [finder for finder in finders if turn == 0 or finder in ("autoaccum", "lightning-binsearch")]
        for finder in again if turn % 2 == 0 else reversed(again):
            runs[finder].append(run_once(name, finder, peers))
            say(f"{name}, {finder}: {runs[finder][-1]}")
    hint = next((run["answer"] for run in runs.get("autoaccum", []) if run["answer"]), 8)
    truths = {}
    for conditions in dict.fromkeys(("settled", peers)):
        largest, within, tried = truth(name, conditions, hint)
        truths[conditions] = {"largest": largest, "within": within, "tried": tried}
        say(f"{name}, truth, {conditions}: {largest}, at most {within} too low")
        hint = int(largest * PLAIN_SHARE)
    rows = [row_of(finder, runs[finder], truths, peers) for finder in finders]
    return {"workload": name, "peers": peers, "truths": truths, "rows": rows, "seconds": compared(rows)}


def row_of(finder, runs, truths, peers):
    """Return the first run in full, with the answers and seconds of all."""
    largest = truths["settled" if finder == "autoaccum" else peers]["largest"]
    answers = [run["answer"] for run in runs]
    return {
        "finder": finder,
        "truth": largest,
        **runs[0],
        "share": None if answers[0] is None or not largest else answers[0] / largest,
        "answers": answers,
        "trial_lists": [run["trials"] for run in runs],
        "seconds_of_each": [run["seconds"] for run in runs if "seconds" in run],
    }


def compared(rows):
    """Return autoaccum's seconds over those of Lightning's bisection, by turn; None if either had no answer."""
    ours, theirs = (
        next((row["seconds_of_each"] for row in rows if row["finder"] == finder), [])
        for finder in ("autoaccum", "lightning-binsearch")
    )
    ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
    return {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)} if ratios else None
