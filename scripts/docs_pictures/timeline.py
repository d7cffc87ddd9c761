"""Records what memory tensors take during one update of the tutorial's model, by PyTorch's profiler."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from tutorial import MEASURED, SCRIPTS

CUT = (86, 85, 85)
MIB = 2**20
MOST_POINTS = 400
LEAST_CHANGE_MIB = 0.05


def run() -> None:
    """Write measured/timeline.json."""
    sys.path.insert(0, str(SCRIPTS))
    import task  # noqa: PLC0415 - beside the tutorial's other scripts

    model, (pictures, labels) = task.model(), next(iter(task.loader()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def update() -> None:
        parts = zip(pictures.split(CUT), labels.split(CUT), strict=True)
        for part, right in parts:
            with record_function("forward"):
                loss = torch.nn.functional.cross_entropy(model(part), right)
            with record_function("backward"):
                loss.backward()
            del loss
        with record_function("optimizer step"):
            optimizer.step()
            optimizer.zero_grad()

    update()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        update()
    kept = read(recorded)
    (MEASURED / "timeline.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def read(recorded: profile) -> dict[str, Any]:
    """Return the memory over time, as of the update's beginning, and when each part ran."""
    events = recorded.profiler.kineto_results.events()
    parts = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.name() in ("forward", "backward", "optimizer step")
    )
    begin, end = parts[0][0], parts[-1][1]
    held, points = 0, [{"ms": 0.0, "mib": 0.0}]
    for at, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += size
        if begin <= at <= end and abs(held / MIB - points[-1]["mib"]) > LEAST_CHANGE_MIB:
            points.append({"ms": round((at - begin) / 1e6, 3), "mib": round(held / MIB, 2)})
    assert len(points) <= MOST_POINTS
    points.append({"ms": round((end - begin) / 1e6, 3), "mib": points[-1]["mib"]})
    spans = [
        {"start": round((first - begin) / 1e6, 3), "end": round((last - begin) / 1e6, 3), "what": what}
        for first, last, what in parts
    ]
    return {"cut": CUT, "spans": spans, "points": points}
