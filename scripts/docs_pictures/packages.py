"""Draws the packages in the layers that pyproject.toml has import-linter check."""

from __future__ import annotations

import tomllib

from svg import framed, text
from tutorial import ROOT

TITLE = "The packages of autoaccum"
WIDTH, LEFT, TOP, TALL, STEP = 880, 24, 24, 46, 56
PURPOSES = {
    "_cli": "the command line",
    "integrations": "adapters for other loops",
    "_verify": "whether splits train alike",
    "_launch": "jobs, run, Slurm",
    "_report": "pre-flight report",
    "_training": "fit, its loop, checkpoints",
    "_estimate": "peak memory predicted",
    "_distributed": "windows by several ranks",
    "_evaluation": "losses and metrics of a loader",
    "_engine": "one window, one optimizer step",
    "_saving": "checkpointing, offloading, chunks",
    "_sizing": "how large micro-batches are",
    "_loss": "what a loss runs over",
    "_data": "batches and windows",
    "_memory": "one file a kind of device",
    "_system": "files, signals, notices",
}


def layers() -> list[list[str]]:
    """Return the packages, the highest layer first; modules of the root are left out."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contract = next(one for one in tools["importlinter"]["contracts"] if one["id"] == "packages")
    rows = [[name.strip().removeprefix("autoaccum.") for name in row.split("|")] for row in contract["layers"]]
    return [kept for row in rows if (kept := [name for name in row if name in PURPOSES])]


def picture() -> str:
    """Return the SVG."""
    parts = []
    for row, names in enumerate(layers()):
        y, width = TOP + row * STEP, (WIDTH - 2 * LEFT + 10) / len(names) - 10
        for place, name in enumerate(names):
            x = LEFT + place * (width + 10)
            parts += [
                f'<rect class="plain" x="{x:g}" y="{y}" width="{width:g}" height="{TALL}" rx="5"/>',
                text(x + 14, y + 20, name, "step"),
                text(x + 14, y + 37, PURPOSES[name], "quiet"),
            ]
    height = TOP + len(layers()) * STEP + 34
    parts.append(text(LEFT, height - 24, "A package imports only from the rows below it.", "quiet"))
    told = "; ".join(" and ".join(names) for names in layers())
    return framed(WIDTH, height, TITLE, f"Packages in rows, each importing only from the rows below it: {told}.", parts)
