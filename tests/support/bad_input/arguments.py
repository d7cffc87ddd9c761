"""Bad values for every public argument, and the judge of what a call makes of one.

`CALLS` names, for each public callable, what each argument may be; whatever `JUNK` holds beyond that is bad, and so are
the values listed beside it. A new argument has to be entered here: `missing()` says which are not.
"""

import inspect
import random
import re
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import autoaccum
from autoaccum._training.checkpoint_settings import EVERY
from support.training.long_runs import bits

try:
    import resource
except ImportError:  # Windows
    resource = None

NAN = float("nan")


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no repr")

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None


class PathOfBytes:
    def __fspath__(self):
        return b"folder"


def of_one(first):
    return first


def of_none():
    return None


def of_three(first, second, third):
    return third


# What is not even of a kind that the library knows, and what is only just not it.
JUNK = [
    *("nope", -1, 1.5, NAN, 10**400, "a\0b", Unshowable(), torch.zeros(2), nn.Linear),
    *(PathOfBytes(), Decimal("1e400"), {1: 2}, [None], True, "9" * 5000, "\ud800"),
]


# --- what an argument may be -----------------------------------------------------------------------------------------


def or_none(allowed):
    return lambda value: value is None or allowed(value)


def whole(least=1, most=2**53):
    return lambda value: type(value) is int and least <= value <= most


def choice(*names):
    return lambda value: isinstance(value, str) and value in names


def is_bool(value):
    return isinstance(value, bool)


def positive(value):
    """A number above 0; infinity is one."""
    return (isinstance(value, float) and value > 0) or (type(value) is int and 0 < value < 10**300)


def path(value):
    try:
        return isinstance(value, str | Path) and bool(str(value)) and "\0" not in str(value) and bool(Path(value))
    except ValueError:
        return False


def function(value):
    """Callables of which the number of arguments is not known, or is right; what they return is not looked at."""
    return callable(value) and not isinstance(value, type)


def limit(value):
    if isinstance(value, str):
        return re.match(r"\s*[\d.]+", value) is not None and len(value) < 100
    if isinstance(value, float):
        return 0 < value <= 1
    return type(value) is int and 2**22 <= value <= 2**60


def size(value):
    return isinstance(value, str) and re.match(r"\s*\d", value) is not None and len(value) < 100


def iterable(value):
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes | type)


