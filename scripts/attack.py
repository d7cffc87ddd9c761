"""Attacks autoaccum: kills, two processes on one folder, failures after the step, output that fails, features in pairs.

Each module of scripts/attacks is one kind of attack; its function `attack(folder, seed, share)` returns rows.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attacks import Row

BEGIN, END = "<!-- attack: begin -->", "<!-- attack: end -->"
ATTACKS: tuple[str, ...] = ("kills", "two_processes", "after_step", "output", "pairs")


def main() -> int:
    """Run the chosen attacks; return 1 if one broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="ATTACK", help=f"any of {', '.join(ATTACKS)} (default: all)")
    parser.add_argument("--share", type=float, default=1.0, help="share of the tries to make (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--page", type=Path, help="a page whose table to replace, such as docs/dev/attacks.md")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in ATTACKS]:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(ATTACKS)}")
    rows: list[Row] = []
    for name in options.names or ATTACKS:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="autoaccum-attack-") as folder:
            found = importlib.import_module(f"attacks.{name}").attack(Path(folder), options.seed, options.share)
        rows += found
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        for loss in (loss for row in found for loss in row.losses):
            print(f"  {loss}", file=sys.stderr, flush=True)
    table = "\n".join(
        ["| attack | tries | losses | |", "|---|---|---|---|"]
        + [f"| {row.attack} | {row.tries} | {len(row.losses)} | {row.note} |" for row in rows]
    )
    print(table)
    if options.page is not None:
        before, rest = options.page.read_text().split(BEGIN)
        found = f"{_machine()}, seed {options.seed}.\n\n{table}"
        options.page.write_text(f"{before}{BEGIN}\n\n{found}\n\n{END}{rest.split(END)[1]}")
    return 1 if any(row.losses for row in rows) else 0


def _machine() -> str:
    import torch  # noqa: PLC0415 - --help goes without

    return f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
