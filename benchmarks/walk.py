"""Count what one steady step walks through: calls of the package's functions, modules, classes, changes of module.

    python benchmarks/walk.py [--list]

The step has 3 micro-batches of a small network on the CPU, in `Runner.step` and in `fit`, after the windows in which
sizes and losses are checked. A change of module is a call whose nearest caller in the package is in another module. Of
several successive steps the shortest walk counts, because some also read the device's memory. No time is measured.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import autoaccum

PACKAGE = str(Path(autoaccum.__file__).parent)
SAMPLES, MICRO_BATCH = 12, 4
STEADY, FOLLOWED = 5, 5


class Walk(NamedTuple):
    """The counts of one step."""

    calls: int
    modules: int
    classes: int
    changes: int
    by_module: Counter


class Walker:
    """Follows calls of the package's functions while started."""

    def __init__(self):
        self._stack, self._changes = [], 0
        self._modules, self._classes = Counter(), set()

    def start(self):
        """Start following."""
        sys.setprofile(self._see)

    def stop(self):
        """Stop, and return the counts since the start."""
        sys.setprofile(None)
        return Walk(sum(self._modules.values()), len(self._modules), len(self._classes), self._changes, self._modules)

    def _see(self, frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            module = Path(file).relative_to(PACKAGE).as_posix()
            if self._stack and self._stack[-1][1] != module:
                self._changes += 1
            self._stack.append((frame, module))
            self._modules[module] += 1
            if "." in frame.f_code.co_qualname and "<locals>" not in frame.f_code.co_qualname:
                self._classes.add((module, frame.f_code.co_qualname.rpartition(".")[0]))
        elif event == "return" and self._stack and self._stack[-1][0] is frame:
            self._stack.pop()


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def batches(number):
    torch.manual_seed(1)
    return [(torch.randn(SAMPLES, 8), torch.randint(4, (SAMPLES,))) for _ in range(number)]


def walk_of_runner():
    model, optimizer = network()
    runner = autoaccum.Runner(
        model, optimizer, autoaccum.plan(SAMPLES, MICRO_BATCH), loss=nn.CrossEntropyLoss(), device="cpu"
    )
    found = batches(STEADY + FOLLOWED)
    earlier, last = found[:STEADY], found[STEADY:]
    for batch in earlier:
        runner.step(batch)
    walks = []
    for batch in last:
        walker = Walker()
        walker.start()
        runner.step(batch)
        walks.append(walker.stop())
    return min(walks)


class Between(autoaccum.Callback):
    """Follows the walk from the end of one step to the end of the next: one turn of the loop of `fit`."""

    def __init__(self):
        self.walker, self.walks = Walker(), []

    def on_step(self, report, *, epoch):  # noqa: ARG002 - as the base has it
        """Follow one turn of the loop."""
        if report.step > STEADY:
            self.walks.append(self.walker.stop())
        if report.step >= STEADY:
            self.walker = Walker()
            self.walker.start()

    def on_fit_end(self, result):  # noqa: ARG002 - as the base has it
        """Stop following."""
        sys.setprofile(None)


def walk_of_fit(folder):
    model, optimizer = network()
    between = Between()
    autoaccum.fit(
        model,
        batches(STEADY + FOLLOWED),
        SAMPLES,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        micro_batch=MICRO_BATCH,
        device="cpu",
        progress=False,
        callbacks=[between],
        checkpoint=folder,
    )
    return min(between.walks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="also print the calls of each module")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        walks = {"Runner.step": walk_of_runner(), "within fit": walk_of_fit(folder)}
    print(f"{'':14}{'calls':>8}{'modules':>9}{'classes':>9}{'changes of module':>19}")
    for name, walk in walks.items():
        print(f"{name:14}{walk.calls:8}{walk.modules:9}{walk.classes:9}{walk.changes:19}")
        if options.list:
            for module, calls in walk.by_module.most_common():
                print(f"    {calls:5} {module}")


if __name__ == "__main__":
    main()