def batch(value):
    """A tensor is a batch; whether a model takes it is between the two."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def dims(value):
    """What indexes samples: a number from 0, or several nested like a batch."""
    if isinstance(value, list | tuple | dict):
        each = [one for one in (value.values() if isinstance(value, dict) else value) if one is not None]
        return bool(each) and all(map(dims, each))
    return type(value) is int and value >= 0


def at_least_0(value):
    return type(value) in (int, float) and 0 <= value < 1e300


def nothing(_):
    return False


# --- the world in which a call is made --------------------------------------------------------------------------------


class Counted(autoaccum.Callback):
    def __init__(self):
        self.windows = 0

    def on_step(self, report, *, epoch):
        self.windows += 1


class World:
    """A model with every kind of state, its optimizer and data, made anew for each call."""

    def __init__(self, folder):
        torch.manual_seed(7)
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3))
        self.model[3].eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.batch = (torch.randn(4, 4), torch.arange(4) % 3)
        self.generator = torch.Generator().manual_seed(3)
        data = torch.utils.data.TensorDataset(*self.batch)
        self.loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, generator=self.generator)
        self.counted = Counted()
        self.model(self.batch[0]).sum().backward()
        self.optimizer.step()

    def state(self):
        """Everything that a refused call must leave as it was, to be compared."""
        state = {
            "parameters and buffers": dict(self.model.state_dict()),
            "modes": [part.training for part in self.model.modules()],
            "gradients": [p.grad for p in self.model.parameters() if p.grad is not None],
            "optimizer": self.optimizer.state_dict(),
            "random state": [torch.get_rng_state(), random.getstate(), np.random.get_state()],  # noqa: NPY002
            "loader's generator": self.generator.get_state(),
            "files": sorted(str(one) for one in self.folder.rglob("*")),
            "limits": None if resource is None else resource.getrlimit(resource.RLIMIT_DATA),
            "threads": sorted(thread.name for thread in threading.enumerate() if not thread.daemon),
            "gradient mode": torch.is_grad_enabled(),
        }
        return bits(state)


# --- the calls --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    signature: Callable[..., Any]  # what the user calls
    good: Callable[[World], dict[str, Any]]  # arguments that it takes, in a world
    # What each argument may be that `ALLOWED` does not have, or has otherwise.
    allowed: dict[str, Callable[[Any], bool]] = field(default_factory=dict)
    # The same for further bad values and `ALSO`; a function of the world makes each.
    also: dict[str, list[Callable[[World], Any]]] = field(default_factory=dict)
    # Arguments that contradict each other, one of which the message has to name.
    together: list[Callable[[World], dict[str, Any]]] = field(default_factory=list)
    # Makes the call, if that is another; what it returns is gone through where it is an iterator.
    function: Callable[..., Any] | None = None

    def make(self, **arguments):
        return (self.function or self.signature)(**arguments)

    def may_be(self, name):
        return self.allowed.get(name) or ALLOWED.get(name)

    def listed(self, name):
        """Bad values of an argument: those that it has, and what nearly all refuse."""
        plain = [lambda _, value=value: value for value in JUNK if not _safely(self.may_be(name), value)]
        return [*self.also.get(name, ALSO.get(name, [])), *plain]


def _safely(allowed, value):
    try:
        return bool(allowed(value))
    except Exception:  # noqa: BLE001 - what cannot even be looked at is bad
        return False


def by_hand(micro_batch, accum_steps):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.arange(12.0).reshape(4, 3).split(micro_batch):
        (model(batch).square().mean() / accum_steps).backward()
    optimizer.step()


def over_another(_):
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def on_plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


class TwoDevices(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.other = nn.Linear(4, 3, device="meta")


MODELS = [
    lambda _: nn.Linear,
    lambda _: of_one,
    lambda world: world.model.state_dict(),
    lambda _: TwoDevices(),
    lambda _: nn.Flatten(),
    lambda _: nn.Linear(4, 3).requires_grad_(False),
    lambda _: nn.Linear(4, 3, device="meta"),
    lambda _: nn.LazyLinear(3),
]
LOSSES = [
    lambda _: nn.CrossEntropyLoss,
    lambda _: [nn.CrossEntropyLoss, of_one],
    lambda _: of_one,
    lambda _: of_three,
    lambda _: of_none,
    lambda _: [],
    lambda _: [None],
]
# What is seen with the first batch.
RETURNED = [
    lambda _: lambda outputs, targets: outputs,
    lambda _: lambda outputs, targets: None,
    lambda _: lambda outputs, targets: outputs.sum().item(),
    lambda _: lambda outputs, targets: outputs.sum().detach(),
]
OPTIMIZERS = [over_another, lambda _: of_none, lambda _: lambda parameters: None, lambda _: of_three]
SCHEDULERS = [
    lambda _: torch.optim.lr_scheduler.StepLR,
    lambda _: torch.optim.lr_scheduler.StepLR(over_another(None), 1),
    lambda world: world.optimizer,
    lambda _: of_none,
    lambda _: of_three,
    lambda world: torch.optim.lr_scheduler.ReduceLROnPlateau(world.optimizer),
    lambda _: torch.optim.lr_scheduler.ReduceLROnPlateau,
    lambda _: on_plateau,
]
LOADERS = [
    lambda _: [],
    lambda _: iter([]),
    lambda _: [(torch.zeros(0, 4), torch.zeros(0))],
    lambda _: [(torch.zeros(4, 4), torch.zeros(3))],
    lambda _: ["text"],
    lambda _: torch.utils.data.DataLoader,
    lambda _: "text",
]
YIELDED = [
    lambda _: np.float64(3.0),
    lambda _: torch.randn(8, 4),
    lambda world: world.batch,
    lambda world: world.loader.dataset,
    lambda _: [["a cat", "a dog"]],
    lambda _: [1.0, 2.0],
    lambda world: [world.batch[0]],
    lambda world: [{"input": world.batch[0]}],
]
FORWARDS = [lambda _: of_one, lambda _: of_none, lambda _: of_three]
DEVICES = [
    lambda _, device=device: device
    for device in ("cuda:99", "cpu:7", "meta", 10**9, autoaccum.Simulated, "gpu", "", "cuda:x", "cpu:-2", object())
]
PATHS = [
    lambda world: world.folder / "a file",
    lambda world: world.folder / "a file" / "below",
    lambda world: world.folder / ("n" * 300),
    lambda _: Path("null\0byte"),
]
METRICS = [
    lambda _: {"a": 3},
    lambda _: {3: of_one},
    lambda _: [None],
    lambda _: of_one,
    lambda _: {"a": nn.Linear},
    lambda _: {"a": lambda outputs, targets: "text"},
]


def device(value):
    return value is None


def model(value):
    return isinstance(value, nn.Module)


SPLITS = [lambda _: autoaccum.Along, lambda _: autoaccum.Along((2, 0)), lambda _: autoaccum.Along({"labels": 0})]
# By the argument's name, which means the same wherever it stands.
ALLOWED = {
    "loss": or_none(function),
    "optimizer": or_none(lambda value: isinstance(value, type) and issubclass(value, torch.optim.Optimizer)),
    "device": device,
    "precision": choice("auto", "fp32", "bf16", "fp16"),
    "forward": or_none(function),
    "model": model,
    "loader": iterable,
    "batch": batch,
    "window": batch,
    "plan": nothing,
    "target_batch": whole(),
    "scheduler": or_none(nothing),
    "scheduler_interval": choice("step"),
    "epochs": or_none(whole()),
    "max_steps": or_none(whole()),
    "micro_batch": lambda value: value == "auto" or whole()(value),
    "max_micro_batch": or_none(whole()),
    "memory_limit": or_none(limit),
    "clip_grad_norm": or_none(positive),
    "drop_last": is_bool,
    "lr_scaling": or_none(nothing),
    "base_batch": or_none(nothing),
    "val_loader": or_none(iterable),
    "val_every": or_none(whole()),
    "metrics": or_none(nothing),
    "loss_reduction": or_none(choice("mean", "sum")),
    "loss_scope": choice("micro_batch", "window"),
    "batchnorm": choice("keep", "rescale"),
    "split": or_none(nothing),
    "on_nan": choice("warn", "stop"),
    "on_too_large": choice("raise", "skip"),
    "noise_scale": lambda value: is_bool(value) or whole()(value),
    "save_memory": or_none(lambda value: value in ([], ())),
    "callbacks": lambda value: value in ([], ()),
    "closure": or_none(nothing),
    "scale": or_none(nothing),
    "progress": lambda value: is_bool(value) or choice("auto", "bar", "lines")(value),
    "checkpoint": or_none(path),
    "checkpoint_every": or_none(lambda value: value == EVERY),
    "resume": lambda value: value is False or choice("auto")(value),
    "oom_report": or_none(path),
    "shard_data": is_bool,
    # Beside `target_batch`; by themselves they are tested where they belong.
    "target_tokens": or_none(nothing),
    "weight": or_none(function),
}
ALSO = {
    "model": MODELS,
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "device": DEVICES,
    "forward": FORWARDS,
    "split": SPLITS,
    "loader": LOADERS,
    "scheduler": SCHEDULERS,
    "val_loader": LOADERS[:1] + LOADERS[2:],
    "metrics": METRICS,
    "checkpoint": PATHS,
    "oom_report": PATHS,
    "memory_limit": [lambda _: 10**30, lambda _: "9" * 400, lambda _: 1, lambda _: "512KiB", lambda _: "2 YiB"],
    "save_memory": [
        lambda _: ["checkpoint", "nope"],
        lambda _: "offload",
        lambda _: "checkpoint:",
        lambda _: "checkpoint:x",
        lambda _: ["auto", "checkpoint"],
    ],
    "callbacks": [lambda _: autoaccum.Callback(), lambda _: [print], lambda _: {autoaccum.Callback()}],
}
# Other words by which a message may speak of an argument.
SAYS = {
    "loader": ("loader", "batch"),
    "window": ("window", "batch"),
    "batches": ("batch",),
    "gpus": ("gpus", "gpu"),
    "dims": ("Along(",),
}
FIT_TOGETHER = [
    lambda w: {"drop_last": True, "target_batch": 100},
    lambda _: {"resume": True},
    lambda _: {"checkpoint_every": 3},
    lambda _: {"base_batch": 4},
    lambda _: {"lr_scaling": "linear"},
    lambda _: {"lr_scaling": "linear", "base_batch": 0},
    lambda w: {"lr_scaling": "sqrt", "base_batch": 1, "loss": lambda outputs, targets: None},
    lambda _: {"scheduler_interval": "epoch"},
    lambda _: {"metrics": lambda outputs, targets: 0.0, "val_loader": None},
    lambda w: {"val_loader": iter([w.batch]), "epochs": 2},
    lambda w: {"val_loader": [w.batch], "metrics": [3]},
    lambda w: {"val_loader": [w.batch], "metrics": {"a": torch.nn.Linear}},
    lambda _: {"loss": nn.MSELoss(), "loss_reduction": "sum"},
    lambda w: {"loss": nn.MSELoss(), "loader": [(w.batch[0], torch.randn(4))]},
    lambda _: {"loss_scope": "window", "loss": [lambda model, batch: model(batch[0]).sum()]},
    lambda _: {"target_batch": 2**40, "micro_batch": 1},
    lambda _: {"target_batch": None},
    lambda _: {"target_batch": None, "target_tokens": 0},
    lambda _: {"target_tokens": 8},
    lambda w: {"loss": print, "checkpoint": w.folder / "new" / "deep", "oom_report": w.folder / "other"},
    lambda w: {"val_loader": [(w.batch[0], torch.zeros(3))], "checkpoint": w.folder / "new"},
    lambda w: {"checkpoint": w.folder / "new", "device": "cuda:77"},
    lambda w: {"checkpoint": w.folder / "new", "resume": True},
]


def fit_arguments(world):
    return {
        "model": world.model,
        "loader": world.loader,
        "target_batch": 4,
        "optimizer": world.optimizer,
        "device": "cpu",
        "precision": "fp32",
        "callbacks": [world.counted],
        "progress": False,
        "epochs": 1,
    }


def fit(**arguments):
    if isinstance(arguments.get("metrics"), dict | list) or callable(arguments.get("metrics")):
        arguments.setdefault("val_loader", [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))])
    return autoaccum.fit(**arguments)


def plan_of(_):
    return autoaccum.plan(4, 2)


def runner_of(world):
    return autoaccum.Runner(world.model, world.optimizer, plan_of(world), device="cpu")


CALLS = {
    "fit": Call(
        autoaccum.fit,
        fit_arguments,
        also={"loss": LOSSES + RETURNED, "loader": LOADERS + YIELDED},
        together=FIT_TOGETHER,
        function=fit,
    ),
    "find_micro_batch": Call(
        autoaccum.find_micro_batch,
        lambda w: {"model": w.model, "batch": w.batch, "optimizer": w.optimizer, "device": "cpu"},
    ),
    "Runner": Call(
        autoaccum.Runner,
        lambda w: {"model": w.model, "optimizer": w.optimizer, "plan": plan_of(w), "device": "cpu"},
        also={"split": SPLITS[:1]},  # of the others a batch tells
    ),
    "Accumulator": Call(
        autoaccum.Accumulator, lambda w: {"model": w.model, "device": "cpu"}, also={"model": [], "split": SPLITS[:1]}
    ),
    "Runner.step": Call(
        autoaccum.Runner.step,
        lambda w: {"runner": runner_of(w), "window": w.batch},
        also={"window": LOADERS[:5]},
        function=lambda runner, window: runner.step(window),
    ),
    "Runner.evaluate": Call(
        autoaccum.Runner.evaluate,
        lambda w: {"runner": runner_of(w), "loader": [w.batch]},
        function=lambda runner, loader: runner.evaluate(loader),
    ),
    "plan": Call(
        autoaccum.plan,
        lambda _: {"target_batch": 100, "max_micro_batch": 37},
        {
            "max_micro_batch": whole(),
            "trials": lambda value: value in ([], ()) or (isinstance(value, dict | set | str | bytes) and not value),
        },
        {"trials": [lambda _: [autoaccum.records.Trial("4", fits=True, peak_bytes=1, elapsed_s=1.0)], lambda _: [3]]},
        [lambda _: {"target_batch": 2**50, "max_micro_batch": 1}],
    ),
    "windows": Call(
        autoaccum.windows, lambda w: {"loader": [w.batch], "target_batch": 2}, also={"loader": LOADERS[3:]}
    ),
    "Window": Call(
        autoaccum.Window,
        lambda w: {"batches": [w.batch]},
        {"batches": nothing},
        {"batches": [lambda _: [], *LOADERS[3:]]},
    ),
    "preflight": Call(
        autoaccum.preflight,
        lambda w: {"model": w.model, "batch": w.batch, "target_batch": 4, "optimizer": w.optimizer, "device": "cpu"},
        {
            "gpus": lambda value: value in ([], ()),
            "device_memory": or_none(size),
            "display": or_none(size),
            "ranks": whole(1, 4),
            "fsdp": lambda value: value is False,
            "loader": or_none(iterable),
            "measure": or_none(is_bool),
        },
        {
            "loader": [],
            "save_memory": [],
            "gpus": [lambda _: "no such GPU", lambda _: ["h100-80gb", "nope"], lambda _: [3]],
            "device_memory": [lambda _: "50%", lambda _: "1MiB", lambda _: "9" * 400],
            "display": [lambda _: "50%", lambda _: "much", lambda _: "9" * 400],
        },
        [lambda _: {"measure": False}],
    ),
    "ChunkedLoss": Call(
        autoaccum.ChunkedLoss,
        lambda w: {"head": w.model},
        {
            "head": model,
            "weight": or_none(lambda value: isinstance(value, torch.Tensor) and value.is_floating_point()),
            "ignore_index": whole(-(2**63), 2**63 - 1),
            "reduction": choice("mean", "sum", "none"),
            "label_smoothing": lambda value: at_least_0(value) and value <= 1,
        },
        {
            "head": [lambda _: torch.ones(3, 4)],
            "weight": [lambda _: torch.ones(3, dtype=torch.long), lambda _: torch.ones(2, 3)],
            "label_smoothing": [lambda _: -0.1, lambda _: 1.1, lambda _: NAN],
        },
    ),
    "Simulated": Call(
        autoaccum.Simulated,
        lambda _: {"capacity": "1GiB"},
        {"capacity": lambda value: size(value) or whole(1, 2**60)(value), "device": nothing},
        {"capacity": [lambda _: "50%", lambda _: 0.5, lambda _: "9" * 400]},
    ),
    "Along": Call(
        autoaccum.Along,
        lambda _: {"dims": 1},
        {"dims": dims},
        {"dims": [lambda _: -1, lambda _: (0, -1), lambda _: {"a": None}]},
    ),
    "ListOfSamples": Call(
        autoaccum.ListOfSamples,
        lambda _: {"collate": of_one},
        {"collate": callable},
        {"collate": [lambda _: of_none, lambda _: of_three], "weight": [lambda _: of_three, lambda _: of_none]},
    ),
    "batched": Call(
        autoaccum.batched,
        lambda _: {"function": of_one},
        {"function": callable, "join": or_none(callable), "micro_batch": or_none(whole())},
        {"function": [lambda _: of_none], "split": SPLITS[:1]},
    ),
    "find_executable_micro_batch": Call(
        autoaccum.find_executable_micro_batch,
        lambda _: {"target": 4},
        {"target": whole(), "micro_batch": or_none(whole())},
    ),
    "verify": Call(
        autoaccum.verify,
        lambda _: {"train": by_hand, "target_batch": 4},
        {"train": nothing, "micro_batch": or_none(whole()), "steps": whole(), "keep_dropout": is_bool},
        {"train": [lambda _: print, lambda _: lambda micro_batch: None]},
        [lambda _: {"target_batch": 1}],
    ),
    "StopTraining": Call(autoaccum.StopTraining, lambda _: {}, {"reason": lambda value: isinstance(value, str)}),
    "EarlyStopping": Call(
        autoaccum.EarlyStopping,
        lambda _: {},
        {"patience": whole(), "monitor": lambda value: isinstance(value, str), "mode": choice("min", "max")},
    ),
    "is_oom": Call(
        autoaccum.is_oom,
        lambda _: {"exception": ValueError()},
        {"exception": lambda value: isinstance(value, BaseException)},
    ),
    "join_ranks": Call(autoaccum.join_ranks, lambda _: {}),
    "JSONLinesLog": Call(autoaccum.JSONLinesLog, lambda _: {}, {"path": path}),
    "Plan": Call(
        autoaccum.Plan,
        lambda _: {"target_batch": 4, "micro_batches": (2, 2)},
        {"target_batch": lambda value: value == 4, "micro_batches": nothing},
    ),
}
# What the library makes and users read, or derive from: nothing is asked of it.
READ_ONLY = {
    "Callback",
    "PackedRows",  # takes no argument
    "Split",
} | {name for name in autoaccum.__all__ if name.endswith(("Error", "Warning"))}


def arguments_of(call):
    """The names of a call's arguments; what takes any number of further ones only refuses them."""
    parameters = inspect.signature(call.signature).parameters.items()
    return [name for name, one in parameters if name != "self" and one.kind is not inspect.Parameter.VAR_POSITIONAL]


