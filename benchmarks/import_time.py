"""Times `import autoaccum` against `import torch`: whole processes, in turn, in one run.

Run as `python benchmarks/import_time.py [--rounds 9]`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time


def seconds(module):
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for module in ("torch", "autoaccum"):
        seconds(module)  # the first import compiles
    ratios = []
    for _ in range(options.rounds):
        torch_s = seconds("torch")
        ratios.append(seconds("autoaccum") / torch_s)
    ratios.sort()
    quarter = len(ratios) // 4
    low, high = ratios[quarter], ratios[-1 - quarter]
    print(f"import autoaccum / import torch: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
