"""Part C: seconds from the call of `fit` to the end of its first update, compared with the same call given the size.

The size is the result of the search. Each call runs in its own process, and the variants alternate; no
plan of an earlier run is used.
"""

from __future__ import annotations

import os
import time

import isolated
from throughput import quartiles
from workloads import WORKLOADS

TIMEOUT_S = 300


def first_update(_connection, name, micro_batch):
    import autoaccum  # noqa: PLC0415 - in the child only

    workload = WORKLOADS[name]
    model, optimizer = workload.made()
    window = workload.batch(workload.target)

    class Watch(autoaccum.Callback):
        seconds = None

        def on_step(self, report, *, epoch):  # noqa: ARG002 - as the base has it
            if self.seconds is None:
                self.seconds = time.perf_counter() - began_s

    os.environ["AUTOACCUM_CACHE_DIR"] = ""  # nothing is remembered
    watch = Watch()
    began_s = time.perf_counter()
    result = autoaccum.fit(
        model,
        [window],
        workload.target,
        loss=workload.loss,
        optimizer=optimizer,
        device="cpu",
        precision="fp32",
        memory_limit=workload.limit_bytes,
        micro_batch=micro_batch or "auto",
        max_steps=1,
        callbacks=[watch],
        progress=False,
    )
    return {"seconds": watch.seconds, "micro_batch": result.plan.micro_batch, "cut": result.plan.micro_batches}


def measure(name, *, repeats, say):
    _, value, why = isolated.call(first_update, name, None, timeout_s=TIMEOUT_S)
    if value is None:
        return {"workload": name, "ended": why, "micro_batch": None, "ratios": {}}
    size, ratios, ended = value["micro_batch"], [], "answered"
    for turn in range(repeats):
        took = {}
        for given in (size, None) if turn % 2 else (None, size):
            _, value, why = isolated.call(first_update, name, given, timeout_s=TIMEOUT_S)
            if value is None:
                ended = why
                break
            took[given] = value["seconds"]
        else:
            ratios.append(took[None] / took[size])
            continue
        break
    row = {
        "workload": name,
        "micro_batch": size,
        "ended": ended,
        "ratios": {"auto": quartiles(ratios)} if len(ratios) > 1 else {},
    }
    say(f"{name}: {row}")
    return row
