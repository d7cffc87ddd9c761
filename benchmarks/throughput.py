"""Part B: updates per second of `autoaccum.fit`, compared with hand-written loops and two other libraries.

All train the same model on the same window, each in its own process under the same limit, with the allocator settled in
the same way. They alternate, a few windows each, in changing order, so that a slow moment of the machine affects all;
the others wait. `fit` runs as a user calls it, chooses its own cut, and makes `settle` updates before timing starts.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import replace

import isolated
import torch
from finders import limited
from workloads import MIB, WORKLOADS

from autoaccum._memory import Host
from autoaccum._oom import is_oom, let_go
from autoaccum._sizing.planner import balanced

# Smaller than for the finders, because many updates are made; windows only have to be cut.
SMALLER = {"resnet18": (140, 96), "mobilenet": (64, 48), "gpt": (50, 24), "encoder": (40, 16)}
COMPARED = {
    "hand-same": "by hand, the same cut",
    "hand-best": "by hand, the best cut of the sweep",
    "hand-plain": "by hand, the same cut, allocator left alone",
    "lightning": "Lightning, the same cut",
    "accelerate": "Accelerate, the same cut",
}
WARM_UP = 3
TIMEOUT_S = 600
SWEEP_ROUNDS = 4
MOST_CUTS = 4


def workload_of(name):
    limit, target = SMALLER[name]
    return replace(WORKLOADS[name], limit_bytes=limit * MIB, target=target)


# --- in the child ---------------------------------------------------------------------------------------------------


class Turns:
    """Runs blocks of windows on the parent's request, for a loop that only reports completed windows."""

    def __init__(self, connection, before, block, rounds):
        self._connection, self._left, self._block = connection, before, block
        self.total = before + block * rounds
        self._began_s = None

    def window_done(self, said=None):
        """Count a window; at the end of a block send its seconds, and wait for the next request."""
        self._left -= 1
        if self._left:
            return
        took_s = None if self._began_s is None else time.perf_counter() - self._began_s
        isolated.tell(self._connection, {"seconds": took_s, "said": said})
        self._connection.recv()
        self._left, self._began_s = self._block, time.perf_counter()


def contend(connection, name, how, cut, before, block, rounds):
    """Train in one of the ways, in turns."""
    workload = workload_of(name)
    model, optimizer = workload.made()
    window = workload.batch(workload.target)
    turns = Turns(connection, before, block, rounds)
    if how == "fit":
        return by_fit(workload, model, optimizer, window, turns)
    if how == "lightning":
        return by_lightning(workload, model, optimizer, window, cut, turns)
    with limited(workload.limit_bytes) if how == "hand-plain" else Host().limited(workload.limit_bytes):
        (by_accelerate if how == "accelerate" else by_hand)(workload, model, optimizer, window, cut, turns)
    return None


def by_fit(workload, model, optimizer, window, turns):
    import autoaccum  # noqa: PLC0415 - each process needs its own library only

    class Pausing(autoaccum.Callback):
        def __init__(self):
            self.largest = 0

        def on_trial(self, trial):
            self.largest = max(self.largest, trial.size if trial.fits else 0)

        def on_step(self, report, *, epoch):  # noqa: ARG002 - as the base has it
            turns.window_done({"cut": report.micro_batches, "largest": self.largest})

    os.environ["AUTOACCUM_CACHE_DIR"] = ""  # nothing is remembered
    result = autoaccum.fit(
        model,
        [window] * turns.total,
        workload.target,
        loss=workload.loss,
        optimizer=optimizer,
        device="cpu",
        precision="fp32",
        memory_limit=workload.limit_bytes,
        max_steps=turns.total,
        callbacks=[Pausing()],
        progress=False,
    )
    return {"cut": result.plan.micro_batches, "oom_events": result.oom_events, "plans": len(result.plans)}


def by_hand(workload, model, optimizer, window, cut, turns):
    """The usual hand-written loop, with its mean corrected for micro-batches of different sizes."""
    inputs, targets = window
    for _ in range(turns.total):
        update_by_hand(workload, model, optimizer, inputs, targets, cut)
        turns.window_done()


def update_by_hand(workload, model, optimizer, inputs, targets, cut):
    optimizer.zero_grad()
    begin = 0
    for size in cut:
        part = slice(begin, begin + size)
        loss = workload.loss(model(inputs[part]), targets[part]) * (size / workload.target)
        loss.backward()
        begin += size
    optimizer.step()


class MicroBatches(torch.utils.data.Dataset):
    """The window's micro-batches, repeated."""

    def __init__(self, window, cut, windows):
        self._parts = list(zip(*(part.split(cut) for part in window), strict=True))
        self._length = windows * len(cut)

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return self._parts[index % len(self._parts)]