def missing():
    """What is public and has no entry here."""
    names = [name for name in autoaccum.__all__ if name not in CALLS and name not in READ_ONLY]
    return names + [
        f"{name}({argument})"
        for name, call in CALLS.items()
        for argument in arguments_of(call)
        if call.may_be(argument) is None
    ]


# Lines of 100 columns that an answer takes at the most, and what a next step begins with, or a bound.
MOST_LINES, WIDTH = 3, 100
NEXT_STEP = re.compile(
    r"\b(pass|call|choose|check|give|look|make|return|set|try|wrap|write|name|use|have|correct|assign|nest|leave|say|end|"
    r"needs|makes|is called with|help shows|wants?|must|has '|can only|load|at least|at most|cannot be started)\b"
)
# What may have found its input bad in a first window.
RUN_A_WINDOW = ("fit", "Runner.step", "Runner.evaluate")


# --- the judge --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One bad call: which, the arguments that differ from good ones, and those that the message may name."""

    call: str
    change: Callable[[World], dict[str, Any]]
    names: tuple[str, ...]

    def __repr__(self):
        return f"{self.call}({', '.join(self.names)})"


def of_one_argument(name, argument, make):
    return Case(name, lambda world: {argument: make(world)}, SAYS.get(argument, (argument,)))


def of_several(name, make):
    return Case(name, make, ())


