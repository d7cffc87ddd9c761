"""Checkpoints of small runs that are damaged in every way: flipped bits, single fields, hostile pickles.

A damaged file is resumed by `fit` itself. What counts is that it raises autoaccum's own error or goes on, and that an
error leaves everything as it was.
"""

import builtins
import copy
import importlib
import os
import pickle
import random
import shutil

import numpy as np
import torch
from torch import nn

import autoaccum
from autoaccum._system.notices import Notices
from autoaccum._training import file_digest
from autoaccum._training.checkpoint_files import Storage
from long_runs import bits

FEATURES, HIDDEN, BATCH, TARGET, WINDOWS = 4, 5, 3, 6, 3


class Model(nn.Module):
    """Has running statistics, a buffer that no state_dict holds, a generator and a state of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.last = nn.Linear(HIDDEN, 2)
        self.register_buffer("mean", torch.zeros(HIDDEN), persistent=False)
        self.own = torch.Generator().manual_seed(4)
        self.numpys = np.random.default_rng(5)
        self.calls = {"train": 0}

    def forward(self, inputs):
        self.calls["train"] += 1
        hidden = torch.relu(self.norm(self.first(inputs))) + 0.01 * torch.rand(HIDDEN, generator=self.own)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0) + self.numpys.random()
        return self.last(hidden - 0.1 * self.mean)

    def get_extra_state(self):
        return dict(self.calls)

    def set_extra_state(self, state):
        self.calls["train"] = state["train"] + 0


class Loader:
    """Keeps its own state, and takes a half of one before it finds out that the rest is not there."""

    def __init__(self):
        self.begins_at = 0
        self.epoch = 0
        self.at = 0

    def __iter__(self):
        begins_at, self.begins_at = self.begins_at, 0
        for self.at in range(begins_at + 1, 9):
            generator = torch.Generator().manual_seed(self.at + 10 * self.epoch)
            yield torch.randn(BATCH, FEATURES, generator=generator), torch.arange(BATCH) % 2
        self.epoch += 1

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch = state["epoch"] + 0
        self.begins_at = state["at"] % 8


class Dragging:
    """A scheduler of the user's own, with numbers of NumPy."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.steps = np.int64(0)
        self.rates = np.linspace(0.01, 0.001, 50)

    def step(self):
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = float(self.rates[self.steps % 50])

    def state_dict(self):
        return {"steps": self.steps, "rates": self.rates}

    def load_state_dict(self, state):
        self.steps = np.int64(state["steps"])
        if len(state["rates"]) != len(self.rates):
            raise ValueError("other rates")
        self.rates = np.asarray(state["rates"], dtype=np.float64)


SCHEDULERS = torch.optim.lr_scheduler
# By name: an optimizer, a scheduler and a loader.
CONFIGURATIONS = {
    "Adam, StepLR, list": (
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
        lambda optimizer: SCHEDULERS.StepLR(optimizer, 2, gamma=0.5),
        lambda: [(torch.randn(BATCH, FEATURES), torch.arange(BATCH) % 2) for _ in range(8)],
    ),
    "SGD, SequentialLR, loader with a state": (
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        lambda optimizer: SCHEDULERS.SequentialLR(
            optimizer, [SCHEDULERS.LinearLR(optimizer), SCHEDULERS.MultiStepLR(optimizer, [2, 7])], [2]
        ),
        Loader,
    ),
    "AdamW, a scheduler of one's own, DataLoader": (
        lambda parameters: torch.optim.AdamW([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}]),
        Dragging,
        lambda: torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.randn(24, FEATURES), torch.arange(24) % 2),
            batch_size=BATCH,
            shuffle=True,
            generator=torch.Generator().manual_seed(6),
        ),
    ),
    "RMSprop, ReduceLROnPlateau, list": (
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.001, momentum=0.5, centered=True),
        lambda optimizer: SCHEDULERS.ReduceLROnPlateau(optimizer, patience=1),
        lambda: [(torch.randn(BATCH, FEATURES), torch.arange(BATCH) % 2) for _ in range(8)],
    ),
}


class Resumed(autoaccum.Callback):
    """Notes whether a checkpoint was taken up."""

    has = False

    def on_resume(self, path, *, step, epoch):
        self.has = True


