"""Trainings in which one rank has something that the others do not."""

import functools

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from support.ranks import training
from support.ranks.sharded import sharded
from support.ranks.training import CLASSES, WIDTH, net, vectors

ADDS_TO = 0.5


def cross_entropy(outputs, targets):
    return functional.cross_entropy(outputs, targets)


def other_cross_entropy(outputs, targets):
    return functional.cross_entropy(outputs, targets)


def called(model, batch):
    return model(batch[0])


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def hits(threshold):
    from torchmetrics.classification import MulticlassAccuracy  # noqa: PLC0415 - slow

    return MulticlassAccuracy(CLASSES, top_k=threshold)


def layers(kind, *given):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), kind(*given), nn.Linear(8, CLASSES)).double()


def in_evaluation(model):
    model[1].eval()
    return model


def of_classes(*weights, **settings):
    return nn.CrossEntropyLoss(weight=torch.tensor(weights, dtype=torch.float64), **settings)


def in_groups(first, second):
    """Return what makes an optimizer of two groups with so many parameters, taken in turn or one after the other."""

    def make(parameters):
        groups = [{"params": parameters[first]}, {"params": parameters[second], "lr": 0.01}]
        return torch.optim.SGD(groups, lr=0.1)

    return make


def with_state(value):
    def make(parameters):
        made = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        if value is not None:
            for parameter in parameters:
                made.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
        return made

    return make


def annealed(steps, kind=torch.optim.lr_scheduler.CosineAnnealingLR):
    return lambda optimizer: kind(optimizer, steps)


def made(model, kind, *given):
    """Return the arguments that pass an optimizer and a scheduler that are made already."""
    optimizer = training.sgd(model.parameters())
    return {"model": model, "optimizer": optimizer, "scheduler": kind(optimizer, *given)}


# By what the error names: the arguments of the ranks but one, and those of this one, made on the rank itself.
AT_THE_START = {
    "loss": [
        (lambda: {"loss": nn.CrossEntropyLoss()}, lambda: {"loss": nn.MultiMarginLoss()}),
        (lambda: {"loss": nn.CrossEntropyLoss()}, lambda: {"loss": nn.CrossEntropyLoss(label_smoothing=0.5)}),
        (lambda: {"loss": nn.CrossEntropyLoss()}, lambda: {"loss": nn.CrossEntropyLoss(ignore_index=2)}),
        (lambda: {"loss": nn.CrossEntropyLoss()}, lambda: {"loss": nn.CrossEntropyLoss(reduction="sum")}),
        (lambda: {"loss": of_classes(1, 1, 1, 1)}, lambda: {"loss": of_classes(1, 1, 1, 2)}),
        (lambda: {"loss": cross_entropy}, lambda: {"loss": other_cross_entropy}),
        (lambda: {"loss": cross_entropy}, lambda: {"loss": None}),
        (
            lambda: {"loss": functools.partial(functional.cross_entropy, label_smoothing=0.1)},
            lambda: {"loss": functools.partial(functional.cross_entropy, label_smoothing=0.2)},
        ),
        (lambda: {"loss": [training.one_of_list]}, lambda: {"loss": [training.other_of_list]}),
    ],
    "forward": [(dict, lambda: {"forward": called})],
    "split": [(dict, lambda: {"split": autoaccum.Along(0)})],
    "metrics": [
        (dict, lambda: {"metrics": {"accuracy": accuracy}}),
        (lambda: {"metrics": {"accuracy": accuracy}}, lambda: {"metrics": {"right": accuracy}}),
        (lambda: {"metrics": {"it": accuracy}}, lambda: {"metrics": {"it": training.mean_size}}),
        (
            lambda: {"metrics": [accuracy, training.mean_size]},
            lambda: {"metrics": [training.mean_size, accuracy]},
        ),
        (lambda: {"metrics": {"it": hits(1)}}, lambda: {"metrics": {"it": hits(2)}}),
    ],
    "clip_grad_norm": [(lambda: {"clip_grad_norm": 1.0}, lambda: {"clip_grad_norm": 2.0})],
    "base_batch": [
        (lambda: {"lr_scaling": "linear", "base_batch": 8}, lambda: {"lr_scaling": "linear", "base_batch": 16})
    ],
    "lr_scaling": [
        (lambda: {"lr_scaling": "linear", "base_batch": 8}, lambda: {"lr_scaling": "sqrt", "base_batch": 8})
    ],
    "scheduler": [
        (dict, lambda: made(net(), torch.optim.lr_scheduler.ConstantLR)),
        (
            lambda: made(net(), torch.optim.lr_scheduler.CosineAnnealingLR, 10),
            lambda: made(net(), torch.optim.lr_scheduler.CosineAnnealingLR, 20),
        ),
        (
            lambda: made(net(), torch.optim.lr_scheduler.StepLR, 3),
            lambda: made(net(), torch.optim.lr_scheduler.StepLR, 3, 0.5),
        ),
    ],
    "scheduler_interval": [
        (
            lambda: {"scheduler": annealed(5), "scheduler_interval": "step"},
            lambda: {"scheduler": annealed(5), "scheduler_interval": "epoch"},
        )
    ],
    "model": [
        (lambda: {"model": layers(nn.Tanh)}, lambda: {"model": layers(nn.ReLU)}),
        (lambda: {"model": layers(nn.Dropout, 0.1)}, lambda: {"model": layers(nn.Dropout, 0.2)}),
        (lambda: {"model": layers(nn.Dropout)}, lambda: {"model": in_evaluation(layers(nn.Dropout))}),
    ],
    "optimizer": [
        (lambda: {"optimizer": training.sgd}, lambda: {"optimizer": training.adam}),
        (
            lambda: {"optimizer": in_groups(slice(0, 2), slice(2, 4))},
            lambda: {"optimizer": in_groups(slice(0, 4, 2), slice(1, 4, 2))},
        ),
        (lambda: {"optimizer": with_state(None)}, lambda: {"optimizer": with_state(0.1)}),
        (lambda: {"optimizer": with_state(0.2)}, lambda: {"optimizer": with_state(0.1)}),
    ],
}