def unclear(said):
    """What a reader lacks in an answer, or ""; long values, and a list of all that is known, are not counted."""
    lines = textwrap.wrap(re.sub(r"'[^' ]{60,}'|\(known: .*?\)", "...", said), WIDTH)
    if len(lines) > MOST_LINES:
        return f"takes {len(lines)} lines: {said}"
    return "" if NEXT_STEP.search(said) else f"does not say what to do: {said}"


def judge(case, folder, *, is_listed=False):
    """Make a bad call; return what is wrong with the answer, or "" where all is well; of listed ones also its words."""
    (folder / "a file").touch()
    world, call = World(folder), CALLS[case.call]
    arguments = call.good(world)
    change = case.change(world)
    arguments |= change
    shown = ", ".join(f"{name}={_shown(value)}" for name, value in change.items())
    before = world.state()
    try:
        made = call.make(**arguments)
        if hasattr(made, "__next__"):
            list(made)
    except autoaccum.AutoaccumError as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
    except Exception as error:  # noqa: BLE001 - that is the question
        return f"{case.call}({shown}): raw {type(error).__name__}: {error}"[:300]
    else:
        return f"{case.call}({shown}): accepted"
    names = case.names or tuple(change)
    if not any(name in said for name in names):
        return f"{case.call}({shown}): does not name {' or '.join(names)}: {said}"[:400]
    if is_listed and (wrong := unclear(said)):
        return f"{case.call}({shown}): {wrong}"[:600]
    if world.counted.windows:
        return f"{case.call}({shown}): refused after {world.counted.windows} windows"
    after = world.state()
    # A first window that is refused has dropped the gradients that were there, and has said so.
    changed = [name for name in before if before[name] != after[name]]
    if "gradients" in changed and not after["gradients"] and case.call in RUN_A_WINDOW:
        changed.remove("gradients")
    return f"{case.call}({shown}): changed {', '.join(changed)}; {said}"[:400] if changed else ""


def _shown(value):
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001
        text = f"<{type(value).__name__}>"
    return text[:60]
