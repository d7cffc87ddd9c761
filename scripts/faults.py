"""Makes every operator of a training step fail in turn, and counts differences from a run without failures.

Cases from tests/fault_cases.py (models, precisions and optimizers, all pairs) are trained repeatedly, each time with
another fault: memory runs out at an operator, in any window, twice, in the retry, down to one sample; the user's code
raises; the user interrupts. The resulting state is compared, bit for bit, with the same training in the same cuts
without a fault.

    python scripts/faults.py [--workers 2] [--sample 300] [--case "mlp; fp32"]

Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fault_cases import Case, pairs
from fault_sweep import Budget, Sweep, Tally
from fault_training import warm_up


def main() -> int:
    """Sweep the chosen cases; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="processes, with one thread each")
    parser.add_argument("--sample", type=int, default=300, help="the most operators per window to fail, for each case")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    started = time.perf_counter()
    faulty = [case for case in pairs() if options.case in str(case)]
    total = Tally()
    # Spawned, because a fork does not survive autograd's threads for a GPU.
    context = multiprocessing.get_context("spawn")
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = _table()
    with (
        # On a terminal the table grows; elsewhere progress is printed line by line, and the table at the end.
        Live(table, console=console, vertical_overflow="visible"),
        ProcessPoolExecutor(options.workers, mp_context=context, initializer=_begin) as processes,
    ):
        jobs = {processes.submit(_faults, case, number, options.sample): case for number, case in enumerate(faulty)}
        for job in as_completed(jobs):
            _add(table, total, str(jobs[job]), job.result())
            if not console.is_terminal:
                print(f"{jobs[job]}: {total.injected} faults, {len(total.mismatches)} mismatches so far", flush=True)
    _conclude(total, time.perf_counter() - started)
    return 1 if total.mismatches else 0


def _begin() -> None:
    # Shells make background commands ignore interrupts, which are among the faults.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    warm_up()


def _faults(case: Case, number: int, sample: int) -> Tally:
    most = Budget()
    return Sweep(case, shift=number).run(
        Budget(**{name: min(wanted, sample) if name != "memory" else sample for name, wanted in vars(most).items()})
    )


def _table() -> Table:
    table = Table("case")
    for title in ("operators", "faults", "mismatches", "survived", "left as before", "done first"):
        table.add_column(title, justify="right")
    table.add_column("damaged, and said so, at")
    table.add_column("s", justify="right")
    return table


def _add(table: Table, total: Tally, name: str, tally: Tally) -> None:
    total.add(tally)
    mismatches = len(tally.mismatches)
    numbers = (tally.operators, tally.injected, mismatches, tally.survived, tally.refused, tally.finished)
    often = ", ".join(f"{operator} {count}" for operator, count in sorted(tally.damaged.items()))
    table.add_row(name, *map(str, numbers), often, f"{tally.seconds:.0f}", style="red" if tally.mismatches else "")


def _conclude(total: Tally, seconds: float) -> None:
    for mismatch in total.mismatches:
        print(mismatch)
    print(
        f"{total.injected} faults, {len(total.mismatches)} mismatches, {total.damaged.total()} times damage told, "
        f"{seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
