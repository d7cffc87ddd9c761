"""What ranks must have alike: a difference is refused on all of them, and none is seen where there is none."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from support.ranks import expect
from support.ranks.rows import SPREAD, THREE, TWO, Row, table
from support.ranks.sharded import here
from support.ranks.training import (
    CLASSES,
    WIDTH,
    adam,
    mean_size,
    net,
    one_of_list,
    other_of_list,
    sgd,
    vectors,
)  # fmt: skip


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


def scheduled(kind, *given):
    """An optimizer and a scheduler that are made already."""
    model = net()
    optimizer = sgd(model.parameters())
    return {"model": model, "optimizer": optimizer, "scheduler": kind(optimizer, *given)}


# --- at the start -----------------------------------------------------------------------------------------------------


def unlike(name, others, own, **both):
    """What the error names, and arguments of the ranks but one, and of this one."""
    return name, both | {name: others}, both | {name: own}


# Functions make models, of which a row may not hold one; everything else a rank has from its own import of this file.
cosine, steps = torch.optim.lr_scheduler.CosineAnnealingLR, torch.optim.lr_scheduler.StepLR
smoothed = functools.partial(functional.cross_entropy, label_smoothing=0.1)
smoothed_more = functools.partial(functional.cross_entropy, label_smoothing=0.2)
AT_THE_START = [
    SMOOTHED := unlike("loss", nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.5)),
    unlike("loss", nn.CrossEntropyLoss(), nn.MultiMarginLoss()),
    unlike("loss", nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=2)),
    unlike("loss", nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")),
    unlike("loss", of_classes(1, 1, 1, 1), of_classes(1, 1, 1, 2)),
    unlike("loss", cross_entropy, other_cross_entropy),
    unlike("loss", cross_entropy, None),
    unlike("loss", smoothed, smoothed_more),
    unlike("loss", [one_of_list], [other_of_list]),
    ("forward", {}, {"forward": called}),
    ("split", {}, {"split": autoaccum.Along(0)}),
    ("metrics", {}, {"metrics": {"accuracy": accuracy}}),
    unlike("metrics", {"accuracy": accuracy}, {"right": accuracy}),
    unlike("metrics", {"it": accuracy}, {"it": mean_size}),
    unlike("metrics", [accuracy, mean_size], [mean_size, accuracy]),
    ("metrics", lambda: {"metrics": {"it": hits(1)}}, lambda: {"metrics": {"it": hits(2)}}),
    unlike("clip_grad_norm", 1.0, 2.0),
    unlike("base_batch", 8, 16, lr_scaling="linear"),
    unlike("lr_scaling", "linear", "sqrt", base_batch=8),
    ("scheduler", {}, lambda: scheduled(torch.optim.lr_scheduler.ConstantLR)),
    ("scheduler", lambda: scheduled(cosine, 10), lambda: scheduled(cosine, 20)),
    ("scheduler", lambda: scheduled(steps, 3), lambda: scheduled(steps, 3, 0.5)),
    unlike("scheduler_interval", "step", "epoch", scheduler=annealed(5)),
    ("model", lambda: {"model": layers(nn.Tanh)}, lambda: {"model": layers(nn.ReLU)}),
    ("model", lambda: {"model": layers(nn.Dropout, 0.1)}, lambda: {"model": layers(nn.Dropout, 0.2)}),
    ("model", lambda: {"model": layers(nn.Dropout)}, lambda: {"model": in_evaluation(layers(nn.Dropout))}),
    ("model", lambda: {"model": net()}, lambda: {"model": nn.Sequential(net(), nn.Linear(CLASSES, 4)).double()}),
    ("target_batch", {}, {"target_batch": 20}),
    unlike("optimizer", sgd, adam),
    unlike("optimizer", in_groups(slice(0, 2), slice(2, 4)), in_groups(slice(0, 4, 2), slice(1, 4, 2))),
    unlike("optimizer", with_state(None), with_state(0.1)),
    unlike("optimizer", with_state(0.2), with_state(0.1)),
]


def differing(others, own, who=1):
    def arguments(rank, size):
        asked = {"loss": cross_entropy, "val_loader": DataLoader(vectors(10), batch_size=5), "data": vectors()}
        given = own if rank == who else others
        return asked | (given() if callable(given) else given)

    return arguments


def refused_alike(text, **settings):
    def all_say_the_same(answers):
        assert len(set(map(str, answers))) == 1, answers

    return expect.ends((autoaccum.InvalidInputError, text), also=all_say_the_same, **settings)


SMOOTHING = "rank {} has another loss than rank 0 (label_smoothing={} of CrossEntropyLoss, and label_smoothing={} of"
DIFFERING_AT_THE_START = [
    *(
        Row(f"another {what} is refused on all ranks, {number}", differing(others, own),
            holds=refused_alike(f"rank 1 has another {what} than rank 0"))
        for number, (what, others, own) in enumerate(AT_THE_START)
    ),
    *(
        Row(f"a difference on rank {who} names the rank, the setting and both values", differing(*SMOOTHED[1:], who),
            (THREE,), refused_alike(SMOOTHING.format(*named)))
        for who, named in [(0, (1, 0, 0.5)), (2, (2, 0.5, 0))]
    ),
]  # fmt: skip


# --- what comes to differ while training, in a setting ----------------------------------------------------------------


class Watching(autoaccum.Callback):
    """Changes something after a window, and keeps the parameters after each."""

    def __init__(self, model, window, change):
        self.model, self.window, self.change, self.after = model, window, change, []

    def on_step(self, report, *, epoch):
        self.after.append(self.parameters())
        if report.step == self.window:
            self.change()

    def parameters(self):
        return [here(parameter).clone() for parameter in self.model.parameters()]

    @contextlib.contextmanager
    def ends_after(self, windows, *, leaves_all):
        """What is refused is so after so many windows, and leaves the parameters, where that is asked."""
        try:
            yield
        except autoaccum.InvalidInputError:
            assert len(self.after) == windows
            if leaves_all:
                assert all(map(torch.equal, self.parameters(), self.after[-1]))
                assert all(parameter.grad is None for parameter in self.model.parameters())
            raise


def changing(who, change, make, *, windows, window=2, at_once=None, leaves_all=True, **given):
    """Train where one rank changes its model and optimizer, after a window or `at_once`.

    `make` makes an optimizer of parameters, and of whether this rank is that one.
    """

    def arguments(rank, size):
        model, kept = net(), []

        def optimizer(parameters):
            kept.append(make([one for one in parameters if one.requires_grad], rank == who))
            if at_once is not None and rank == who:
                at_once(model, kept[0])
            return kept[0]

        def changed():
            if change is not None and rank == who:
                change(model, kept[0])

        watching = Watching(model, window, changed)
        options = {"model": model, "optimizer": optimizer, "target_batch": 8, "micro_batch": 2, "data": vectors()}
        options |= {
            "loss": cross_entropy,
            "callbacks": [watching],
            "during": watching.ends_after(windows, leaves_all=leaves_all),
        }
        return options | given

    return arguments


def two_groups(parameters, is_odd, rate=0.01):
    return torch.optim.AdamW([{"params": parameters[:2], "own": [1]}, {"params": parameters[2:]}], lr=rate)


def two_groups_with_a_tensor(parameters, is_odd):
    return two_groups(parameters, is_odd, torch.tensor(0.01))


def sets(name, value, *, group=0):
    def change(model, optimizer):
        optimizer.param_groups[group][name] = value

    return change


def moves_a_parameter(model, optimizer):
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


SETTINGS = {
    "lr": (sets("lr", 0.05), two_groups),
    "lr of the last group": (sets("lr", 0.05, group=1), two_groups),
    "weight_decay": (sets("weight_decay", 0.1), two_groups),
    "betas": (sets("betas", (0.5, 0.999)), two_groups),
    "a list": (lambda model, optimizer: optimizer.param_groups[0]["own"].append(1), two_groups),
    "tensor": (lambda model, optimizer: optimizer.param_groups[0]["lr"].mul_(0.5), two_groups_with_a_tensor),
    "amsgrad": (sets("amsgrad", True), two_groups),
    "a new setting": (sets("another", 1), two_groups),
    "params": (moves_a_parameter, two_groups),
}


def with_schedule(rank, size):
    """A schedule that a function makes, twice as long on one rank."""
    given = changing(1, None, lambda parameters, _: sgd(parameters), windows=1)(rank, size)
    return given | {"scheduler": annealed(20 if rank == 1 else 10)}


RATE = "rank {} has another optimizer than rank 0 (lr={} in group 1, and lr={}"
DIFFERING_LATER = [
    *(
        Row(f"{what} that a callback changes on one rank is refused before the next optimizer step",
            changing(1, *SETTINGS[what], windows=2), (TWO, SPREAD) if what in ("lr", "tensor") else (TWO,),
            refused_alike("rank 1 has another optimizer than rank 0"))
        for what in SETTINGS
    ),
    *(
        Row(f"a rate that a callback sets on rank {who} is refused on all of three, with both values",
            changing(who, *SETTINGS["lr of the last group"], windows=2), (THREE,), expect.refused(RATE.format(*named)))
        for who, named in [(0, (1, 0.01, 0.05)), (2, (2, 0.05, 0.01))]
    ),
    Row("schedules of other lengths are refused before parameters differ", with_schedule,
        holds=expect.refused("rank 1 has another optimizer than rank 0 (lr=")),
]  # fmt: skip


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


def doubled(tensors):
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(2)


def swapped_signs(tensor):
    with torch.no_grad():
        tensor[:2].neg_()


def of_sgd(parameters, is_odd):
    return sgd(parameters)


def scaling(parameters, is_odd):
    return Scaling(parameters, 2.0 if is_odd else 1.0)


def before_steps(model, optimizer):
    optimizer.register_step_pre_hook(lambda *_: doubled(parameter.grad for parameter in model.parameters()))


def after_steps(model, optimizer):
    optimizer.register_step_post_hook(lambda *_: doubled(model.parameters()))


def with_frozen(given):
    def arguments(rank, size):
        found = given(rank, size)
        found["model"][3].bias.requires_grad_(requires_grad=False)
        return found

    return arguments


WRITES = {
    "parameter": lambda model, optimizer: doubled(model.parameters()),
    "signs": lambda model, optimizer: swapped_signs(model[0].bias),
    "frozen": lambda model, optimizer: doubled([model[3].bias]),
    "state": lambda model, optimizer: doubled(state["momentum_buffer"] for state in optimizer.state.values()),
    "no state": lambda model, optimizer: optimizer.state.clear(),
}


def writes(what, who=1, *, windows=3, **given):
    return changing(who, WRITES[what], of_sgd, windows=windows, leaves_all=False, **{"max_steps": 6} | given)


def by_itself(*, windows=1, make=of_sgd, at_once=None):
    return changing(1, None, make, windows=windows, at_once=at_once, leaves_all=False)


def step_by_oneself(rank, size):
    """A loop in which one rank writes to a parameter after the first batch."""
    model = net()

    def before(number, model):
        if rank == 1 and number == 1:
            doubled([model[0].bias])

    return {"by": "loops", "model": model, "loss": (cross_entropy, vectors), "before": before, "steps": 2}


def differs(name, ranks="rank 1", **settings):
    does = "only some ranks have written to it. Do so on all: compare what callbacks, the optimizer and its hooks do"
    return refused_alike(f"the {name} differs from that of rank 0 on {ranks}: {does}", **settings)


FIRST, AFTER_THREE = "parameter '0.weight'", {"window": 3, "max_steps": 3}
DRIFTING = [
    *(
        Row(f"{what} that one rank writes by itself: refused on all before the next window that is due", given,
            holds=differs(name, "rank 1"))
        for what, name, given in [
            ("a parameter", FIRST, writes("parameter")), ("signs", "parameter '0.bias'", writes("signs")),
            ("a frozen one", "parameter '3.bias'", with_frozen(writes("frozen"))), ("state", FIRST, writes("state")),
            ("no state", FIRST, writes("no state")), ("an attribute", FIRST, by_itself(make=scaling)),
            ("a pre-hook", FIRST, by_itself(at_once=before_steps)),
            ("a post-hook", FIRST, by_itself(at_once=after_steps)),
        ]
    ),
    *(
        Row(f"a parameter that differs on rank {who} names all ranks that differ from rank 0", writes("parameter", who),
            (THREE,), differs(FIRST, named))
        for who, named in [(0, "rank 1, rank 2"), (2, "rank 2")]
    ),
    *(
        Row(f"{what} that one rank writes after the last window is refused at the end", writes(what, **AFTER_THREE),
            holds=differs(f"{name} '0.weight'"))
        for what, name in [("state", "optimizer's momentum_buffer of"), ("no state", "optimizer's momentum_buffer of")]
    ),
    Row("a parameter that one rank writes after the last window is refused, and no checkpoint is written",
        writes("parameter", **AFTER_THREE), holds=differs(FIRST, keeps=[])),
    Row("a parameter that one rank writes to in a loop of its own is refused on all", step_by_oneself,
        holds=differs("parameter '0.bias'")),
]  # fmt: skip


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
        return [adam(parameters[:2]), sgd(parameters[2:])]

    return {"optimizer": optimizers, "data": vectors(160), "model": layers(nn.BatchNorm1d, 8)}


@contextlib.contextmanager
def threads(number):
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(1)


def on_threads(rank):
    """Train a layer that torch divides among threads, whose numbers differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 10_007), nn.Tanh(), nn.Linear(10_007, CLASSES)).double()
    return {"model": model, "optimizer": adam, "clip_grad_norm": 1.0, "during": threads(1 + rank)}


