"""What comes of a form of a loss: its training by autoaccum beside a plain loop over whole batches in float64."""

import copy
import itertools
import math
import re
import warnings

import torch
from torch.utils._pytree import tree_map

import autoaccum
from support.losses.forms import WINDOWS
from support.models.small import assert_bitwise, state_of

# A warning is one of this category; until there is it, what a report lists counts alone.
LOSS_WARNING = getattr(autoaccum.errors, "LossWarning", ())
REMEDIES = re.compile(r"division by 0|loss_reduction|\(sum, weight\)|loss_scope")


def sgd(form, model):
    return torch.optim.SGD(model.parameters(), lr=form.lr, momentum=0.9)


def converted(batch, dtype):
    """A copy of a batch with its real numbers in this type; a tensor that is there twice stays one."""
    made = {}

    def of(value):
        if isinstance(value, dict):
            return {name: of(each) for name, each in value.items()}
        if isinstance(value, tuple):
            return tuple(map(of, value))
        if id(value) not in made:
            made[id(value)] = value.to(dtype) if value.is_floating_point() else value.clone()
        return made[id(value)]

    return of(batch)


def total(raw):
    """The loss that an author means by what his function returns."""
    if isinstance(raw, dict):
        return sum(map(total, raw.values()))
    return raw[0].sum() / raw[1] if isinstance(raw, tuple) else raw.mean()


class PlainLoop:
    """Trains on whole batches, without autoaccum."""

    def __init__(self, form, model):
        self.form, self.model = form, copy.deepcopy(model).double()
        self.model.replays = True  # of random numbers
        self.start = self.vector(self.model)
        self.optimizer = sgd(form, self.model)

    @staticmethod
    def vector(model):
        return torch.cat([p.detach().double().flatten() for p in model.parameters()])

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = total(self.form.raw(self.model, converted(batch, torch.float64)))
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def distance(self, model):
        """How far a model is from this one's, relative to how far this one came."""
        here = self.vector(self.model)
        off, moved = (self.vector(model) - here).norm(), (here - self.start).norm()
        return float(off / moved) if off else 0.0


# --- ways to train, each a function of a form, a model and its optimizer ----------------------------------------------
# They return a function of a number of batches that trains on them and returns the losses and the warnings reported.


def by_runner(form, model, optimizer):
    options = {"forward": form.forward, "loss": form.loss, "precision": form.precision}
    runner = autoaccum.Runner(model, optimizer, autoaccum.Plan(sum(form.cut), form.cut), device="cpu", **options)

    def train(batches):
        report = runner.step(*batches)
        return [report.loss], getattr(report, "warnings", ())

    return train


def by_accumulator(form, model, optimizer):
    scaler = torch.amp.GradScaler("cpu", enabled=form.precision == "fp16")
    accumulator = autoaccum.Accumulator(
        model,
        closure=lambda batch: form.raw(model, batch),
        micro_batch=max(form.cut),
        device="cpu",
        precision=form.precision,
        scale=scaler if scaler.is_enabled() else None,
    )

    def train(batches):
        report = accumulator.backward(*batches)
        scaler.step(optimizer)
        scaler.update()
        return [report.loss], getattr(report, "warnings", ())

    return train


def by_fit(form, model, optimizer):
    options = {"forward": form.forward, "loss": form.loss, "precision": form.precision}

    def train(batches):
        result = autoaccum.fit(
            model,
            batches,
            sum(form.cut),
            optimizer=optimizer,
            micro_batch=max(form.cut),
            device="cpu",
            progress=False,
            **options,
        )
        return [report.loss for report in result.history], getattr(result, "warnings", ())

    return train


def by_samples(form, model, optimizer):
    """As frameworks do it that know nothing of the loss."""

    def train(batches):
        losses = []
        for start, size in zip([0, *itertools.accumulate(form.cut)], form.cut, strict=False):
            part = tree_map(lambda tensor: tensor[start : start + size], batches[0])  # noqa: B023
            losses.append(total(form.raw(model, part)) * size / sum(form.cut))
            losses[-1].backward()
        optimizer.step()
        return [float(sum(losses))], ()

    return train


# --- what comes of it -------------------------------------------------------------------------------------------------


def outcome(form, way, windows=WINDOWS, at_once=1):
    """Train on these windows, so many `at_once`; return what `loss_forms.Form.allowed` calls it, or "wrong by ...".

    A refused window must leave all as it was, and its error must name what to do.
    """
    model = form.model().to(form.dtype)
    plain, optimizer = PlainLoop(form, model), sgd(form, model)
    train = told_at = wrong_at = wrong_by = refusal = None
    for number in range(0, len(windows), at_once):
        batches = [form.batch(window) for window in windows[number : number + at_once]]
        optimizer.zero_grad()
        before = state_of(model), copy.deepcopy(optimizer.state_dict())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                train = train or way(form, model, optimizer)
                losses, reported = train([converted(batch, form.dtype) for batch in batches])
            except autoaccum.InvalidInputError as error:
                refusal = str(error)
                print(refusal)  # noqa: T201 - shown where a test fails
            expected = [plain.step(converted(batch, torch.float64)) for batch in batches]
        if refusal is not None:
            assert_bitwise((state_of(model), optimizer.state_dict()), before)
            assert REMEDIES.search(refusal), f"names no remedy: {refusal}"
            if number == 0:
                return "refused"
            return (
                "stopped" if wrong_at is None else _by_when(number if told_at is None else told_at, wrong_at, wrong_by)
            )
        if told_at is None and (reported or any(issubclass(each.category, LOSS_WARNING) for each in caught)):
            told_at = number
        is_close = form.mixes and all(map(math.isfinite, losses))
        off = 0.0 if is_close else max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, expected, strict=True))
        distance = plain.distance(model)
        if wrong_at is None and not (distance <= form.tolerance and off <= form.tolerance):
            wrong_at, wrong_by = number, f"wrong by {distance:.1%}, the loss by {off:.1%}, in window {number + 1}"
    if told_at is None:
        return wrong_by or "exact"
    return "warned" if wrong_at is None else _by_when(told_at, wrong_at, wrong_by)


def _by_when(told_at, wrong_at, wrong_by):
    if told_at <= wrong_at:
        return "warned"
    return "late" if told_at == wrong_at + 1 else wrong_by
