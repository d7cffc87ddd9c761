"""What comes of a form of a loss: its training by autoaccum beside a plain loop over whole batches in float64."""

import copy
import itertools
import math
import re
import warnings
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_map

import autoaccum
from support.models.small import assert_bitwise, state_of

REMEDIES = re.compile(r"division by 0|loss_reduction|\(sum, weight\)|loss_scope|NaN")


def sgd(form, model):
    return torch.optim.SGD(model.parameters(), lr=form.lr, momentum=0.9)


def converted(batch, dtype):
    """A copy of a batch with its real numbers in this type; a tensor that is there twice stays one."""
    made = {}

    def of(value):
        if isinstance(value, dict):
            return {name: of(each) for name, each in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(map(of, value))
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = value.to(dtype, copy=True) if value.is_floating_point() else value.clone()
        return made[id(value)]

    return of(batch)


def total(raw):
    """The loss that an author means by what his function returns."""
    if isinstance(raw, dict):
        return total(raw["loss"]) if "loss" in raw else sum(total(one) for one in raw.values() if has_graph(one))
    return raw[0].sum() / raw[1] if isinstance(raw, tuple) else raw.mean()


def has_graph(raw):
    return isinstance(raw, torch.Tensor) and raw.requires_grad if not isinstance(raw, tuple) else raw[0].requires_grad


def by_name(raw):
    """What is reported of each entry of a mapping."""
    named = raw if isinstance(raw, dict) else {}
    return {name: one if isinstance(one, float) else total(one).item() for name, one in named.items()}


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
        """Return the loss, and what is reported by name."""
        self.optimizer.zero_grad()
        raw = self.form.raw(self.model, converted(batch, torch.float64))
        loss = total(raw)
        loss.backward()
        self.optimizer.step()
        return loss.item(), by_name(raw)

    def distance(self, model):
        """How far a model is from this one's, relative to how far this one came."""
        here = self.vector(self.model)
        off, moved = (self.vector(model) - here).norm(), (here - self.start).norm()
        return float(off / moved) if off else 0.0


# --- ways to train, each a function of a form, a model and its optimizer ----------------------------------------------
# They return a function of a number of batches that trains on them and returns the reports and the warnings in them.


def by_runner(form, model, optimizer, **more):
    plan = autoaccum.Plan(sum(form.cut), form.cut)
    runner = autoaccum.Runner(model, optimizer, plan, **arguments(form), **more)

    def train(batches):
        report = runner.step(*batches)
        return [report], report.warnings

    return train


def arguments(form):
    return {
        "forward": form.forward,
        "loss": form.loss,
        "precision": form.precision,
        "device": "cpu",
        **form.options,
    }


def by_split(form, model, optimizer):
    """Windows are lists of samples, which a split joins."""
    split = autoaccum.ListOfSamples(lambda rows: {name: torch.stack([row[name] for row in rows]) for name in rows[0]})
    train = by_runner(form, model, optimizer, split=split)
    return lambda batches: train(
        [[{name: one[row] for name, one in batch.items()} for row in range(sum(form.cut))] for batch in batches]
    )


def by_accumulator(form, model, optimizer):
    scaler = torch.amp.GradScaler("cpu", enabled=form.precision == "fp16")
    accumulator = autoaccum.Accumulator(
        model,
        closure=lambda batch: form.raw(model, batch),
        micro_batch=max(form.cut),
        device="cpu",
        precision=form.precision,
        scale=scaler if scaler.is_enabled() else None,
        **form.options,
    )

    def train(batches):
        report = accumulator.backward(*batches)
        scaler.step(optimizer)
        scaler.update()
        return [report], report.warnings

    return train


def by_fit(form, model, optimizer):
    options = {"optimizer": optimizer, "micro_batch": max(form.cut), "progress": False}

    def train(batches):
        result = autoaccum.fit(model, batches, sum(form.cut), **options, **arguments(form))
        return result.history, result.warnings

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
        return [SimpleNamespace(loss=float(sum(losses)), losses={})], ()

    return train


# --- what comes of it -------------------------------------------------------------------------------------------------


def outcome(form, way, seed=0, at_once=1):
    """Train on a form's windows, so many `at_once`; return what `Form.allowed` calls it, or "wrong by ...".

    What is said must be what the form says.
    """
    windows = form.windows(seed) if callable(form.windows) else form.windows
    model = form.model().to(form.dtype)
    plain, optimizer = PlainLoop(form, model), sgd(form, model)
    if form.fits:
        model.register_forward_pre_hook(lambda *given: lack_memory(form.fits, *given), with_kwargs=True)
    train = told_at = wrong_at = wrong_by = None
    for number in range(0, len(windows), at_once):
        batches = [form.batch(window) for window in windows[number : number + at_once]]
        optimizer.zero_grad()
        before = state_of(model), copy.deepcopy(optimizer.state_dict())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                train = train or way(form, model, optimizer)
                reports, said = train([converted(batch, form.dtype) for batch in batches])
            except autoaccum.InvalidInputError as error:
                assert_bitwise((state_of(model), optimizer.state_dict()), before)
                assert_refusal(form, str(error))
                if wrong_at is not None:
                    return _by_when(number if told_at is None else told_at, wrong_at, wrong_by)
                return "stopped" if number else "refused"
            expected = [plain.step(converted(batch, torch.float64)) for batch in batches]
        said = {*said, *(str(each.message) for each in caught if each.category is autoaccum.LossWarning)}
        assert all(re.search(form.said, one) for one in said), said
        told_at = number if told_at is None and said else told_at
        off = max(_off(form, *pair) for pair in zip(reports, expected, strict=True))
        distance = plain.distance(model)
        if wrong_at is None and not (distance <= form.tolerance and off <= form.tolerance):
            wrong_at, wrong_by = number, f"wrong by {distance:.1%}, the loss by {off:.1%}, in window {number + 1}"
    if wrong_at is None:
        return "exact" if told_at is None else "doubted"
    return wrong_by if told_at is None else _by_when(told_at, wrong_at, wrong_by)


def assert_refusal(form, text):
    """Check that a refusal says what the form says, and what to do."""
    print(text)  # noqa: T201 - shown where a test fails
    assert REMEDIES.search(text), f"names no remedy: {text}"
    assert re.search(form.said, text), text


def lack_memory(fits, _, inputs, named):
    if len([*inputs, *named.values()][0]) > fits:
        raise torch.OutOfMemoryError("told to")


def _off(form, report, expected):
    """How far the numbers of a report are from those of the plain loop, relative to these."""
    loss, named = expected
    if form.mixes and math.isfinite(report.loss):
        return 0.0
    pairs = [(report.loss, loss), *((found, named[name]) for name, found in report.losses.items() if name in named)]
    return max(abs(found - one) / max(abs(one), 1e-3) for found, one in pairs)


def _by_when(told_at, wrong_at, wrong_by):
    if told_at <= wrong_at:
        return "warned"
    return "late" if told_at == wrong_at + 1 else wrong_by
