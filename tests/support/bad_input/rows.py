"""Bad calls of which the answer says more than the argument's name: an argument, and the words that must be there.

A row is what differs from a good call, and all that the answer has to say. What `BEFORE_DATA` holds is refused before
the loader is asked for a batch; of `WITH_DATA` the first batch tells. Keys name the calls: those of `calls.py`, `WAYS`.
"""

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

import autoaccum
from support.bad_input.calls import CALLS, fit, fit_arguments, over_another
from support.bad_input.engine import Call, Case
from support.bad_input.values import InWorld

ce = functional.cross_entropy


# --- ways to train on one batch ---------------------------------------------------------------------------------------


def runner_of(model, micro_batch=2, optimizer=None, target_batch=4, **options):
    return autoaccum.Runner(model, optimizer, autoaccum.plan(target_batch, micro_batch), device="cpu", **options)


def by_step(batch, **options):
    runner_of(**options).step(batch)


def by_evaluation(batch, **options):
    runner_of(**options).evaluate([batch])


def by_fit(batch=None, **options):
    return fit(**options) if batch is None else fit(**options | {"loader": [batch]})


def by_accumulator(batch, **options):
    autoaccum.Accumulator(device="cpu", **options).backward(batch)


def by_batched(batch, **options):
    autoaccum.batched(**options)(batch)


def of_batch(world):
    return {"model": world.model, "batch": world.batch}


WAYS = CALLS | {
    "fit": Call(by_fit, fit_arguments),
    "step": Call(by_step, of_batch),
    "evaluate": Call(by_evaluation, of_batch),
    "backward": Call(by_accumulator, of_batch),
    "batched": Call(by_batched, lambda _: {"batch": torch.arange(6.0)}),
}


# --- known before a batch is drawn ------------------------------------------------------------------------------------


class SAM(torch.optim.SGD):
    def first_step(self, zero_grad=False): ...

    def second_step(self, zero_grad=False): ...


class ScheduleFree(torch.optim.SGD):
    def train(self): ...

    def eval(self): ...


class LineSearch(torch.optim.SGD):
    def step(self, closure): ...


def over(parameters, kind=torch.optim.SGD):
    return InWorld(lambda world: kind(parameters(world.model), lr=0.1))


def all_of(model):
    return model.parameters()


def in_a_list(kind, *parts):
    """Several optimizers, of which the last is of another kind."""
    sgd = [lambda model, part=part: torch.optim.SGD(model[part].parameters(), lr=0.1) for part in parts[:-1]]
    last = parts[-1]
    return InWorld(lambda w: [*(one(w.model) for one in sgd), kind(w.model[last].parameters(), lr=0.1)])


class Counts(autoaccum.Callback):
    def on_step(self, report):
        pass


