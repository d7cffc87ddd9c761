"""Writes a traced step in the format of PyTorch's memory viewer (https://pytorch.org/memory_viz)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoaccum._estimate.allocation_trace import Timeline


def snapshot_of(timeline: Timeline) -> dict[str, Any]:
    """Return a step as `torch.cuda.memory._snapshot` would, for PyTorch's viewer (https://pytorch.org/memory_viz).

    The module and the operator are in place of a stack.
    """
    entries: list[dict[str, Any]] = []
    ends, address = {}, 1 << 40
    for event in timeline.events:
        number = event if event >= 0 else ~event
        storage = timeline.storages[number]
        if event >= 0:
            ends[number] = address  # every storage has an address of its own
            address += storage.size_bytes + 512
        names = (storage.operator or storage.category.value, storage.module or "outside modules")
        entry = {
            "addr": ends[number],
            "size": storage.size_bytes,
            "stream": 0,
            "frames": [{"filename": "", "line": 0, "name": name} for name in names],
        }
        actions = ("alloc",) if event >= 0 else ("free_requested", "free_completed")
        entries += [entry | {"action": action} for action in actions]
    return {"segments": [], "device_traces": [entries], "allocator_settings": {}}
