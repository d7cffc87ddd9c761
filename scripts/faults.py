"""Makes every operator of a training step fail in turn, and counts differences from a run without failures.

Cases from tests/support/faults/cases.py (models, precisions and optimizers, all pairs) are trained repeatedly, each
time with another fault: memory runs out at an operator, in any window, twice, in the retry, down to one sample; the
user's code raises; the user interrupts. The resulting state is compared, bit for bit, with the same training in the
same cuts without a fault.

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.faults.cases import Case, pairs
from support.faults.sweep import Budget, Sweep, Tally
from support.faults.training import warm_up


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
    with ProcessPoolExecutor(options.workers, mp_context=context, initializer=_begin) as processes:
        jobs = {processes.submit(_faults, case, number, options.sample): case for number, case in enumerate(faulty)}
        for job in as_completed(jobs):
            tally = job.result()
            total.add(tally)
            damaged = ", ".join(f"{operator} {count}" for operator, count in sorted(tally.damaged.items()))
            print(
                f"{jobs[job]}: {tally.injected} faults at {tally.operators} operators, {len(tally.mismatches)} "
                f"mismatches; {tally.survived} survived, {tally.refused} left all as before, {tally.finished} done "
                f"first; damage told at: {damaged or '-'}; {tally.seconds:.0f} s",
                flush=True,
            )
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


def _conclude(total: Tally, seconds: float) -> None:
    for mismatch in total.mismatches:
        print(mismatch)
    print(
        f"{total.injected} faults, {len(total.mismatches)} mismatches, {total.damaged.total()} times damage told, "
        f"{seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