def differing_at_the_start(rank, size, what, number, who):
    others, own = AT_THE_START[what][number]
    asked = {"loss": cross_entropy, "val_loader": DataLoader(vectors(10), batch_size=5)}
    asked |= {"target_batch": 16, "micro_batch": 4, "shard_data": True, "data": vectors()}
    return training.train(rank, size, **asked | (own if rank == who else others)())


# --- what comes to differ while training ------------------------------------------------------------------------------


class Watching(autoaccum.Callback):
    """Sets something on one rank after the second window; keeps the parameters after each window."""

    def __init__(self, model, optimizer, changes):
        self.model, self.optimizer, self.changes = model, optimizer, changes
        self.after = []

    def on_step(self, report, *, epoch):
        self.after.append([_local(parameter).clone() for parameter in self.model.parameters()])
        if report.step == 2 and self.changes is not None:
            self.changes(self.optimizer)


def _local(parameter):
    value = parameter.detach()
    return value.to_local() if hasattr(value, "to_local") else value


def _sets(name, value, *, group=0):
    def change(optimizer):
        optimizer.param_groups[group][name] = value

    return change


def _moves_a_parameter(optimizer):
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


CHANGES = {
    "lr": _sets("lr", 0.05),
    "lr of the last group": _sets("lr", 0.05, group=1),
    "weight_decay": _sets("weight_decay", 0.1),
    "betas": _sets("betas", (0.5, 0.999)),
    "a list": lambda optimizer: optimizer.param_groups[0]["own"].append(1),
    "tensor": lambda optimizer: optimizer.param_groups[0]["lr"].mul_(ADDS_TO),
    "amsgrad": _sets("amsgrad", True),
    "a new setting": _sets("another", 1),
    "params": _moves_a_parameter,
}


def _two_groups(model, what):
    parameters = list(model.parameters())
    rate = torch.tensor(0.01) if what == "tensor" else 0.01
    return torch.optim.AdamW([{"params": parameters[:2], "own": [1]}, {"params": parameters[2:]}], lr=rate)


def differing_later(rank, size, what, who, *, is_sharded=False):
    """Change a setting on one rank; return the error, the windows made, and whether parameters are as after them."""
    model = net(seed=0)
    model = sharded(model) if is_sharded else model
    optimizer = _two_groups(model, what)
    watching = Watching(model, optimizer, CHANGES[what] if rank == who else None)
    return _ended(rank, size, model, watching, optimizer=optimizer)


