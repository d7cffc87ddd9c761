"""Loops with an accumulator that tests run on several ranks, and alone to compare."""

import contextlib
import io

import torch
from torch import nn
from torch.nn import functional

import autoaccum
from support.models.small import Limited
from support.ranks.training import WIDTH, net, of_tokens, texts, vectors

BATCH = 24


def half_of_classes(outputs, targets):
    weights = (targets % 2 == 1).double() + 0.5
    return (functional.cross_entropy(outputs, targets, reduction="none") * weights).sum(), weights.sum()


LOSSES = {
    "module": (nn.CrossEntropyLoss(), vectors),
    "pair": (half_of_classes, vectors),
    "sum": (lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="sum"), vectors),
    "tokens": (of_tokens, texts),
}


def part(samples, rank, size, number):
    """The rank's part of a batch: ranks have unlike numbers of samples."""
    own = samples(BATCH * 4)[number * BATCH : (number + 1) * BATCH]
    bound = [round(BATCH * (at / size) ** 1.5) for at in range(size + 1)]
    return tuple(map(torch.stack, zip(*own[bound[rank] : bound[rank + 1]], strict=True)))


def train(rank, size, *, loss="module", most=(), fails=(), twice=False, frozen_at=None, norm=False, steps=3):
    """Train with SGD; return parameters, losses and events. `most` by rank; `fails` is the ranks whose loss raises."""
    function, samples = LOSSES[loss]
    model = Limited(net(rank, norm=norm), None if size == 1 else dict(most).get(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def failing(outputs, targets):
        if rank in fails:
            raise LookupError("the user's own")
        return function(outputs, targets)

    found = {"losses": [], "oom_events": 0, "samples": []}
    with contextlib.redirect_stderr(io.StringIO()):
        accumulating = autoaccum.Accumulator(
            model, loss=failing if fails else function, device="cpu", precision="fp32", micro_batch=5
        )
        for number in range(steps):
            if number == frozen_at:
                model.body[0].requires_grad_(requires_grad=False)
            for _ in range(2 if twice else 1):
                report = accumulating.backward(part(samples, rank, size, number))
            found["losses"].append(report.loss)
            found["samples"].append(report.samples)
            found["oom_events"] += report.oom_events
            optimizer.step()
            optimizer.zero_grad()
    found["parameters"] = [parameter.detach() for parameter in model.parameters()]
    found["buffers"] = list(model.buffers())
    return found


def wrapped(rank, size, is_compiled):
    """Return what is said of a closure that calls a model in DistributedDataParallel, and of one compiled around it."""
    model = torch.nn.parallel.DistributedDataParallel(net(rank))
    if is_compiled:
        model = torch.compile(model, backend="eager")
    loader = [(torch.zeros(2, WIDTH, dtype=torch.float64), torch.zeros(2, dtype=torch.long))]
    said = []
    try:
        autoaccum.Accumulator(
            model, closure=lambda part: functional.cross_entropy(model(part[0]), part[1]), device="cpu"
        )
    except autoaccum.InvalidInputError as error:
        said.append(str(error))
    try:
        autoaccum.fit(model, loader, 2, loss=functional.cross_entropy, device="cpu", progress=False)
    except autoaccum.InvalidInputError as error:
        said.append(str(error))
    return said


def growing(rank, size, loss):
    """Return the gradient of a step with a new layer in its second half; the loss reports more at last, on one rank."""
    model = net(0)
    reports = []

    def reporting(outputs, targets):
        return {"loss": LOSSES[loss][0](outputs, targets), **{name: outputs.detach().sum() for name in reports}}

    accumulating = autoaccum.Accumulator(model, loss=reporting, device="cpu", precision="fp32", micro_batch=5)
    for number in range(6):
        if number == 4:
            torch.manual_seed(1)
            model.append(nn.Linear(4, 4).double())
        if number == 5 and rank == 1:
            reports.append("more")
        accumulating.backward(part(vectors, rank, size, number % 4))
    return [parameter.grad for parameter in model.parameters()]


def unfreezing(rank, size):
    """Return gradients of four batches, before the last two of which the first layer is trained as well."""
    model = net(0)
    model[0].requires_grad_(False)
    accumulating = autoaccum.Accumulator(model, loss=LOSSES["module"][0], device="cpu", precision="fp32", micro_batch=5)
    found = []
    for number in range(4):
        if number == 2:
            model[0].requires_grad_(True)
        model.zero_grad()
        accumulating.backward(part(vectors, rank, size, number))
        found.append([parameter.grad for parameter in model[0].parameters()])
    return found


def divided(rank, size, most=None):
    """Return parameters and losses of two batches whose sums are divided by the tokens of all ranks."""
    model = Limited(net(0), most)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = []

    def loss(outputs, targets):
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum") / tokens[-1]

    accumulating = autoaccum.Accumulator(model, loss=loss, device="cpu", precision="fp32")
    losses = []
    for number in range(2):
        tokens.append(sum(int((part(texts, one, size, number)[1] != -100).sum()) for one in range(size)))
        losses.append(accumulating.backward(part(texts, rank, size, number)).loss)
        optimizer.step()
        optimizer.zero_grad()
    return {"parameters": [parameter.detach() for parameter in model.parameters()], "losses": losses, "buffers": []}
