"""Seconds of a step of `autoaccum.fit`, compared with loops written by hand and two other libraries.

All train the same model on the same window, each in its own process. They take turns, so that a slow moment of the
machine affects all; a turn is the median of its last `STEPS` steps, and earlier ones warm up. `fit` begins each round:
it runs as a user calls it and chooses its own sizes, which the others are given, in changing order. The others have its
limit and its heap: `finders.Meter` measures the first steps, and then freed blocks stay with the heap. Were they given
back after each step, as while something is measured, the kernel would clear each block anew: ten times as many page
faults, and half as much time again. One loop by hand has no limit, and the heap as glibc has it. CPU time and page
faults of a step are kept with the results.
"""

from __future__ import annotations

import itertools
import os
import resource
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import replace

import isolated
import torch
from finders import limited
from measuring import quartiles
from workloads import MIB, WORKLOADS, cut

from autoaccum._sizing.planner import balanced

# Smaller than for the finders, because many steps are made; windows only have to be cut.
SMALLER = {"resnet18": (140, 96), "gpt": (50, 24), "encoder": (40, 16)}
COMPARED = {
    "no-limit": "by hand, the same sizes, no limit",
    "hand-same": "by hand, the same sizes",
    "hand-best": "by hand, the best sizes of the sweep",
    "lightning": "Lightning, the same sizes",
    "accelerate": "Accelerate, the same sizes",
}
STEPS, WARM_UP, SETTLE = 8, 3, 32  # `fit` searches in some 8 windows and compares 3 plans in 12
MOST_CUTS = 4


def workload_of(name):
    limit, target = SMALLER[name]
    return replace(WORKLOADS[name], limit_bytes=limit * MIB, target=target)


# --- in the child ---------------------------------------------------------------------------------------------------


def train(_connection, name, how, sizes=None):
    """Train in one of the ways; return medians of the last optimizer steps, and the sizes."""
    workload = workload_of(name)
    model, optimizer = workload.made()
    window = workload.batch(workload.target)
    ended = []

    def step_ends(meter=None):
        used = resource.getrusage(resource.RUSAGE_SELF)
        ended.append((time.perf_counter(), used.ru_utime + used.ru_stime, used.ru_minflt))
        if meter is not None and len(ended) == WARM_UP:
            meter.stop()

    ways = {"no-limit": without_limit, "lightning": by_lightning, "accelerate": by_accelerate}
    if how == "fit":
        found = by_fit(workload, model, optimizer, [window] * (SETTLE + STEPS), step_ends)
    else:
        found = ways.get(how, by_hand)(workload, model, optimizer, cut(window, sizes), step_ends)
    last = list(zip(*ended[-STEPS - 1 :], strict=True))
    medians = [statistics.median(after - before for before, after in itertools.pairwise(at)) for at in last]
    return dict(zip(("seconds", "cpu_seconds", "page_faults"), medians, strict=True)) | (found or {})


def by_fit(workload, model, optimizer, windows, step_ends, **options):
    import autoaccum  # noqa: PLC0415 - each process needs its own library only

    class Ends(autoaccum.Callback):
        def on_step(self, report, *, epoch):  # noqa: ARG002 - as the base has it
            step_ends()

    os.environ["AUTOACCUM_CACHE_DIR"] = ""  # nothing is remembered
    result = autoaccum.fit(
        model,
        windows,
        workload.target,
        loss=workload.criterion,
        optimizer=optimizer,
        device="cpu",
        precision="fp32",
        memory_limit=workload.limit_bytes,
        callbacks=[Ends()],
        progress=False,
        **options,
    )
    return {"cut": result.plan.micro_batches, "micro_batch": result.plan.micro_batch, "oom_events": result.oom_events}


def by_hand(workload, model, optimizer, parts, step_ends):
    with limited(workload, model) as meter:
        for _ in range(WARM_UP + STEPS):
            workload.step(model, optimizer, parts)
            step_ends(meter)


