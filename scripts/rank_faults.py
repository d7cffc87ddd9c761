"""Makes ranks run out of memory at random operators, hundreds of times, and compares with a run without failures.

Each schedule draws one or two ranks and one to three operators of their windows. Parameters must equal those of the
undisturbed training (float64, 1e-12, because cuts differ) and be identical between ranks, and every sample must be
loaded once. An optimizer that fails in the middle of a later step ends training on all ranks, and is counted
separately. A rank that waits for 30 seconds ends the run. tests/across/test_ranks_faults.py does a few of them.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from crew import Crew
from rank_faults import SAMPLES, is_damage, is_given_up

CASES = tuple(
    itertools.product((2, 4), ("mean", "pair", "list", "class weights"), (("sgd", None), ("adam", None), ("adam", 0.5)))
)
FAR = 1e-12
AT_ONCE = 10


def main() -> int:
    """Run all schedules; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=20, help="for each of the %(const)s cases", metavar="N")
    options = parser.parse_args()
    schedules = options.schedules
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started, done, hits, damaged, given_up, wrong, sent = time.perf_counter(), 0, 0, 0, 0, 0, 0
    crew = Crew(4)
    try:
        for number, (size, loss, (optimizer, clip)) in enumerate(CASES):
            arguments = {"size": size, "loss": loss, "optimizer": optimizer, "clip": clip}
            expected = crew.run("rank_faults:faulted", **arguments)
            for first in range(0, schedules, AT_ONCE):
                seeds = [1000 * number + seed for seed in range(first, min(first + AT_ONCE, schedules))]
                found = crew.run("rank_faults:many", seeds, expected[0]["operators"], **arguments)
                for seed, outcomes in zip(seeds, zip(*found, strict=True), strict=True):
                    done += 1
                    if is_damage(outcomes):
                        damaged += 1
                        continue
                    if is_given_up(outcomes):
                        given_up += 1
                        continue
                    reason = difference(outcomes, expected)
                    if reason:
                        wrong += 1
                        print(f"{arguments}, schedule {seed}: {reason}", flush=True)
                    else:
                        hits += sum(one["hits"] for one in outcomes)
                        sent += sum(one["in_backward"] for one in outcomes)
    finally:
        crew.close()
    elapsed_s = time.perf_counter() - started
    print(
        f"{done} schedules in {len(CASES)} cases: {hits} failures survived, {damaged} times an optimizer failed "
        f"half-way and {given_up} times a second attempt failed too, which all ranks were told; {wrong} differences; "
        f"{sent} buckets sent during a backward pass; {elapsed_s:.0f} s"
    )
    return int(wrong > 0)


def difference(outcomes: Sequence[Any], expected: Sequence[dict[str, Any]]) -> str:
    """Return how the ranks' results differ from the expected ones; "" if they do not."""
    for rank, one in enumerate(outcomes):
        if isinstance(one, str):
            return f"rank {rank} ended by {one}"
        if not all(map(torch.equal, one["parameters"], outcomes[0]["parameters"])):
            return f"rank {rank} has other parameters than rank 0"
    loaded = sorted(itertools.chain.from_iterable(one["loaded"] for one in outcomes))
    if loaded != list(range(SAMPLES)):
        return f"samples loaded: {loaded}"
    pairs = zip(outcomes[0]["parameters"], expected[0]["parameters"], strict=True)
    far = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    return f"parameters are {far:.1e} away from those without a failure" if far > FAR else ""


if __name__ == "__main__":
    sys.exit(main())
