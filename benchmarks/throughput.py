"""Updates a second of `autoaccum.fit`, compared with hand-written loops and two other libraries.

All train the same model on the same window, each in its own process under the same limit, with the allocator settled in
the same way. They alternate, in changing order, so that a slow moment of the machine affects all; the others wait.
`fit` runs as a user calls it, chooses its own cut, and makes `settle` updates before timing starts.
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
from measuring import quartiles
from workloads import MIB, WORKLOADS, cut

from autoaccum._oom import is_oom, let_go
from autoaccum._sizing.planner import balanced

# Smaller than for the finders, because many updates are made; windows only have to be cut.
SMALLER = {"resnet18": (140, 96), "gpt": (50, 24), "encoder": (40, 16)}
COMPARED = {
    "hand-same": "by hand, the same cut",
    "hand-best": "by hand, the best cut of the sweep",
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
    """Runs windows on the parent's request, for a loop that only reports completed windows."""

    def __init__(self, connection, before, rounds):
        self._connection, self._left = connection, before
        self.total = before + rounds
        self._began_s = None

    def window_done(self, said=None):
        """Count a window; send its seconds, and wait for the next request."""
        self._left -= 1
        if self._left > 0:
            return
        took_s = None if self._began_s is None else time.perf_counter() - self._began_s
        isolated.tell(self._connection, {"seconds": took_s, "said": said})
        self._connection.recv()
        self._began_s = time.perf_counter()


def contend(connection, name, how, sizes, before, rounds):
    """Train in one of the ways, in turns."""
    workload = workload_of(name)
    model, optimizer = workload.made()
    window = workload.batch(workload.target)
    turns = Turns(connection, before, rounds)
    if how == "fit":
        return by_fit(workload, model, optimizer, window, turns)
    parts = cut(window, sizes)
    if how == "lightning":
        return by_lightning(workload, model, optimizer, parts, turns)
    with limited(workload):
        (by_accelerate if how == "accelerate" else by_hand)(workload, model, optimizer, parts, turns)
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
        loss=workload.criterion,
        optimizer=optimizer,
        device="cpu",
        precision="fp32",
        memory_limit=workload.limit_bytes,
        max_steps=turns.total,
        callbacks=[Pausing()],
        progress=False,
    )
    return {"cut": result.plan.micro_batches, "oom_events": result.oom_events}


def by_hand(workload, model, optimizer, parts, turns):
    for _ in range(turns.total):
        workload.update(model, optimizer, parts)
        turns.window_done()


class MicroBatches(torch.utils.data.Dataset):
    """The window's micro-batches, repeated."""

    def __init__(self, parts, windows):
        self._parts, self._length = parts, windows * len(parts)

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return self._parts[index % len(self._parts)]


def by_accelerate(workload, model, optimizer, parts, turns):
    from accelerate import Accelerator  # noqa: PLC0415 - as above

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(parts))
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in torch.utils.data.DataLoader(MicroBatches(parts, turns.total), batch_size=None):
        with accelerator.accumulate(model):
            accelerator.backward(workload.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            turns.window_done()


def by_lightning(workload, model, optimizer, parts, turns):
    import lightning.pytorch as lightning  # noqa: PLC0415 - as above

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _index):
            return workload.loss(self.model, batch)

        def configure_optimizers(self):
            return optimizer

    class Pausing(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):  # noqa: ARG002 - as the base has it
            if (batch_idx + 1) % len(parts) == 0:
                turns.window_done()

    loader = torch.utils.data.DataLoader(MicroBatches(parts, turns.total), batch_size=None)
    with tempfile.TemporaryDirectory() as folder:
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=turns.total,
            accumulate_grad_batches=len(parts),
            callbacks=[Pausing()],
            default_root_dir=folder,
            **dict.fromkeys(quiet, False),
        )
        module = Module()
        with limited(workload):
            trainer.fit(module, loader)


def sweep(_connection, name, cuts):
    """Time a window of each cut, in turn; cuts that do not fit have no time."""
    workload = workload_of(name)
    model, optimizer = workload.made()
    window = workload.batch(workload.target)
    took = {sizes: [] for sizes in cuts}
    with limited(workload):
        for turn in range(SWEEP_ROUNDS + 1):
            for sizes in list(took) if turn % 2 else list(took)[::-1]:
                began_s = time.perf_counter()
                try:
                    workload.update(model, optimizer, cut(window, sizes))
                except Exception as error:
                    if not is_oom(error):
                        raise
                    let_go(error)
                    del took[sizes]
                    continue
                if turn:  # the first warms up
                    took[sizes].append(time.perf_counter() - began_s)
    return {sizes: statistics.median(seconds) for sizes, seconds in took.items()}


# --- in the parent --------------------------------------------------------------------------------------------------


def cuts_of(target, largest):
    """Return balanced cuts from the fewest micro-batches on, each with about 1.5 times as many."""
    found, parts = [], -(-target // largest)
    while parts <= target and len(found) < MOST_CUTS:
        sizes = balanced(target, -(-target // parts))
        if sizes not in found:
            found.append(sizes)
        parts = max(parts + 1, int(parts * 1.5))
    return found


def measure(name, *, settle, rounds, say):  # noqa: C901 - one conversation
    workload = workload_of(name)
    children, gone = {}, {}

    def hear(how):
        try:
            return children[how].receive(TIMEOUT_S)[1]
        except isolated.GoneError as error:
            if how == "fit":
                raise
            gone[how] = str(error)
            say(f"{name}, {how}: {error}")
            return None

    try:
        children["fit"] = isolated.Child(contend, name, "fit", None, settle, rounds)
        said = hear("fit")["said"]
        same = tuple(said["cut"])
        cuts = cuts_of(workload.target, max(said["largest"], *same))
        _, swept, why = isolated.call(sweep, name, cuts, timeout_s=TIMEOUT_S)
        best = min(swept, key=swept.get) if swept else same
        say(f"{name}: fit cuts {same}; sweep {swept or why}")
        for how in COMPARED:
            children[how] = isolated.Child(contend, name, how, best if how == "hand-best" else same, WARM_UP, rounds)
            hear(how)
        seconds = {how: [] for how in children}
        for turn in range(rounds):
            # Each comes before and after each other one in turn.
            order = [how for how in children if how not in gone]
            order = order[turn % len(order) :] + order[: turn % len(order)]
            for how in order if turn % 2 else order[::-1]:
                children[how].send("go")
                heard = hear(how)
                if heard is not None and "seconds" in heard:
                    seconds[how].append(heard["seconds"])
        children["fit"].send("end")
        ended = hear("fit")
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
        "sweep_seconds": [[list(sizes), took] for sizes, took in (swept or {}).items()],
        "ratios": {},
        "gone": gone,
    }
    for how in COMPARED:
        ratios = [theirs / ours for ours, theirs in zip(seconds["fit"], seconds[how], strict=False)]
        if how not in gone and len(ratios) > 1:
            low, median, high = quartiles(ratios)
            row["ratios"][how] = {"median": median, "quartiles": [low, high]}
    say(f"{name}: {row['ratios']} {gone}")
    return row
