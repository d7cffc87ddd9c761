"""Measures what a window costs more in which the gradient noise scale is measured.

Every second window of one training is measured, so measured and other windows come in turn, with the same samples and
the same cut. Prints and writes the median ratio of their times with its quartiles, and the share of the time of a
training that measures every 50th window, as `noise_scale=True` does.

    python benchmarks/noise_scale.py [--windows 200] [--out benchmarks/results/noise_scale.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from overhead import network, processor
from torch import nn

import autoaccum
from autoaccum._engine.noise_scale import EVERY
from autoaccum._system.notices import Notices

MICRO_BATCHES = 4


def perceptron():
    return network(1, 256), (torch.randn(4 * 96, 64), torch.randint(10, (4 * 96,)))


def resnet():
    from torchvision.models import resnet18  # noqa: PLC0415 - takes seconds

    return resnet18(num_classes=10), (torch.randn(4 * 8, 3, 64, 64), torch.randint(10, (4 * 8,)))


def gpt():
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - takes seconds

    model = GPT2LMHeadModel(GPT2Config(vocab_size=5000, n_embd=256, n_layer=4, n_head=4))
    tokens = torch.randint(5000, (4 * 4, 128))
    return model, {"input_ids": tokens, "labels": tokens}


# Name: what makes the model and a window, and the part of the windows that are run.
MODELS = {"perceptron": (perceptron, 1.0), "ResNet-18 at 64 px": (resnet, 0.2), "GPT-2, 4 layers": (gpt, 0.2)}


def measure(make, windows, device):
    torch.manual_seed(0)
    model, window = make()
    samples = len(window["labels"] if isinstance(window, dict) else window[1])
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        autoaccum.plan(samples, samples // MICRO_BATCHES),
        loss=None if isinstance(window, dict) else nn.CrossEntropyLoss(),
        device=device,
        precision="fp32",
        noise_scale=2,
        notices=Notices(silent=True),
    )
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    pairs, earlier = [], 0.0
    for number in range(1, 2 * (windows + windows // 10) + 1):
        started = time.perf_counter()
        runner.step(window)
        wait()
        took = time.perf_counter() - started
        if number % 2 == 0 and number > windows // 5:  # the first tenth warms up
            pairs.append((earlier, took))
        earlier = took
    assert runner.noise_scale is not None or runner._noise.measured
    return pairs


def summary(pairs):
    ratios = sorted(measured / plain for plain, measured in pairs)
    return {
        "plain_ms": statistics.median(plain for plain, _ in pairs) * 1e3,
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "share_of_time": (statistics.median(ratios) - 1.0) / EVERY,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    results = {}
    print(f"| model | window, ms | measured window, ratio (quartiles) | of the time, every {EVERY}th |")
    print("|---|---|---|---|")
    for name, (make, part) in MODELS.items():
        found = results[name] = summary(measure(make, max(10, int(options.windows * part)), device))
        low, high = found["ratio_quartiles"]
        print(
            f"| {name} | {found['plain_ms']:.1f} | {found['ratio_median']:.3f} ({low:.3f} to {high:.3f}) | "
            f"{found['share_of_time']:.2%} |",
            flush=True,
        )
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    print(f"\n{machine}, torch {torch.__version__}, Python {platform.python_version()}, {MICRO_BATCHES} micro-batches")
    if options.out is not None:
        record = {"machine": machine, "torch": torch.__version__, "results": results}
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