class Scaled(nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def made_in_inference_mode(make):
    with torch.inference_mode():
        return make()


SEVERAL_OPTIMIZERS = {
    torch.optim.LBFGS: ("LBFGS.step() requires a closure", "first-order"),
    LineSearch: ("LineSearch.step() requires a closure",),
    SAM: ("SAM takes two gradients", "use the optimizer that it wraps"),
    ScheduleFree: ("ScheduleFree trains with other weights than it evaluates with", "with autoaccum.Accumulator"),
}
UNREADABLE = [True, 0, 0.0, 1.5, math.nan, "12 parsecs", "1.5", "0%", "-3GiB", "0MiB", "GiB", "", "1e9", [600], b"6MiB"]
NO_SIZES = ["much", "0.5", "50%", "", "-3GiB", "0", "24 bananas", "100MiB"]
# Names of several GPUs, which are told all of them, and of none, which are told a near one.
GPUS = {
    "a100": ("a100-40gb", "a100-80gb"),
    "V100": ("v100-16gb", "v100-32gb"),
    "h100": ("h100-80gb", "h100-pcie-80gb", "h100-nvl-94gb"),
    "a1000-80gb": ("a100-80gb",),
    "rtx4099": ("rtx-4090",),
    "l40": ("l40s",),
    "h100-80tb": ("h100-80gb",),
}
READ_ONCE = "can be read only once, and would be read several times"
OF_INFERENCE = "was made in torch.inference_mode(), and cannot be trained"

BEFORE_DATA = {
    "fit": [
        ({"target_batch": 100.0}, "target_batch must be a whole number, got 100.0 (float); pass an int"),
        ({"target_batch": None}, "there is no target: pass target_batch="),
        ({"precision": "fp8"}, "precision='fp8' is unknown; choose one of 'auto', 'fp32', 'bf16', 'fp16'"),
        ({"device": "cuda:99"}, "device='cuda:99' is not available; this machine has 'cpu'"),
        ({"loss": nn.MSELoss(), "loss_reduction": "sum"}, "contradicts the loss, a MSELoss with reduction='mean'"),
        ({"loss": made_in_inference_mode(Scaled)}, OF_INFERENCE),
        ({"model": made_in_inference_mode(lambda: nn.Linear(4, 3))}, OF_INFERENCE),
        ({"noise_scale": True, "loss_scope": "window"}, "noise_scale=True compares gradients of micro-batches"),
        ({"on_too_large": "skip", "loss_scope": "window"}, "on_too_large='skip' leaves samples out of a window"),
        ({"callbacks": [Counts()]}, "Counts.on_step ", "on_step(self, report, *, epoch)"),
        *(({"memory_limit": limit}, f"memory_limit={limit!r}", "'12GiB'") for limit in UNREADABLE),
        ({"memory_limit": "12 parsecs"}, "has the unknown unit 'parsecs'; give bytes"),
        ({"memory_limit": 1.5}, "is read as a fraction and must be above 0 and at most 1"),
        # Optimizers: over other parameters, and with several evaluations of the loss.
        ({"optimizer": over_another}, "2 of them not the model's"),
        (
            {"optimizer": InWorld(over_another), "lr_scaling": "linear", "base_batch": 2},
            "2 parameters, 2 of them not the model's, and 0 of the 6",
            "pass a function: optimizer=lambda parameters",
        ),
        (
            {"optimizer": over(lambda model: [*model.parameters(), *nn.Linear(2, 2).parameters()])},
            "8 parameters, 2 of them not the model's",
        ),
        (
            {"optimizer": over(lambda model: model[0].requires_grad_(False).parameters())},
            "0 of the 4 that the model trains",
        ),
        (
            {"optimizer": in_a_list(torch.optim.SGD, 0, 1, 4, 0)},
            "2 parameters are in more than one of the 4 optimizers",
        ),
        *(({"optimizer": over(all_of, kind)}, *says) for kind, says in SEVERAL_OPTIMIZERS.items()),
        *(({"optimizer": in_a_list(kind, 0, 1, 4)}, *says) for kind, says in SEVERAL_OPTIMIZERS.items()),
        # Schedulers.
        ({"scheduler": type("Odd", (), {"step": 3})()}, "has no step() that can be called"),
        ({"scheduler": lr_scheduler.StepLR}, "is no scheduler, nor a function; pass scheduler=lambda"),
        ({"scheduler": lr_scheduler.ReduceLROnPlateau}, "is no scheduler, nor a function"),
        # Evaluations.
        ({"val_loader": [], "metrics": "accuracy"}, "is no metric; pass a callable of (outputs, targets)"),
        ({"val_loader": iter([]), "val_every": 2}, READ_ONCE),
        ({"val_loader": iter([]), "epochs": 2}, READ_ONCE),
        ({"val_loader": iter([]), "epochs": None, "max_steps": 20}, READ_ONCE),
        ({"callbacks": [autoaccum.EarlyStopping()]}, "EarlyStopping needs a val_loader= to evaluate"),
    ],
    "plan": [
        ({"trials": [autoaccum.records.Trial(1, fits=False, peak_bytes=None, elapsed_s=0.1)]}, "one sample"),
    ],
    "Plan": [
        ({"target_batch": 100, "micro_batches": (50, 49)}, "sum to 99, but target_batch=100; autoaccum.plan(100"),
        ({"target_batch": 100, "micro_batches": ()}, "sum to 0, but target_batch=100"),
        ({"target_batch": 100, "micro_batches": (100, 0)}, "each of micro_batches must be at least 1, got 0"),
        ({"target_batch": 100, "micro_batches": (101, -1)}, "at least 1, got -1"),
        ({"target_batch": 100, "micro_batches": (50.0, 50.0)}, "whole number, got 50.0"),
        ({"target_batch": 2, "micro_batches": (True, True)}, "whole number, got True"),
        ({"target_batch": 0, "micro_batches": ()}, "target_batch must be at least 1, got 0"),
        ({"target_batch": 100, "micro_batches": 100}, "micro_batches=100"),
        ({"target_batch": 100, "micro_batches": None}, "micro_batches=None"),
    ],
    "Accumulator": [
        ({"precision": "fp16"}, "precision='fp16' needs scale="),
        ({"closure": lambda part: None, "loss": nn.MSELoss()}, "closure= runs the model", "would have no effect"),
        ({"closure": lambda part: None, "loss_scope": "window"}, "closure= runs the model", "would have no effect"),
    ],
    "Accumulator, Runner": [
        ({"model": nn.Linear(4, 4), "save_memory": "chunked_loss"}, "no layer that makes logits was found"),
        (
            {"model": nn.Linear(4, 4), "save_memory": "checkpoint"},
            "no repeated blocks to compute again, among Linear",
        ),
        ({"model": nn.Linear(4, 4), "save_memory": "checkpoint:3."}, "no module has the name"),
    ],
    "preflight": [
        ({"save_memory": "nope"}, "save_memory='nope' is unknown"),
        ({"save_memory": "offload"}, "there; choose 'checkpoint'"),
        ({"measure": False}, "nothing to report"),
        ({"model": "resnet"}, "must be a torch.nn.Module, or a function"),
        ({"ranks": 5}, "ranks=5: a target batch of 4 has not one sample for each"),
        ({"fsdp": True}, "nothing is sharded over one rank"),
        ({"ranks": 2, "fsdp": "yes"}, "fsdp"),
        *(({"gpus": name}, *several) for name, several in GPUS.items()),
        *(({"gpus": name}, "pass device_memory=") for name in ("", "  ", "abacus")),
        *(({"device_memory": size}, "device_memory=") for size in NO_SIZES),
    ],
}


# --- seen with the first batch ----------------------------------------------------------------------------------------

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(4) % 3
OF_TOKENS = (X[:, None].expand(4, 5, 4), CLASSES[:, None].expand(4, 5))
LENGTHS = torch.tensor([1, 2, 3, 4])
PAIR, MAPPING = (X, torch.ones(4, 3)), {"x": X, "y": torch.ones(4, 3)}


def squares(outputs, targets):
    return (outputs - targets).square().mean()


def of_model(model, batch):
    return squares(model(batch[0]), batch[1])


class WithLengths(nn.Linear):
    def forward(self, inputs, lengths):
        return super().forward(inputs / lengths[:, None])


class Reads(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs.float())


class OfTwo(nn.Linear):
    def forward(self, inputs, mask):
        return super().forward(inputs * mask)


class Detector(nn.Linear):
    def forward(self, images, targets=None):
        found = super().forward(torch.stack(images))
        return list(found) if targets is None else {"loss": sum(map(torch.sum, found))}


def rows_of(batch):
    return [torch.full((2,), one) for one in batch.tolist()]


BOXES = [{"boxes": torch.zeros(1, 4)}, {"boxes": torch.zeros(2, 4)}]
PASSED = "batch is a list of {}, which is passed to the model as one argument"
HOW = ("forward=lambda model, batch: model({})", "loss=lambda outputs, batch: criterion(outputs, {})")
IN_A_LIST = ("loss=lambda outputs, targets: {", "in the list lambda model, batch: ")
CALLED_WITH = "losses of a list are called with (model, batch), and "
COMPLEX = ("'loss' is a complex number", "loss.abs()")
NO_GRADIENT = ("has no gradient, as counts and comparisons have none", "by name beside it")
SCALES = [lambda loss: None, lambda loss: loss.item(), lambda loss: loss.detach(), lambda loss: loss * torch.ones(2)]


def as_one_argument(model, tensors, inputs, targets):
    """Rows of a batch that is no pair, for a model that takes another; with a loss and without."""
    how = (HOW[0].format(inputs), HOW[1].format(targets))
    batch = list(tensors)
    return [
        ({"model": model, "batch": batch, "loss": loss}, PASSED.format(len(batch)), *how)
        for loss in (None, nn.CrossEntropyLoss())
    ]


def no_loss(classes, targets, *says):
    return {"model": nn.Linear(4, classes), "batch": (X, targets)}, *says


WITH_DATA = {
    "fit": [
        # Batches.
        (
            {"loader": [(X[:3], CLASSES[:3])], "drop_last": True},
            "less than target_batch=4 samples, which drop_last=True",
        ),
        ({"batch": {"text": "a"}}, "a batch of type dict holds no tensor"),
        ({"loader": [None]}, "a batch of type NoneType holds no tensor"),
        ({"batch": torch.tensor(1.0)}, "a batch of type Tensor holds no tensor with samples"),
        ({"batch": {"x": X, "y": torch.zeros(5)}}, "x: (4, 4), y: (5,)"),
        ({"batch": (X.to_sparse(), CLASSES)}, "a batch holds a sparse_coo tensor"),
        ({"batch": (X, SimpleNamespace(boxes=X))}, "a batch holds a SimpleNamespace with tensors"),
        ({"batch": (nn.utils.rnn.pack_sequence([X]), CLASSES)}, "a batch holds a PackedSequence"),
        (
            {"batch": X, "loss": squares, "loss_scope": "window", "split": autoaccum.Along(1)},
            "loss_scope='window'",
            "split=Along(1)",
        ),
        # What the loss returns.
        ({"loss": lambda x, y: ce(x, y).detach()}, "'loss' has no gradient", ".detach()"),
        ({"loss": lambda x, y: ce(x, y).item()}, "'loss' is a float", "no .item()"),
        ({"loss": lambda x, y: None}, "'loss' is a NoneType", "return a scalar tensor"),
        (
            {"loss": lambda x, y: ce(x, y) * math.nan},
            "not finite from the start (loss=nan)",
            "look for NaN in the inputs",
        ),
        ({"loss": lambda x, y: ce(x, y) - torch.zeros(()).log()}, "not finite from the start (loss=inf)", "log(0)"),
        ({"loss": lambda x, y: x.square()}, "shape (", ", 3)", "per-sample losses, or a (sum, weight) pair"),
        ({"loss": lambda x, y: x.square().mean(1)[1:]}, "shape (", "samples; return a scalar"),
        ({"loss": lambda x, y: (x.sum(), torch.zeros(()))}, "does not exist; leave such samples out"),
        ({"loss": lambda x, y: torch.fft.fft(x).mean()}, *COMPLEX),
        ({"loss": lambda x, y: torch.fft.fft(x).mean(1)}, *COMPLEX),
        ({"loss": lambda x, y: (torch.fft.fft(x).sum(), x.numel())}, *COMPLEX),
        ({"loss": lambda outputs, targets: outputs.argmax(1) != targets}, *NO_GRADIENT),
        ({"loss": lambda _, targets: targets}, *NO_GRADIENT),
        # Shapes.
        no_loss(1, torch.zeros(4), "outputs have shape (4, 1) and the targets (4,), which torch would broadcast"),
        no_loss(3, torch.zeros(4, 1), "outputs have shape (4, 3) and the targets (4, 1)"),
        no_loss(1, CLASSES, "outputs of shape (4, 1) and whole-number targets of shape (4,)"),
        no_loss(3, torch.zeros(4, 3).long(), "outputs of shape (4, 3) and whole-number targets of shape (4, 3)"),
        no_loss(3, torch.zeros(4).bool(), "no loss can be chosen for outputs a tensor of shape (4, 3)"),
        *(
            (
                {"model": nn.Linear(4, 1), "batch": (X, torch.rand(4)), "loss": loss},
                f"{type(loss).__name__} compares element by element",
                "(4, 1) and the targets (4,)",
            )
            for loss in (nn.MSELoss(), nn.KLDivLoss())
        ),
        (
            {"model": nn.Linear(4, 3), "batch": OF_TOKENS, "loss": nn.CrossEntropyLoss()},
            "takes outputs of shape (N, C, ...)",
            "movedim(-1, 1)",
        ),
        (
            {"model": Detector(4, 4), "batch": ([*X[:2]], BOXES), "target_batch": 2},
            "forward=lambda model, batch: model(*batch)",
        ),
        # A batch as one argument.
        *as_one_argument(nn.Linear(4, 3), (X, LENGTHS, CLASSES), "batch[0]", "batch[1:]"),
        *as_one_argument(WithLengths(4, 3), (X, LENGTHS, CLASSES), "batch[0], batch[1]", "batch[2]"),
        *as_one_argument(Reads(4, 3), (X, LENGTHS, CLASSES), "batch[0]", "batch[1:]"),
        *as_one_argument(nn.Linear(4, 4), (X,), "batch[0]", "batch[0]"),
        # Schedulers of functions, and evaluations.
        ({"scheduler": lambda _: None}, "scheduler=None has no step() that can be called"),
        ({"scheduler": lambda optimizer: optimizer.param_groups}, "has no step() that can be called"),
        ({"scheduler": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)}, "pass val_loader="),
        (
            {"val_loader": InWorld(lambda world: world.loader), "val_every": 1},
            "val_loader= is the loader that the training is reading",
        ),
    ],
    "step": [
        ({"loss": [squares, functional.l1_loss]}, CALLED_WITH + "squares failed with them (unsupported op", *IN_A_LIST),
        ({"loss": [nn.MSELoss()]}, CALLED_WITH + "MSELoss failed with them (", *IN_A_LIST),
        ({"loss": [lambda a, b: (a - b).mean()]}, CALLED_WITH + "<lambda> failed with them (unsupported", *IN_A_LIST),
        ({"loss": [lambda a, b: b.size()]}, "<lambda> failed with them ('tuple' object has no attribute", *IN_A_LIST),
        ({"loss": [lambda a, b: functional.mse_loss(a, b) / 2]}, "<lambda> failed with them (", *IN_A_LIST),
        (
            {"model": OfTwo(4, 3), "batch": ((X, X), CLASSES), "loss": ce},
            "OfTwo.forward takes (inputs, mask)",
            "pass forward=lambda model, batch: model(*batch[0])",
        ),
        *(
            ({"batch": [one] * 2}, "autoaccum.Window([first, second])", "tuple (inputs, targets)")
            for one in ((X, CLASSES), {"a": X}, [X, CLASSES])
        ),
    ],
    "fit, step, evaluate, backward": [
        *(
            (
                {"batch": PAIR, "loss": loss},
                "a loss is called with (outputs, targets), and ",
                "pass a loss of (model, batch) in a list: loss=[",
            )
            for loss in (of_model, lambda a, b: a(b[0]))
        ),
        (
            {"batch": MAPPING, "loss": squares},
            "a batch is a mapping of 'x', 'y', whose entries go to the model by name",
            "Sequential.forward takes (input)",
        ),
    ],
    "backward": [
        ({"batch": InWorld(lambda world: world.model(X).sum()), "loss": ce}, "backward takes the batch"),
        ({"closure": lambda part: None}, "loss"),
        ({"closure": lambda part: part[0].mean()}, "no gradient"),
        ({"closure": lambda part: "a loss"}, "loss"),
        *(({"scale": scale, "loss": ce}, "scale= returned") for scale in SCALES),
    ],
    "batched": [
        ({"function": torch.mean}, "one row for each of them", "join="),
        ({"function": lambda batch: torch.zeros(1, int(batch[0]) + 2), "micro_batch": 1}, "(1, 2), (1, 3)", "join="),
        ({"function": rows_of, "micro_batch": 2}, "for 2 samples", "join="),
        ({"function": lambda batch: {"masks": rows_of(batch)}, "micro_batch": 2}, "for 2 samples", "join="),
    ],
}


def cases():
    return [
        Case(way, WAYS[way], change, (), tuple(says), is_before_data=rows is BEFORE_DATA)
        for rows in (BEFORE_DATA, WITH_DATA)
        for ways, listed in rows.items()
        for way in ways.split(", ")
        for change, *says in listed
    ]
