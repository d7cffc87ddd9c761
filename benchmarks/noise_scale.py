"""Measures what a window costs more in which the gradient noise scale is measured, and how exact the estimate is.

Every second window of one training is measured, so measured and other windows come in turn, with the same samples and
the same cut. Prints and writes the median ratio of their times with its quartiles, and the share of the time of a
training that measures every 50th window, as `noise_scale=True` does.

Estimates are compared at fixed weights, on windows of a task that can be learned: from two norms of a window, as the
library makes them, and from the norms of all its micro-batches, which hooks on parameters or a second set of gradients
would give. The first number is from all windows, the range is of the estimates from ten windows each.

    python benchmarks/noise_scale.py [--windows 200] [--out benchmarks/results/noise_scale.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from overhead import network, processor
from torch import nn
from torch.utils._pytree import tree_map

import autoaccum
from autoaccum._engine.noise_scale import Spread, spread_of, squared_norm
from autoaccum._system.notices import Notices

MICRO_BATCHES = 4
# Windows from one that is measured to the next, with `noise_scale=True`.
EVERY = 50
TEN = 10
# Updates before estimates are compared.
WARM_UP = 20


def perceptron():
    teacher = torch.randn(64, 10)

    def window():
        inputs = torch.randn(4 * 96, 64)
        return inputs, (inputs @ teacher + 4 * torch.randn(4 * 96, 10)).argmax(1)

    return network(1, 256), window


def resnet():
    from torchvision.models import resnet18  # noqa: PLC0415 - takes seconds

    means = torch.randn(10, 3, 64, 64)

    def window():
        targets = torch.randint(10, (4 * 8,))
        return means[targets] + 3 * torch.randn(4 * 8, 3, 64, 64), targets

    return resnet18(num_classes=10), window


def gpt():
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - takes seconds

    frequencies = 1.0 / torch.arange(1, 5001)

    def window():
        tokens = torch.multinomial(frequencies, 4 * 4 * 128, replacement=True).view(4 * 4, 128)
        return {"input_ids": tokens, "labels": tokens}

    return GPT2LMHeadModel(GPT2Config(vocab_size=5000, n_embd=256, n_layer=4, n_head=4)), window


# Name: what makes the model and its windows, and the part of the windows that are run.
MODELS = {"perceptron": (perceptron, 1.0), "ResNet-18 at 64 px": (resnet, 0.2), "GPT-2, 4 layers": (gpt, 0.2)}


def measure(make, windows, device):
    torch.manual_seed(0)
    model, made = make()
    window = made()
    samples = len(targets_of(window))
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
    # On a CPU, the process's own time: others may be at work beside it.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    pairs, earlier = [], 0.0
    for number in range(1, 2 * (windows + windows // 10) + 1):
        started = clock()
        runner.step(window)
        wait()
        took = clock() - started
        if number % 2 == 0 and number > windows // 5:  # the first tenth warms up
            pairs.append((earlier, took))
        earlier = took
    return pairs


def targets_of(window):
    return window["labels"] if isinstance(window, dict) else window[1]


def loss_of(model, window):
    if isinstance(window, dict):
        return model(**window).loss
    return nn.functional.cross_entropy(model(window[0]), window[1])


def cut(window, start, stop):
    if isinstance(window, dict):
        return {name: value[start:stop] for name, value in window.items()}
    return tuple(value[start:stop] for value in window)


def estimates(make, windows, device):
    """Return the noise scale from two norms, and from those of all micro-batches, of the same gradients."""
    torch.manual_seed(0)
    model, made = make()
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    onto = partial(tree_map, lambda value: value.to(device))
    for _ in range(WARM_UP):
        optimizer.zero_grad()
        loss_of(model, onto(made())).backward()
        optimizer.step()
    found = {"two norms": [], "all norms": []}
    for _ in range(windows):
        window = onto(made())
        samples = len(targets_of(window))
        size, norms = samples // MICRO_BATCHES, []
        whole = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for start in range(0, samples, size):
            parts = torch.autograd.grad(loss_of(model, cut(window, start, start + size)), list(model.parameters()))
            norms.append(float(squared_norm(parts, device)))
            torch._foreach_add_(whole, parts, alpha=1.0 / MICRO_BATCHES)
        norm = float(squared_norm(whole, device))
        found["two norms"].append(spread_of(norms[0] / MICRO_BATCHES**2, norm, 1 / MICRO_BATCHES, samples))
        variance = (size * sum(norms) - samples * norm) / (MICRO_BATCHES - 1)
        found["all norms"].append(Spread(variance, norm))
    return {name: scales(spreads, samples) for name, spreads in found.items()}


def scales(spreads, samples):
    def scale(some):
        variance = statistics.fmean(one.variance for one in some)
        squared = statistics.fmean(one.squared_norm - one.variance / samples for one in some)
        return variance / squared if squared > 0 else float("inf")

    of_ten = sorted(scale(spreads[at : at + TEN]) for at in range(0, len(spreads) - TEN + 1, TEN))
    return {"windows": len(spreads), "scale": scale(spreads), "of_ten": [of_ten[0], of_ten[-1]]}


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
    print(
        f"| model | window, ms of the processor | measured window, ratio (quartiles) | of the time, every {EVERY}th |"
    )
    print("|---|---|---|---|")
    for name, (make, part) in MODELS.items():
        found = results[name] = summary(measure(make, max(10, int(options.windows * part)), device))
        low, high = found["ratio_quartiles"]
        print(
            f"| {name} | {found['plain_ms']:.1f} | {found['ratio_median']:.3f} ({low:.3f} to {high:.3f}) | "
            f"{found['share_of_time']:.2%} |",
            flush=True,
        )
    print("\n| model | scale by two norms (of ten windows) | by the norms of all micro-batches | windows |")
    print("|---|---|---|---|")
    for name, (make, part) in MODELS.items():
        found = estimates(make, max(4 * TEN, int(options.windows * part)), device)
        results[name]["estimates"] = found
        told = [f"{one['scale']:.3g} ({one['of_ten'][0]:.3g} to {one['of_ten'][1]:.3g})" for one in found.values()]
        print(f"| {name} | {' | '.join(told)} | {found['two norms']['windows']} |", flush=True)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    print(f"\n{machine}, torch {torch.__version__}, Python {platform.python_version()}, {MICRO_BATCHES} micro-batches")
    if options.out is not None:
        record = {"machine": machine, "torch": torch.__version__, "results": results}
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