def without_limit(workload, model, optimizer, parts, step_ends):
    for _ in range(WARM_UP + STEPS):
        workload.step(model, optimizer, parts)
        step_ends()


def loader_of(parts):
    repeated = [part for _ in range(WARM_UP + STEPS) for part in parts]
    return torch.utils.data.DataLoader(repeated, batch_size=None)


def by_accelerate(workload, model, optimizer, parts, step_ends):
    from accelerate import Accelerator  # noqa: PLC0415 - as above

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(parts))
    model, optimizer = accelerator.prepare(model, optimizer)
    with limited(workload, model) as meter:
        for batch in loader_of(parts):
            with accelerator.accumulate(model):
                accelerator.backward(workload.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step_ends(meter)


def by_lightning(workload, model, optimizer, parts, step_ends):
    import lightning.pytorch as lightning  # noqa: PLC0415 - as above

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _index):
            return workload.loss(self.model, batch)

        def configure_optimizers(self):
            return optimizer

    class Ends(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):  # noqa: ARG002 - as the base has it
            if (batch_idx + 1) % len(parts) == 0:
                step_ends(meter)

    with tempfile.TemporaryDirectory() as folder:
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=len(parts),
            callbacks=[Ends()],
            default_root_dir=folder,
            **dict.fromkeys(quiet, False),
        )
        module, loader = Module(), loader_of(parts)
        with limited(workload, model) as meter:
            trainer.fit(module, loader)


# --- in the parent --------------------------------------------------------------------------------------------------


def cuts_of(target, chosen):
    """Return the chosen sizes, and balanced ones with about 1.5 times as many micro-batches each."""
    found, parts = [chosen], len(chosen)
    while len(found) < MOST_CUTS and parts < target:
        parts = min(target, max(parts + 1, int(parts * 1.5)))
        found.append(balanced(target, -(-target // parts)))
    return list(dict.fromkeys(found))


def measure(name, *, rounds, say):
    workload = workload_of(name)

    def ask(how, sizes=None):
        return isolated.call(train, name, how, sizes, timeout_s=600)[1:]

    first, why = ask("fit")
    if first is None:
        return {"workload": name, "ended": why, "ratios": {}}
    same = tuple(first["cut"])
    swept = {sizes: found["seconds"] for sizes in cuts_of(workload.target, same) if (found := ask("hand", sizes)[0])}
    best = min(swept, key=swept.get) if swept else same
    say(f"{name}: fit cuts {same}; sweep {swept}")
    took, gone = {how: [] for how in ("fit", *COMPARED)}, {}
    for turn in range(rounds):
        for how in ("fit", *list(COMPARED)[:: 1 if turn % 2 else -1]):
            sizes = best if how == "hand-best" else same
            found, why = (None, gone[how]) if how in gone else ask(how, None if how == "fit" else sizes)
            if found is None:
                gone[how] = why
            else:
                took[how].append(found)
                same = tuple(found["cut"]) if how == "fit" else same
    same = Counter(tuple(found["cut"]) for found in took["fit"]).most_common(1)[0][0] if took["fit"] else same
    row = {"workload": name, "limit_bytes": workload.limit_bytes, "target": workload.target, "cut": same}
    row |= {"best_cut": best, "oom_events": first["oom_events"], "ratios": {}, "gone": gone}
    for how in COMPARED:
        pairs = zip(took["fit"], took[how], strict=False)
        ratios = [theirs["seconds"] / ours["seconds"] for ours, theirs in pairs]
        if how not in gone and "fit" not in gone and len(ratios) > 1:
            low, median, high = quartiles(ratios)
            row["ratios"][how] = {"median": median, "quartiles": [low, high]}
    for what in ("cpu_seconds", "page_faults"):
        row[what] = {how: statistics.median(turn[what] for turn in turns) for how, turns in took.items() if turns}
    say(f"{name}: {row['ratios']}, {row['cpu_seconds']}, {row['page_faults']} {gone}")
    return row
