"""Bad values for every public argument.

`CALLS` names, for each public callable, what each argument may be; whatever `JUNK` holds beyond that is bad, and so are
the values listed beside it. A new argument has to be entered here: `missing()` says which are not. `rows.py` has the
calls of which the answer says more than a name.
"""

import inspect
from pathlib import Path

import numpy as np
import torch
from torch import nn

import autoaccum
from autoaccum._training.checkpoint_settings import EVERY  # which is a function that nobody can write again
from support.bad_input import values
from support.bad_input.engine import Call, Case
from support.bad_input.values import InWorld


def by_hand(micro_batch, accum_steps):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in torch.arange(12.0).reshape(4, 3).split(micro_batch):
        (model(part).square().mean() / accum_steps).backward()
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
    *(nn.Linear, values.of_one, InWorld(lambda world: world.model.state_dict())),
    *(TwoDevices(), nn.Flatten(), nn.Linear(4, 3).requires_grad_(False), nn.Linear(4, 3, device="meta")),
    nn.LazyLinear(3),
]
LOSSES = [
    nn.CrossEntropyLoss,
    [nn.CrossEntropyLoss, values.of_one],
    values.of_one,
    values.of_three,
    values.of_none,
    [],
    [None],
]
OPTIMIZERS = [InWorld(over_another), values.of_none, lambda parameters: None, values.of_three]
SCHEDULERS = [
    *(
        torch.optim.lr_scheduler.StepLR,
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        values.of_none,
        values.of_three,
        on_plateau,
    ),
    InWorld(lambda _: torch.optim.lr_scheduler.StepLR(over_another(None), 1)),
    InWorld(lambda world: world.optimizer),
    InWorld(lambda world: on_plateau(world.optimizer)),
]
NO_SAMPLE, UNLIKE = (torch.zeros(0, 4), torch.zeros(0)), (torch.zeros(4, 4), torch.zeros(3))
LOADERS = [[], iter([]), [NO_SAMPLE], [UNLIKE], ["text"], torch.utils.data.DataLoader, "text"]
YIELDED = [
    *(np.float64(3.0), torch.randn(8, 4), [["a cat", "a dog"]], [1.0, 2.0]),
    InWorld(lambda world: world.batch),
    InWorld(lambda world: world.loader.dataset),
    InWorld(lambda world: [world.batch[0]]),
    InWorld(lambda world: [{"input": world.batch[0]}]),
]
DEVICES = ["cuda:99", "cpu:7", "meta", 10**9, autoaccum.Simulated, "gpu", "", "cuda:x", "cpu:-2", object()]
PATHS = [
    InWorld(lambda world: world.folder / "a file"),
    InWorld(lambda world: world.folder / "a file" / "below"),
    InWorld(lambda world: world.folder / ("n" * 300)),
    Path("null\0byte"),
]
METRICS = [
    {"a": 3},
    {3: values.of_one},
    [None],
    values.of_one,
    {"a": nn.Linear},
    {"a": lambda outputs, targets: "text"},
]
SPLITS = [autoaccum.Along, autoaccum.Along((2, 0)), autoaccum.Along({"labels": 0})]
# By the argument's name, which means the same wherever it stands.
ALLOWED = {
    "loss": values.or_none(values.function),
    "optimizer": values.or_none(lambda value: isinstance(value, type) and issubclass(value, torch.optim.Optimizer)),
    "device": lambda value: value is None,
    "precision": values.choice("auto", "fp32", "bf16", "fp16"),
    "forward": values.or_none(values.function),
    "model": values.model,
    "loader": values.iterable,
    "batch": values.batch,
    "window": values.batch,
    "plan": values.nothing,
    "target_batch": values.whole(),
    "scheduler": values.or_none(values.nothing),
    "scheduler_interval": values.choice("step"),
    "epochs": values.or_none(values.whole()),
    "max_steps": values.or_none(values.whole()),
    "micro_batch": lambda value: value == "auto" or values.whole()(value),
    "max_micro_batch": values.or_none(values.whole()),
    "memory_limit": values.or_none(values.limit),
    "clip_grad_norm": values.or_none(values.positive),
    "drop_last": values.is_bool,
    "lr_scaling": values.or_none(values.nothing),
    "base_batch": values.or_none(values.nothing),
    "val_loader": values.or_none(values.iterable),
    "val_every": values.or_none(values.whole()),
    "metrics": values.or_none(values.nothing),
    "loss_reduction": values.or_none(values.choice("mean", "sum")),
    "loss_scope": values.choice("micro_batch", "window"),
    "batchnorm": values.choice("keep", "rescale"),
    "split": values.or_none(values.nothing),
    "on_nan": values.choice("warn", "stop"),
    "on_too_large": values.choice("raise", "skip"),
    "noise_scale": lambda value: values.is_bool(value) or values.whole()(value),
    "save_memory": values.or_none(values.is_empty),
    "callbacks": values.is_empty,
    "closure": values.or_none(values.nothing),
    "scale": values.or_none(values.nothing),
    "progress": lambda value: values.is_bool(value) or values.choice("auto", "bar", "lines")(value),
    "checkpoint": values.or_none(values.path),
    "checkpoint_every": values.or_none(lambda value: value == EVERY),
    "resume": lambda value: value is False or values.choice("auto")(value),
    "oom_report": values.or_none(values.path),
    "shard_data": values.is_bool,
    # Beside `target_batch`; by themselves they are tested where they belong.
    "target_tokens": values.or_none(values.nothing),
    "weight": values.or_none(values.function),
}
ALSO = {
    "model": MODELS,
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "device": DEVICES,
    "forward": [values.of_one, values.of_none, values.of_three],
    "split": SPLITS,
    "loader": LOADERS,
    "scheduler": SCHEDULERS,
    "val_loader": LOADERS[:1] + LOADERS[2:],
    "metrics": METRICS,
    "checkpoint": PATHS,
    "oom_report": PATHS,
    "memory_limit": [10**30, "9" * 400, 1, "512KiB", "2 YiB"],
    "save_memory": [["checkpoint", "nope"], "offload", "checkpoint:", "checkpoint:x", ["auto", "checkpoint"]],
    "callbacks": [autoaccum.Callback(), [print], {autoaccum.Callback()}],
}
# Other words by which a message may speak of an argument.
SAYS = {
    "loader": ("loader", "batch"),
    "window": ("window", "batch"),
    "batches": ("batch",),
    "gpus": ("gpus", "gpu"),
    "dims": ("Along(",),
}
NEW_FOLDER = InWorld(lambda world: world.folder / "new" / "deep")
FIT_TOGETHER = [
    {"drop_last": True, "target_batch": 100},
    {"resume": True},
    {"checkpoint_every": 3},
    {"base_batch": 4},
    {"lr_scaling": "linear"},
    {"lr_scaling": "linear", "base_batch": 0},
    {"lr_scaling": "sqrt", "base_batch": 1, "loss": lambda outputs, targets: None},
    {"scheduler_interval": "epoch"},
    {"metrics": lambda outputs, targets: 0.0, "val_loader": None},
    {"val_loader": InWorld(lambda w: [w.batch]), "metrics": [3]},
    {"val_loader": InWorld(lambda w: [w.batch]), "metrics": {"a": torch.nn.Linear}},
    {"loss": nn.MSELoss(), "loader": InWorld(lambda w: [(w.batch[0], torch.randn(4))])},
    {"loss_scope": "window", "loss": [lambda model, batch: model(batch[0]).sum()]},
    {"target_batch": 2**40, "micro_batch": 1},
    {"target_batch": None, "target_tokens": 0},
    {"target_tokens": 8},
    {"loss": print, "checkpoint": NEW_FOLDER, "oom_report": InWorld(lambda w: w.folder / "other")},
    {"val_loader": InWorld(lambda w: [(w.batch[0], torch.zeros(3))]), "checkpoint": NEW_FOLDER},
    {"checkpoint": NEW_FOLDER, "device": "cuda:77"},
    {"checkpoint": NEW_FOLDER, "resume": True},
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
        also={"loader": LOADERS + YIELDED},
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
            "max_micro_batch": values.whole(),
            "trials": lambda value: (
                values.is_empty(value) or (isinstance(value, dict | set | str | bytes) and not value)
            ),
        },
        {"trials": [[autoaccum.records.Trial("4", fits=True, peak_bytes=1, elapsed_s=1.0)], [3]]},
        [{"target_batch": 2**50, "max_micro_batch": 1}],
    ),
    "windows": Call(
        autoaccum.windows, lambda w: {"loader": [w.batch], "target_batch": 2}, also={"loader": LOADERS[3:]}
    ),
    "Window": Call(
        autoaccum.Window,
        lambda w: {"batches": [w.batch]},
        {"batches": values.nothing},
        {"batches": [[], *LOADERS[3:]]},
    ),
    "preflight": Call(
        autoaccum.preflight,
        lambda w: {"model": w.model, "batch": w.batch, "target_batch": 4, "optimizer": w.optimizer, "device": "cpu"},
        {
            "gpus": values.is_empty,
            "device_memory": values.or_none(values.size),
            "display": values.or_none(values.size),
            "ranks": values.whole(1, 4),
            "fsdp": lambda value: value is False,
            "loader": values.or_none(values.iterable),
            "measure": values.or_none(values.is_bool),
        },
        {
            "loader": [],
            "save_memory": [],
            "gpus": ["no such GPU", ["h100-80gb", "nope"], [3]],
            "device_memory": ["50%", "1MiB", "9" * 400],
            "display": ["50%", "much", "9" * 400],
        },
    ),
    "ChunkedLoss": Call(
        autoaccum.ChunkedLoss,
        lambda w: {"head": w.model},
        {
            "head": values.model,
            "weight": values.or_none(lambda value: isinstance(value, torch.Tensor) and value.is_floating_point()),
            "ignore_index": values.whole(-(2**63), 2**63 - 1),
            "reduction": values.choice("mean", "sum", "none"),
            "label_smoothing": values.share,
        },
        {
            "head": [torch.ones(3, 4)],
            "weight": [torch.ones(3, dtype=torch.long), torch.ones(2, 3)],
            "label_smoothing": [-0.1, 1.1, values.NAN],
        },
    ),
    "Simulated": Call(
        autoaccum.Simulated,
        lambda _: {"capacity": "1GiB"},
        {"capacity": lambda value: values.size(value) or values.whole(1, 2**60)(value), "device": values.nothing},
        {"capacity": ["50%", 0.5, "9" * 400]},
    ),
    "Along": Call(
        autoaccum.Along,
        lambda _: {"dims": 1},
        {"dims": values.dims},
        {"dims": [-1, (0, -1), {"a": None}]},
    ),
    "ListOfSamples": Call(
        autoaccum.ListOfSamples,
        lambda _: {"collate": values.of_one},
        {"collate": callable},
        {"collate": [values.of_none, values.of_three], "weight": [values.of_three, values.of_none]},
    ),
    "batched": Call(
        autoaccum.batched,
        lambda _: {"function": values.of_one},
        {"function": callable, "join": values.or_none(callable), "micro_batch": values.or_none(values.whole())},
        {"function": [values.of_none], "split": SPLITS[:1]},
    ),
    "find_executable_micro_batch": Call(
        autoaccum.find_executable_micro_batch,
        lambda _: {"target": 4},
        {"target": values.whole(), "micro_batch": values.or_none(values.whole())},
    ),
    "verify": Call(
        autoaccum.verify,
        lambda _: {"train": by_hand, "target_batch": 4},
        {
            "train": values.nothing,
            "micro_batch": values.or_none(values.whole()),
            "steps": values.whole(),
            "keep_dropout": values.is_bool,
        },
        {"train": [print, lambda micro_batch: None]},
        [{"target_batch": 1}],
    ),
    "StopTraining": Call(autoaccum.StopTraining, lambda _: {}, {"reason": values.is_text}),
    "EarlyStopping": Call(
        autoaccum.EarlyStopping,
        lambda _: {},
        {"patience": values.whole(), "monitor": values.is_text, "mode": values.choice("min", "max")},
    ),
    "is_oom": Call(
        autoaccum.is_oom,
        lambda _: {"exception": ValueError()},
        {"exception": lambda value: isinstance(value, BaseException)},
    ),
    "join_ranks": Call(autoaccum.join_ranks, lambda _: {}),
    "JSONLinesLog": Call(autoaccum.JSONLinesLog, lambda _: {}, {"path": values.path}),
    "Plan": Call(
        autoaccum.Plan,
        lambda _: {"target_batch": 4, "micro_batches": (2, 2)},
        {"target_batch": lambda value: value == 4, "micro_batches": values.nothing},
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


def may_be(call, argument):
    return call.allowed.get(argument) or ALLOWED.get(argument)


def missing():
    """What is public and has no entry here."""
    names = [name for name in autoaccum.__all__ if name not in CALLS and name not in READ_ONLY]
    return names + [
        f"{name}({argument})"
        for name, call in CALLS.items()
        for argument in arguments_of(call)
        if may_be(call, argument) is None
    ]


def listed():
    """Bad calls by argument: with the values that are listed of each, and what nearly all refuse."""
    cases = {}
    for name, call in CALLS.items():
        for argument in arguments_of(call):
            junk = [value for value in values.JUNK if not values.is_allowed(may_be(call, argument), value)]
            bad, says = [*call.also.get(argument, ALSO.get(argument, [])), *junk], SAYS.get(argument, (argument,))
            cases[f"{name}({argument})"] = [Case(name, call, {argument: value}, says) for value in bad]
        cases[f"{name}, together"] = [Case(name, call, change, tuple(change)) for change in call.together]
    return cases