def by_accelerate(workload, model, optimizer, window, cut, turns):
    from accelerate import Accelerator  # noqa: PLC0415 - as above

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(cut))
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = torch.utils.data.DataLoader(MicroBatches(window, list(cut), turns.total), batch_size=None)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(workload.loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            turns.window_done()


def by_lightning(workload, model, optimizer, window, cut, turns):
    import lightning.pytorch as lightning  # noqa: PLC0415 - as above

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _index):
            return workload.loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return optimizer

    class Pausing(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):  # noqa: ARG002 - as the base has it
            if (batch_idx + 1) % len(cut) == 0:
                turns.window_done()

    loader = torch.utils.data.DataLoader(MicroBatches(window, list(cut), turns.total), batch_size=None)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=turns.total,
            accumulate_grad_batches=len(cut),
            callbacks=[Pausing()],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Module()
        with Host().limited(workload.limit_bytes):
            trainer.fit(module, loader)


def sweep(_connection, name, cuts, rounds):
    """Time a window of each cut, in turn; cuts that do not fit have no time."""
    workload = workload_of(name)
    model, optimizer = workload.made()
    inputs, targets = workload.batch(workload.target)
    took = {cut: [] for cut in cuts}
    with Host().limited(workload.limit_bytes):
        for turn in range(rounds + 1):
            for cut in list(took) if turn % 2 else list(took)[::-1]:
                began_s = time.perf_counter()
                try:
                    update_by_hand(workload, model, optimizer, inputs, targets, cut)
                except Exception as error:
                    if not is_oom(error):
                        raise
                    let_go(error)
                    del took[cut]
                    continue
                if turn:  # the first warms up
                    took[cut].append(time.perf_counter() - began_s)
    return {cut: statistics.median(seconds) for cut, seconds in took.items()}


# --- in the parent --------------------------------------------------------------------------------------------------


def cuts_of(target, largest):
    """Return balanced cuts from the fewest micro-batches on, each with about 1.5 times as many."""
    found, parts = [], -(-target // largest)
    while parts <= target and len(found) < MOST_CUTS:
        cut = balanced(target, -(-target // parts))
        if cut not in found:
            found.append(cut)
        parts = max(parts + 1, int(parts * 1.5))
    return found


def quartiles(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartiles": [low, high]}


def measure(name, *, settle, block, rounds, say):  # noqa: C901 - one conversation
    workload = workload_of(name)
    children, gone = {}, {}
    try:
        children["fit"] = isolated.Child(contend, name, "fit", None, settle, block, rounds)
        said = children["fit"].receive(TIMEOUT_S)[1]["said"]
        same = tuple(said["cut"])
        largest = said["largest"] or max(same)
        _, swept, why = isolated.call(
            sweep, name, cuts_of(workload.target, max(largest, *same)), SWEEP_ROUNDS, timeout_s=TIMEOUT_S
        )
        best = min(swept, key=swept.get) if swept else same
        say(f"{name}: fit cuts {same}; sweep {swept or why}")
        for how in COMPARED:
            children[how] = isolated.Child(
                contend, name, how, best if how == "hand-best" else same, WARM_UP, block, rounds
            )
        seconds = {how: [] for how in children}

        def hear(how):
            try:
                return children[how].receive(TIMEOUT_S)
            except isolated.GoneError as error:
                if how == "fit":
                    raise
                gone[how] = str(error)
                say(f"{name}, {how}: {error}")
                return None

        for how in COMPARED:
            hear(how)
        for turn in range(rounds):
            # Each comes before and after each other one in turn.
            order = [how for how in children if how not in gone]
            order = order[turn % len(order) :] + order[: turn % len(order)]
            for how in order if turn % 2 else order[::-1]:
                children[how].send("go")
                heard = hear(how)
                if heard is not None:
                    seconds[how].append(heard[1]["seconds"])
        children["fit"].send("end")
        ended = children["fit"].receive(TIMEOUT_S)[1]
    except isolated.GoneError as error:
        say(f"{name}: {error}")
        return {"workload": name, "ended": str(error), "ratios": {}}
    finally:
        for child in children.values():
            child.end()
    row = {
        "workload": name,
        "limit_bytes": workload.limit_bytes,
        "target": workload.target,
        "cut": same,
        "cut_at_the_end": ended["cut"],
        "oom_events": ended["oom_events"],
        "best_cut": best,
        "sweep_seconds": [[list(cut), took] for cut, took in (swept or {}).items()],
        "fit_seconds_per_update": statistics.median(seconds["fit"]) / block,
        "ratios": {},
        "gone": gone,
    }
    for how in COMPARED:
        pairs = list(zip(seconds["fit"], seconds[how], strict=False))
        if how not in gone and len(pairs) > 1:
            row["ratios"][how] = quartiles([theirs / ours for ours, theirs in pairs])
    say(f"{name}: {row['ratios']} {gone}")
    return row