def scheduled_otherwise(rank, size, who):
    """Train with a schedule that a function makes, twice as long on one rank."""
    model = net(seed=0)
    watching = Watching(model, None, None)
    return _ended(rank, size, model, watching, optimizer=training.sgd, scheduler=annealed(20 if rank == who else 10))


def _ended(rank, size, model, watching, **arguments):
    asked = {
        "target_batch": 8,
        "micro_batch": 2,
        "shard_data": True,
        "data": vectors(),
        "loss": cross_entropy,
        "callbacks": [watching],
    }
    error = None
    try:
        training.train(rank, size, model=model, **asked, **arguments)
    except autoaccum.InvalidInputError as raised:
        error = str(raised)
    last = [_local(parameter) for parameter in model.parameters()]
    return {
        "error": error,
        "windows": len(watching.after),
        "are as before": all(map(torch.equal, last, watching.after[-1])),
        "gradients": sum(parameter.grad is not None for parameter in model.parameters()),
        "parameters": last,
    }


# --- what one rank writes to by itself --------------------------------------------------------------------------------


class Scaling(torch.optim.SGD):
    """Has a setting outside of its groups, and state by names that are not torch's."""

    def __init__(self, parameters, factor):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.factor = factor

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.factor)
        return super().step(closure)


class After(autoaccum.Callback):
    """Calls a function after one window."""

    def __init__(self, window, function):
        self.window, self.function = window, function

    def on_step(self, report, *, epoch):
        if report.step == self.window:
            self.function()


def _doubled(tensors):
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(2)


def _swapped_signs(tensor):
    with torch.no_grad():
        tensor[:2].neg_()


# What a rank does by itself: after which window, and to what, given the model and the optimizer.
WRITES = {
    "parameter": lambda model, optimizer: _doubled(model.parameters()),
    "signs": lambda model, optimizer: _swapped_signs(model[0].bias),
    "frozen": lambda model, optimizer: _doubled([model[3].bias]),
    "state": lambda model, optimizer: _doubled(state["momentum_buffer"] for state in optimizer.state.values()),
    "no state": lambda model, optimizer: optimizer.state.clear(),
}


def _pre_hook(model, optimizer):
    optimizer.register_step_pre_hook(lambda *_: _doubled(parameter.grad for parameter in model.parameters()))


def _post_hook(model, optimizer):
    optimizer.register_step_post_hook(lambda *_: _doubled(model.parameters()))


HOOKS = {"pre-hook": _pre_hook, "post-hook": _post_hook}


def drifting(rank, size, what, who, *, window=2, last=6, folder=None):
    """Train where one rank writes by itself, at once with hooks; return the error and how many windows were made."""
    model, is_odd = net(), rank == who
    if what == "frozen":
        model[3].bias.requires_grad_(requires_grad=False)
    if what == "attribute":
        optimizer = Scaling(model.parameters(), 2.0 if is_odd else 1.0)
    else:
        optimizer = training.sgd([one for one in model.parameters() if one.requires_grad])
    watching = Watching(model, optimizer, None)
    callbacks = [watching]
    if is_odd and what in HOOKS:
        HOOKS[what](model, optimizer)
    if is_odd and what in WRITES:
        callbacks.append(After(window, lambda: WRITES[what](model, optimizer)))
    error = None
    try:
        training.train(
            rank, size, model=model, optimizer=optimizer, data=vectors(), loss=cross_entropy, target_batch=8,
            micro_batch=2, shard_data=True, max_steps=last, callbacks=callbacks, checkpoint=folder,
        )  # fmt: skip
    except autoaccum.InvalidInputError as raised:
        error = str(raised)
    return error, len(watching.after)


def drifting_in_a_loop(rank, size, who, *, windows=4):
    """Step with an accumulator, where one rank writes to a parameter after the first batch."""
    model = net()
    optimizer = training.sgd(model.parameters())
    accumulating = autoaccum.Accumulator(model, loss=cross_entropy, device="cpu", precision="fp32", micro_batch=2)
    batch = tuple(map(torch.stack, zip(*vectors(8)[rank::size], strict=True)))
    for window in range(windows):
        try:
            accumulating.backward(batch)
        except autoaccum.InvalidInputError as raised:
            return str(raised), window
        optimizer.step()
        optimizer.zero_grad()
        if rank == who and not window:
            _doubled([model[0].bias])
    return None, windows


# --- what may differ --------------------------------------------------------------------------------------------------