def kept_state(_):
    """Arguments of a second call with an optimizer that has a state."""
    model = net()
    optimizer = adam(model.parameters())
    model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def may_differ(own):
    asked = {"target_batch": 8, "micro_batch": 4, "loss": cross_entropy, "data": vectors()}
    return lambda rank, _: asked | {"val_loader": DataLoader(vectors(10), batch_size=5)} | own(rank)


MAY_DIFFER = [
    Row(f"what may differ is not refused: {own.__name__}", may_differ(own), holds=expect.alike)
    for own in (
        with_lambda, with_opaque_objects, on_plateau, observed_by_rank_0, numbers_of_other_types, of_functions,
        without_samples, in_half_precision, by_several_optimizers, on_threads, kept_state,
    )
]  # fmt: skip


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


def accumulator(what):
    def arguments(rank, size):
        asked = ACCUMULATORS[what][rank == 1]
        return {"by": "loops", "model": net(), "optimizer": None} | asked | {"loss": (asked["loss"], vectors)}

    return arguments


OF_ACCUMULATORS = [
    Row(f"accumulators with another {what} are refused on all ranks", accumulator(what),
        holds=refused_alike(f"rank 1 has another {what} than rank 0"))
    for what in ACCUMULATORS
]  # fmt: skip

ROWS = table(__file__, *DIFFERING_AT_THE_START, *DIFFERING_LATER, *DRIFTING, *MAY_DIFFER, *OF_ACCUMULATORS)


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)
