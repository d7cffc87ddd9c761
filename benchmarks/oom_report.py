"""Measures the cost of `oom_report=` without a failure: the same windows with and without it, in turn, in one process.

Networks and sizes are those of overhead.py. Prints the median ratio of a window's time with its quartiles, and the
microseconds that the marks add to a micro-step (of five modules and the model).

    python benchmarks/oom_report.py [--windows 400] [--device cpu]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from overhead import MICRO_BATCHES, MODELS, network, processor
from torch import nn

import autoaccum
from autoaccum._engine.oom_report import PostMortem
from autoaccum._system.notices import Notices


def measure(width, sub_batch_size, windows, device, folder):
    torch.manual_seed(0)
    model = network(1, width).to(device)
    samples = MICRO_BATCHES * sub_batch_size
    window = torch.randn(samples, 64), torch.randint(0, 10, (samples,))
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        autoaccum.plan(samples, sub_batch_size),
        loss=nn.CrossEntropyLoss(),
        device=device,
        precision="fp32",
        notices=Notices(silent=True),
    )
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    # On one host thread, its CPU time, which other load on the machine does not lengthen.
    clock = time.perf_counter if device.type == "cuda" else time.thread_time

    def timed():
        started = clock()
        runner.step(window)
        wait()
        return clock() - started

    pairs = []
    for number in range(windows + windows // 10):
        took = {}
        for looks in (False, True) if number % 2 else (True, False):
            if looks:
                with PostMortem(folder, runner._step, Notices(silent=True)):
                    took[looks] = timed()
            else:
                took[looks] = timed()
        if number >= windows // 10:  # the first tenth warms up
            pairs.append((took[False], took[True]))
    return pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # small operators on several threads measure the threads
    print("| micro-step | ratio (quartiles) | added, µs a micro-step |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, (layers, width, _, sub_batch_size) in MODELS.items():
            if layers > 1:
                continue
            windows = max(40, options.windows // (10 if name.endswith("10 ms") else 1))
            pairs = measure(width, sub_batch_size, windows, device, folder)
            low, middle, high = statistics.quantiles([with_it / without for without, with_it in pairs], n=4)
            added = statistics.median((with_it - without) / MICRO_BATCHES * 1e6 for without, with_it in pairs)
            print(f"| {name} | {middle:.3f} ({low:.3f} to {high:.3f}) | {added:.1f} |")
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{processor()}, 1 thread"
    print(f"\n{machine}, torch {torch.__version__}, {MICRO_BATCHES} micro-steps a window")


if __name__ == "__main__":
    main()