class Run:
    """Everything of one process, made from a seed."""

    def __init__(self, name):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        make_optimizer, make_scheduler, make_loader = CONFIGURATIONS[name]
        self.model = Model()
        self.optimizer = make_optimizer(list(self.model.parameters()))
        self.scheduler = make_scheduler(self.optimizer)
        self.loader = make_loader()
        self.val_loader = None
        if isinstance(self.scheduler, SCHEDULERS.ReduceLROnPlateau):
            self.val_loader = [(torch.ones(BATCH, FEATURES), torch.arange(BATCH) % 2)]

    def fit(self, folder, windows, *callbacks):
        return autoaccum.fit(
            self.model,
            self.loader,
            TARGET,
            loss=nn.CrossEntropyLoss(),
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            val_loader=self.val_loader,
            max_steps=windows,
            micro_batch=BATCH,
            device="cpu",
            progress=False,
            checkpoint=folder,
            epochs=None,
            callbacks=callbacks,
        )

    def state(self):
        parts = {
            "model": self.model.state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "calls": self.model.calls,
            "own": self.model.own.get_state(),
            "numpys": self.model.numpys.bit_generator.state,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "loader": [getattr(self.loader, name, None) for name in ("epoch", "begins_at")],
            "generator": getattr(getattr(self.loader, "generator", None), "get_state", lambda: None)(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": _of_numpy(),
        }
        return {name: bits(value) for name, value in parts.items()}


def _of_numpy():
    """The state of NumPy's global generator; the last variate counts only while it lies ready."""
    *twister, is_ready, variate = np.random.get_state()  # noqa: NPY002
    return [*twister, is_ready, variate if is_ready else None]


def written(name, folder):
    """Train a few windows and return what the checkpoint holds."""
    Run(name).fit(folder, WINDOWS)
    return Storage(folder).read_newest(Notices(silent=True))[1]


# --- one field --------------------------------------------------------------------------------------------------------

DELETED = object()
# Long sequences of numbers are random states: a few of their numbers are enough.
_MOST_OF_A_SEQUENCE = 3


def places(value, path=()):
    """Yield the path of every field, containers too."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for number in range(min(len(value), _MOST_OF_A_SEQUENCE if len(value) > 100 else len(value))):
            yield from places(value[number], (*path, number))


def damages(value):
    """Return what may be put in place of a value, each with a name."""
    found = {
        "deleted": DELETED,
        "None": None,
        "text": "text",
        "true": True,
        "nan": float("nan"),
        "inf": float("inf"),
        "half": 2.5,
        "zero": 0,
        "minus one": -1,
        "large": 2**62,
        "huge": 10**30,
        "very negative": -(2**62),
        "list": [],
        "dictionary": {},
        "tuple": (),
        "other dictionary": {"other": 1},
        "tensor": torch.tensor(3.0),
        "empty tensor": torch.zeros(0),
        "meta": {"autoaccum.array": 5},
        "array": np.arange(3),
    }
    if isinstance(value, torch.Tensor):
        found |= {
            "another shape": value.reshape(-1)[: max(0, value.numel() - 1)],
            "one dimension more": value.unsqueeze(0),
            "float64": value.double(),
            "int16": value.to(torch.int16),
            "bool": value.bool(),
            "complex": value.to(torch.complex64) if value.is_floating_point() else value.double(),
            "NaN everywhere": torch.full_like(value, float("nan")) if value.is_floating_point() else value * 0 + 255,
            "minus five": (value * 0 - 5) if value.is_floating_point() else value * 0,
        }
    if isinstance(value, np.ndarray):
        found |= {"shorter": value[:-1], "float32": value.astype(np.float32), "two dimensions": value[None]}
    if isinstance(value, list | tuple) and value:
        found |= {
            "one less": value[:-1],
            "one more": (*value, value[0]) if isinstance(value, tuple) else [*value, value[0]],
        }
    return found


def with_damage(content, path, damage):
    """Return a copy of a content with one field replaced or deleted."""
    return _replaced(content, path, damage)


def _replaced(value, path, damage):
    key, *rest = path
    if isinstance(value, dict):
        made = {name: item for name, item in value.items() if name != key or rest or damage is not DELETED}
        if key in made:
            made[key] = _replaced(value[key], rest, damage) if rest else damage
        return made
    made = list(value)
    if rest:
        made[key] = _replaced(value[key], rest, damage)
    elif damage is DELETED:
        del made[key]
    else:
        made[key] = damage
    return type(value)(made)


def outcome(name, content, folder):
    """Resume from a damaged content as `fit` does, and return what came of it: a word, and what broke a promise."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        Storage(folder).write(content, WINDOWS)
    except autoaccum.CheckpointError:
        return "cannot be written", None
    run, resumed = Run(name), Resumed()
    before = run.state()
    try:
        run.fit(folder, WINDOWS + 3, resumed)
    except autoaccum.AutoaccumError as error:
        if resumed.has:
            return "gone on, ended by what was in it", None
        after = run.state()
        changed = {part for part in before if before[part] != after[part]}
        if "may hold a part of it now" in str(error):  # code of the user's own refuses a half
            changed -= {"model", "buffers", "scheduler"}
        return "refused", f"{', '.join(sorted(changed))} changed by a refusal: {error}" if changed else None
    except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
        return "raw", f"{type(error).__name__}: {error}"
    return "gone on", None


def draw(contents, seed, count):
    """Yield so many damages, each as a configuration's name, a path, the damage's name and the damaged content."""
    drawn = random.Random(seed)  # noqa: S311
    names = list(contents)
    all_places = {name: list(places(content)) for name, content in contents.items()}
    for number in range(count):
        name = names[number % len(names)]
        path = drawn.choice(all_places[name])
        value = contents[name]
        for key in path:
            value = value[key]
        choices = damages(value)
        damage = drawn.choice(list(choices))
        yield name, path, damage, with_damage(contents[name], path, choices[damage])


# --- bits -------------------------------------------------------------------------------------------------------------


def flips(path, whole, content, chosen):
    """Flip bits of a file, one at a time, and yield a line for each that loads other values without a word.

    Args:
        path: Where to write the file.
        whole: What it holds.
        content: What it is read as.
        chosen: The numbers of the bits.
    """
    expected = bits(content)
    storage = Storage(path.parent)
    for number in chosen:
        flipped = bytearray(whole)
        flipped[number // 8] ^= 1 << number % 8
        path.write_bytes(flipped)
        try:
            _, found = storage.read_newest(Notices(silent=True))
        except autoaccum.AutoaccumError:
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
            yield f"bit {number % 8} of byte {number // 8}: {type(error).__name__}: {error}"
            continue
        if bits(found) != expected:
            yield f"bit {number % 8} of byte {number // 8} loads other values"


# --- hostile pickles --------------------------------------------------------------------------------------------------


class Hostile:
    """Pickles as a call."""

    def __init__(self, function, *arguments, state=None):
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.call


def hostile(mark):
    """Return objects that a trusting reader rebuilds by running the file's code, which would make the file `mark`."""
    command = f"touch {mark}"
    dtype = np.dtype("V8")
    return {
        "os.system": Hostile(os.system, command),
        "builtins.eval": Hostile(builtins.eval, f"open({str(mark)!r}, 'w').close()"),
        "builtins.exec": Hostile(builtins.exec, f"open({str(mark)!r}, 'w').close()"),
        "builtins.open": Hostile(builtins.open, str(mark), "w"),
        "builtins.getattr": Hostile(getattr, "text", "upper"),
        "importlib": Hostile(importlib.import_module, "this"),
        "pickle.loads": Hostile(pickle.loads, pickle.dumps(Hostile(os.system, command))),
        "torch.load": Hostile(torch.load, str(mark)),
        "torch.nn.Linear": nn.Linear(1, 1),
        "NumPy's scalar": np.float64(1.0),
        "NumPy's array": np.zeros(3),
        "NumPy's array of objects": np.array([None, 1], dtype=object),
        "NumPy's dtype with a state of its own": Hostile(
            np.dtype, "V8", False, True, state=(3, "|", dtype, None, None, 8, 1, 0x3F)
        ),
        "NumPy's random state": np.random.RandomState(1),
    }


def write_hostile(path, content, payload, *, sealed):
    """Write a file with something hostile in it, with torch alone."""
    content = copy.copy(content) | {"scheduler": {"type": "StepLR", "state": {"payload": payload}}}
    if not sealed:
        torch.save(content | {"format": 1}, path)
        return
    with path.open("wb") as file, file_digest.sealing(file) as into:
        torch.save(content, into)


def plain_refuses(path):
    """Whether torch by itself refuses a file."""
    try:
        torch.load(path, weights_only=True)
    except pickle.UnpicklingError:
        return True
    return False