class Opaque:
    """Has an address for its repr."""

    def __call__(self, outputs, targets):
        return functional.cross_entropy(outputs, targets)


class StopsOnFirst(autoaccum.EarlyStopping):
    pass


def with_lambda(rank):
    return {"loss": lambda outputs, targets: functional.cross_entropy(outputs, targets, label_smoothing=rank * 0)}


def with_opaque_objects(_):
    def optimizer(parameters):
        return torch.optim.SGD([{"params": parameters, "own": Opaque(), "function": lambda: None}], lr=0.1)

    return {"loss": Opaque(), "optimizer": optimizer, "forward": lambda model, batch: model(batch[0])}


def on_plateau(_):
    schedule = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=10.0)
    return {"scheduler": schedule, "epochs": 4, "val_every": 1}


def observed_by_rank_0(rank):
    return {"callbacks": [autoaccum.EarlyStopping(patience=50)] if rank == 0 else []}


def numbers_of_other_types(rank):
    return {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1 if rank else 1.0)}


def of_functions(_):
    return {"scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)}


def without_samples(rank):
    """Train through many windows in most of which rank 1 has no samples."""
    loader = DataLoader(vectors(160 if rank == 0 else 4), batch_size=4)
    return {"shard_data": False, "make_loader": lambda *_: loader, "callbacks": []}


def in_half_precision(_):
    return {"precision": "fp16", "model": net().float(), "data": _in_single_precision(), "val_loader": None}


def _in_single_precision():
    return [(inputs.float(), target) for inputs, target in vectors(160)]


def by_several_optimizers(_):
    def optimizers(parameters):
        return [training.adam(parameters[:2]), training.sgd(parameters[2:])]

    return {"optimizer": optimizers, "data": vectors(160), "model": layers(nn.BatchNorm1d, 8)}


def on_threads(rank):
    """Train a layer that torch divides among threads, whose numbers differ."""
    torch.set_num_threads(1 + rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 10_007), nn.Tanh(), nn.Linear(10_007, CLASSES)).double()
    return {"model": model, "optimizer": training.adam, "clip_grad_norm": 1.0}


def kept_state(_):
    """Arguments of a second call with an optimizer that has a state."""
    model = net()
    optimizer = training.adam(model.parameters())
    model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


MAY_DIFFER = {
    one.__name__: one
    for one in (
        with_lambda, with_opaque_objects, on_plateau, observed_by_rank_0, numbers_of_other_types, of_functions,
        without_samples, in_half_precision, by_several_optimizers, on_threads, kept_state,
    )
}  # fmt: skip


def alike(rank, size, what):
    asked = {"target_batch": 8, "micro_batch": 4, "shard_data": True, "data": vectors(), "loss": cross_entropy}
    asked |= {"val_loader": DataLoader(vectors(10), batch_size=5)}
    try:
        return training.train(rank, size, **asked | MAY_DIFFER[what](rank))
    finally:
        torch.set_num_threads(1)


# --- loops with an accumulator ----------------------------------------------------------------------------------------

ACCUMULATORS = {
    "loss": ({"loss": nn.CrossEntropyLoss()}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.5)}),
    "forward": ({"loss": cross_entropy}, {"loss": cross_entropy, "forward": called}),
    "loss_reduction": ({"loss": cross_entropy}, {"loss": cross_entropy, "loss_reduction": "mean"}),
    "scale": (
        {"loss": cross_entropy, "scale": torch.amp.GradScaler("cpu", init_scale=4.0)},
        {"loss": cross_entropy, "scale": torch.amp.GradScaler("cpu", init_scale=8.0)},
    ),
}


def accumulators(rank, size, what, who):
    asked = ACCUMULATORS[what][rank == who]
    made = autoaccum.Accumulator(net(), device="cpu", precision="fp32", micro_batch=2, **asked)
    made.backward(tuple(map(torch.stack, zip(*vectors(4), strict=True))))


# --- the end of a call ------------------------------------------------------------------------------------------------


class FailsAtEnd(autoaccum.Callback):
    def on_fit_end(self, result):
        raise ZeroDivisionError("the user's own")


def failing_at_end(rank, size, who):
    callbacks = [FailsAtEnd()] if rank == who else []
    return training.train(rank, size, target_batch=16, micro_batch=4, shard_data=True, callbacks=callbacks)
