"""The judge of what a call makes of bad input: refused by name, in few words, with nothing changed."""

import random
import re
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import autoaccum
from support.bad_input.values import InWorld
from support.training.long_runs import bits

try:
    import resource
except ImportError:  # Windows
    resource = None


class Counted(autoaccum.Callback):
    def __init__(self):
        self.windows = 0

    def on_step(self, report, *, epoch):
        self.windows += 1


class CountingLoader(torch.utils.data.DataLoader):
    drawn = 0

    def __iter__(self):
        self.drawn += 1
        return super().__iter__()


class World:
    """A model with every kind of state, its optimizer and data, made anew for each call."""

    def __init__(self, folder):
        torch.default_generator.manual_seed(7)  # torch.manual_seed notes the whole stack of its caller, once a world
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3))
        self.model[3].eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.batch = (torch.randn(4, 4), torch.arange(4) % 3)
        self.generator = torch.Generator().manual_seed(3)
        data = torch.utils.data.TensorDataset(*self.batch)
        self.loader = CountingLoader(data, batch_size=2, shuffle=True, generator=self.generator)
        self.counted = Counted()
        self.model(self.batch[0]).sum().backward()
        self.optimizer.step()

    def state(self, **given):
        """Everything that a refused call must leave as it was, to be compared; what is given to it, too."""
        models = [self.model, *(one for one in given.values() if isinstance(one, nn.Module) and _has_values(one))]
        optimizers = [self.optimizer, *(one for one in given.values() if isinstance(one, torch.optim.Optimizer))]
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        state = {
            "parameters and buffers": [dict(model.state_dict()) for model in models],
            "modes": [part.training for model in models for part in model.modules()],
            "gradients": [p.grad for model in models for p in model.parameters() if p.grad is not None],
            "optimizer": [optimizer.state_dict() for optimizer in optimizers],
            "parameters of the optimizer": groups,
            "random state": [torch.get_rng_state(), repr(random.getstate()), np.random.get_state()],  # noqa: NPY002
            "loader's generator": self.generator.get_state(),
            "files": sorted(str(one) for one in self.folder.rglob("*")),
            "limits": None if resource is None else resource.getrlimit(resource.RLIMIT_DATA),
            "threads": sorted(thread.name for thread in threading.enumerate() if not thread.daemon),
            "gradient mode": torch.is_grad_enabled(),
        }
        return bits(state)


@dataclass(frozen=True)
class Call:
    signature: Callable[..., Any]  # what the user calls
    good: Callable[[World], dict[str, Any]]  # arguments that it takes, in a world
    # What each argument may be that `ALLOWED` does not have, or has otherwise.
    allowed: dict[str, Callable[[Any], bool]] = field(default_factory=dict)
    # The same for further bad values and `ALSO`.
    also: dict[str, list[Any]] = field(default_factory=dict)
    # Arguments that contradict each other, one of which the message has to name.
    together: list[dict[str, Any]] = field(default_factory=list)
    # Makes the call, if that is another; what it returns is gone through where it is an iterator.
    function: Callable[..., Any] | None = None

    def make(self, **arguments):
        return (self.function or self.signature)(**arguments)


@dataclass(frozen=True)
class Case:
    """One bad call: the arguments that differ from good ones, and the words that its answer has."""

    name: str
    call: Call
    change: dict[str, Any]
    names: tuple[str, ...]  # one of which it names
    says: tuple[str, ...] = ()  # all of which it says
    is_before_data: bool = False  # before a batch is drawn

    def __repr__(self):
        return f"{self.name}({', '.join(self.says or self.change)})"


# Lines of 100 columns that an answer takes at the most, also with code to copy, and what a next step begins with, or a
# bound.
MOST_LINES, WITH_CODE, WIDTH = 3, 4, 100
NEXT_STEP = re.compile(
    r"\b(pass|call|choose|check|give|look|make|return|set|try|wrap|write|name|use|have|correct|assign|nest|leave|say|end|"
    r"needs|makes|is called with|help shows|wants?|must|has '|can only|load|at least|at most|cannot be started|pad|"
    r"see)\b"
)
# What may have found its input bad in a first window.
RUN_A_WINDOW = ("fit", "Runner.step", "Runner.evaluate", "step", "evaluate", "backward")


def unclear(said, most_lines=MOST_LINES):
    """What a reader lacks in an answer, or ""; long values, and a list of all that is known, are not counted."""
    lines = textwrap.wrap(re.sub(r"'[^' ]{60,}'|\(known: .*?\)", "...", said), WIDTH)
    if len(lines) > most_lines:
        return f"takes {len(lines)} lines: {said}"
    return "" if NEXT_STEP.search(said) else f"does not say what to do: {said}"


def judge(case, folder):
    """Make a bad call; return what is wrong with the answer, or "" where all is well."""
    (folder / "a file").touch()
    world = World(folder)
    change = {name: value.make(world) if isinstance(value, InWorld) else value for name, value in case.change.items()}
    shown = f"{case.name}({', '.join(f'{name}={_shown(value)}' for name, value in change.items())})"
    arguments = case.call.good(world) | change
    if isinstance(change.get("model"), nn.Module) and "optimizer" in arguments:
        arguments["optimizer"] = None  # the other is over the world's model
    before = world.state(**change)
    try:
        made = case.call.make(**arguments)
        if hasattr(made, "__next__"):
            list(made)
    except autoaccum.AutoaccumError as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
    except Exception as error:  # noqa: BLE001 - that is the question
        return f"{shown}: raw {type(error).__name__}: {error}"[:300]
    else:
        return f"{shown}: accepted"
    return "; ".join(f"{shown}: {wrong}"[:600] for wrong in _faults(case, world, said, before, world.state(**change)))


def _faults(case, world, said, before, after):
    if case.names and not any(name in said for name in case.names):
        yield f"does not name {' or '.join(case.names)}: {said}"
    for text in case.says:
        if text not in said:
            yield f"does not say {text!r}: {said}"
    if wrong := unclear(said, WITH_CODE if "lambda " in said else MOST_LINES):
        yield wrong
    if world.counted.windows:
        yield f"refused after {world.counted.windows} windows"
    if case.is_before_data and world.loader.drawn:
        yield "refused after the loader was asked for a batch"
    # A first window that is refused has dropped the gradients that were there, and has said so.
    changed = [name for name in before if before[name] != after[name]]
    if "gradients" in changed and not after["gradients"] and case.name in RUN_A_WINDOW:
        changed.remove("gradients")
    if changed:
        yield f"changed {', '.join(changed)}; {said}"


def _has_values(model):
    return not any(one.is_meta or nn.parameter.is_lazy(one) for one in model.parameters())


def _shown(value):
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001
        text = f"<{type(value).__name__}>"
    return text[:60]
