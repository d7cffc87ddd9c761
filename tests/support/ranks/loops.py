"""Loops with an accumulator that ranks run, with whole models or spread ones, and one process alone to compare."""

import contextlib
import io

import torch
from torch import nn
from torch.nn import functional

import autoaccum
from support.ranks import sharded
from support.ranks.training import net, of_tokens, sgd, texts, vectors

BATCH = 24
GIVEN = {"micro_batch": 5}


def half_of_classes(outputs, targets):
    weights = (targets % 2 == 1).double() + 0.5
    return (functional.cross_entropy(outputs, targets, reduction="none") * weights).sum(), weights.sum()


LOSSES = {
    "module": (nn.CrossEntropyLoss(), vectors),
    "pair": (half_of_classes, vectors),
    "sum": (lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="sum"), vectors),
    "tokens": (of_tokens, texts),
}


def bounds(size):
    """Where the parts of ranks begin and end: they have unlike numbers of samples."""
    return [round(BATCH * (at / size) ** 1.5) for at in range(size + 1)]


def part(samples, rank, size, number):
    """The rank's part of one of four batches."""
    own = samples(BATCH * 4)[number % 4 * BATCH :][:BATCH][slice(*bounds(size)[rank : rank + 2])]
    return tuple(map(torch.stack, zip(*own, strict=True)))


def train(
    rank,
    size,
    *,
    loss="module",
    model=None,
    is_spread=False,
    spreads=sharded.spread,
    batch=None,
    before=None,
    optimizer=sgd,
    steps=3,
    batches=1,
    clip=None,
    scaler=None,
    **options,
):
    """Train with an accumulator; return what it has come to: without an optimizer, gradients for parameters.

    A step is one of so many `batches`. `before` is called with the number and the model before each step's, and `batch`
    returns one in place of `part`.
    """
    function, samples = LOSSES[loss] if isinstance(loss, str) else loss
    model = net(0 if is_spread else rank) if model is None else model  # whole ones begin as that of rank 0
    torch.manual_seed(0)
    model = spreads(model) if is_spread else model
    stepping = None if optimizer is None else optimizer([one for one in model.parameters() if one.requires_grad])
    scaling = None if scaler is None else torch.amp.GradScaler("cpu", init_scale=scaler, growth_interval=2)
    found = {"losses": [], "named losses": [], "oom": 0, "samples": [], "cuts": [], "norms": [], "plans": []}
    found |= {"peaks": [], "evaluations": []}
    given = {"loss": function, "scale": scaling, "device": "cpu", "precision": "fp32"} | options
    with contextlib.redirect_stderr(io.StringIO()):
        with _left_alone_if_refused(model):
            accumulator = autoaccum.Accumulator(model, **given)
        for number in range(steps):
            if before is not None:
                before(number, model)
            for at in range(batches):
                own = (batch or _part_of(samples))(rank, size, number + at)
                with _left_alone_if_refused(model):
                    report = accumulator.backward(own)
                found["plans"].append(accumulator.plan.micro_batch)
            found["losses"].append(report.loss)
            found["named losses"].append(dict(report.losses))
            found["samples"].append(report.samples)
            found["cuts"].append(report.micro_batches)
            found["peaks"].append(report.peak_bytes)
            found["oom"] += report.oom_events
            if scaling is not None:
                scaling.unscale_(stepping)
            if clip is not None:
                found["norms"].append(sharded.whole(nn.utils.clip_grad_norm_(model.parameters(), clip)).item())
            if scaling is not None:
                scaling.step(stepping)
                scaling.update()
            elif stepping is not None:
                stepping.step()
            if stepping is not None:
                stepping.zero_grad()
    kept = [one if stepping else one.grad for one in model.parameters()]
    found["parameters"] = [sharded.whole(one).clone() for one in kept]
    found["buffers"] = [buffer.clone() for buffer in model.buffers()]
    found["scale"] = None if scaling is None else scaling.get_scale()
    return found | {"savings": accumulator.savings, "most": getattr(given["device"], "most", None)}


def _part_of(samples):
    return lambda rank, size, number: part(samples, rank, size, number)


@contextlib.contextmanager
def _left_alone_if_refused(model):
    """What is refused leaves parameters and gradients as they were."""
    before = [(sharded.here(one).clone(), one.grad) for one in model.parameters()]
    try:
        yield
    except autoaccum.InvalidInputError:
        for one, (value, gradient) in zip(model.parameters(), before, strict=True):
            assert torch.equal(sharded.here(one), value)
            assert one.grad is gradient
        raise
