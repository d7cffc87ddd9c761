"""Compares what was seen of the splits of a batch, and says what is wrong with those that differ. Runs nothing."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._arguments import listed
from autoaccum._records import SplitCheck
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# The relative difference that rounding explains. In float32, the gradient of a whole batch is itself up to 7e-5 from
# that in float64 (docs/dev/design.md); the others keep 8, 11, 11 and 53 bits.
_TOLERANCES = {"torch.bfloat16": 5e-2, "torch.float16": 1e-2, "tf32": 1e-2, "torch.float64": 1e-7}
_OF_FLOAT32 = 3e-4
# Of a single module, rounding may be ten times as large, and a tenth of this share of the whole.
_OF_MODULE, _OF_WHOLE = 10.0, 0.1
# Splits may differ by this many times as much as two equal runs do, which may differ by so much.
_NOISES, _MOST_NOISE = 3.0, 0.3
# How near a ratio is to a number that explains it.
_NEAR = 1e-2
_BETWEEN = {
    "cleared": "gradients are cleared inside the window: only its last micro-batches count",
    "clipped": "gradients are clipped between micro-batches, not once before the step",
    "changed": "gradients are scaled, unscaled or changed between micro-batches, not once before the step",
}
Ranks = list[dict[str, Any]]


class _Step:
    """A step of one optimizer, as its ranks saw it, one after the other."""

    def __init__(self, seen: Sequence[dict[str, Any]]) -> None:
        self.seen = seen  # the windows, by rank
        names, rows = zip(*(row for one in seen for row in one["gradients"]), strict=True)
        self.owners = [name.rpartition(".")[0] or name for name in names]  # the module of each parameter
        # Projections, zeros without a gradient: (parameters, projections).
        self.gradient = torch.tensor([row or [0.0] * 8 for row in rows], dtype=torch.float64)
        self.lacking = {owner for owner, row in zip(self.owners, rows, strict=True) if row is None}

    def all(self, what: str) -> list[Any]:
        return [value for one in self.seen for value in one[what]]


class Run:
    """A run of one split; `steps` are those of each optimizer."""

    def __init__(self, micro_batch: int, accum_steps: int, ranks: Ranks) -> None:
        self.micro_batch, self.accum_steps = micro_batch, accum_steps
        self.name = f"{micro_batch} x {accum_steps}"
        self.optimizers = [one["name"] for one in ranks[0]["optimizers"]]
        by_rank = [[one["steps"] for one in rank["optimizers"]] for rank in ranks]
        self.steps = [[_Step(seen) for seen in zip(*steps, strict=False)] for steps in zip(*by_rank, strict=False)]
        self.batchnorm = sorted(set(chain.from_iterable(rank["batchnorm"] for rank in ranks)))
        self.tolerance = max(_TOLERANCES.get(kind, _OF_FLOAT32) for rank in ranks for kind in rank["types"])
        first = next(steps[0] for steps in self.steps if steps)
        self.elements, self.backwards = first.all("elements"), len(first.all("parts"))
        for number, step in enumerate(chain.from_iterable(self.steps)):
            bad = [owner for owner, row in zip(step.owners, step.gradient, strict=True) if not row.isfinite().all()]
            if bad:
                raise InvalidInputError(
                    f"gradients are NaN or infinite ({self.name}, step {number + 1}, "
                    f"{listed(list(dict.fromkeys(bad)))}); mend that first"
                )

    def pairs(self, other: Run, place: int) -> Iterator[tuple[_Step, _Step]]:
        """Return the steps of one optimizer, here and there."""
        theirs = other.steps[place] if place < len(other.steps) else []
        for step, their in zip(self.steps[place], theirs, strict=False):
            if step.owners != their.owners:
                raise InvalidInputError(f"the optimizer has other parameters in {other.name} than in {self.name}")
            if step.seen[0]["skipped"] != their.seen[0]["skipped"]:
                raise InvalidInputError(
                    f"the scaler skips other optimizer steps in {other.name} than in {self.name}, for infinite "
                    "gradients; begin with a smaller scale"
                )
            yield step, their


def check_noise(whole: Run, again: Run) -> list[list[float]]:
    """Return by how much two equal runs differ, for each optimizer in each step; raise if that is too much."""
    if not any(step.gradient.any() for step in chain.from_iterable(whole.steps)):
        raise InvalidInputError(f"every gradient is 0 ({whole.name}); perhaps the loop clears them before it steps")
    noises = [[_off(b.gradient, a.gradient) for a, b in whole.pairs(again, n)] for n in range(len(whole.steps))]
    noise = max(steps[0] for steps in noises if steps)
    if noise > _MOST_NOISE:
        raise InvalidInputError(
            f"two equal runs ({whole.name}) differ by {noise:.0%}, too much to compare splits; fix the seed of the "
            "weights and the order of the samples; a model that draws random numbers by itself cannot be compared"
        )
    return noises


def compare(
    whole: Run, again: Run, noises: list[list[float]], splits: Sequence[Run], world_size: int
) -> tuple[list[SplitCheck], float, tuple[str, ...]]:
    """Return what each split shows, by how much two equal runs differ, and what else is to be said."""
    places, noise = range(len(whole.steps)), max(steps[0] for steps in noises if steps)
    notes = [f"{whole.optimizers[place]} made no step, and was not compared" for place in places if not noises[place]]
    if noise > whole.tolerance:
        notes.append(f"two equal runs differ by {noise:.1e}, for randomness in the model; that counts as noise")
    if whole.batchnorm:
        notes.append(
            f"{listed(whole.batchnorm)} in training mode depends on the micro-batch, whatever the accumulation; it was "
            "compared with its running statistics"
        )
    checks = [SplitCheck(run.micro_batch, run.accum_steps, True, 0.0) for run in splits]
    for number, run in enumerate(splits):
        for place in places:
            pairs = zip(whole.pairs(run, place), whole.pairs(again, place), noises[place], strict=False)
            for step, ((a, b), (_, equal), of_step) in enumerate(pairs):
                if of_step > _MOST_NOISE:
                    notes.append(f"from step {step + 1} on, rounding changes too much to compare")
                    break
                if checks[number].is_right:
                    found, diagnosis = _Comparison(whole, run, a, b, equal, world_size).judge()
                    of = [whole.optimizers[place]] if len(places) > 1 else []
                    said = ": ".join([*of, *([f"step {step + 1}"] if step else []), diagnosis]) if diagnosis else ""
                    most = found if diagnosis else max(found, checks[number].difference)
                    checks[number] = SplitCheck(run.micro_batch, run.accum_steps, not said, most, said)
    return checks, noise, tuple(dict.fromkeys(notes))


def _off(one: torch.Tensor, of: torch.Tensor) -> float:
    """Return the norm of the difference, relative to that of a gradient."""
    difference, size = float((one - of).norm()), float(of.norm())
    return difference / size if size else 1.0 if difference else 0.0


class _Comparison:
    """The same step of the whole batch (a), of a split (b), and of the second run of the whole batch (again)."""

    def __init__(self, whole: Run, split: Run, a: _Step, b: _Step, again: _Step, world_size: int) -> None:
        self._a, self._b, self._again, self._world_size = a, b, again, world_size
        self._steps = whole.accum_steps, split.accum_steps
        self._parts = split.accum_steps / whole.accum_steps
        self._base = max(whole.tolerance, split.tolerance)
        self._tolerance = max(self._base, _NOISES * _off(again.gradient, a.gradient))

    def judge(self) -> tuple[float, str]:
        """Return the relative difference, and what is wrong; "" if nothing is."""
        difference, off = _off(self._b.gradient, self._a.gradient), self._modules_off()
        if difference <= self._tolerance and not off:
            return difference, self._clipped_by_hand()
        diagnoses: tuple[Callable[[], str], ...] = (
            self._other_size,
            self._ranks_apart,
            self._scaled,
            partial(self._of_modules, off),
            self._changed_between,
            self._mean_of_means,
            self._other_samples,
        )
        unknown = (
            "gradients of the same samples differ; perhaps the loss compares samples with each other, or a term is "
            "added in each micro-batch"
        )
        return difference, next(filter(None, (one() for one in diagnoses)), unknown)

    def _clipped_by_hand(self) -> str:
        """Gradients are perhaps equal because the loop gave them equal norms after the last backward pass."""
        for before, after in zip(self._a.seen, self._b.seen, strict=False):
            factor, its = before["factor"], after["factor"]
            if factor and its and abs(factor - 1) > self._base and abs(factor / its - 1) > self._tolerance:
                is_mean = all(abs(one * n - 1) < _NEAR for one, n in zip((factor, its), self._steps, strict=True))
                if not is_mean:  # it divides after the last backward pass
                    return f"perhaps clipped to equal norms; before that, {self._times(factor / its)}"
        return ""

    def _other_size(self) -> str:
        """The step takes more samples or fewer; that the others are the same tells it from another order."""
        of, samples = Counter(self._a.all("samples")), Counter(self._b.all("samples"))
        is_one = len(self._b.seen[0]["parts"]) <= 1 < self._parts  # padding may hide that they are the same
        if samples < of or (is_one and 0 < samples.total() < of.total()):
            return f"the optimizer steps inside the window, after {samples.total()} of {of.total()} samples"
        if set(samples) > set(of):  # the same ones again are of a check, or of a recomputation
            return f"the optimizer steps late, after {samples.total()} samples, not {of.total()}"
        return ""

    def _ranks_apart(self) -> str:
        def alike(step: _Step) -> bool:
            ranks = step.gradient.chunk(self._world_size)
            return all(_off(one, ranks[0]) <= self._tolerance for one in ranks if one.shape == ranks[0].shape)

        if alike(self._a) and not alike(self._b):
            return "ranks step with gradients of their own: the last backward pass is not reduced, as in no_sync"
        return ""

    def _scaled(self) -> str:
        a, b = self._a.gradient, self._b.gradient
        ratio = float((a * b).sum() / (a * a).sum()) if a.any() else 0.0
        return self._times(ratio) if ratio > 0 and _off(b, ratio * a) <= self._tolerance * ratio else ""

    def _times(self, ratio: float) -> str:
        parts, ranks = self._parts, self._world_size
        reasons = {
            "the loss is not divided by the accumulation steps": parts,
            "the loss is divided by the accumulation steps twice, or once where it is a sum": 1 / parts,
            f"as many as there are ranks ({ranks})": ranks,
            f"one in as many as there are ranks ({ranks})": 1 / ranks,
        }
        near = max(self._tolerance, _NEAR)
        made, whole_made = (len(one.seen[0]["parts"]) for one in (self._b, self._a))
        if made * self._steps[0] < whole_made * self._steps[1]:
            told = f"the window has {made} of {self._steps[1]} micro-batches and is divided by {self._steps[1]}"
            reasons = {told: made * self._steps[0] / (whole_made * self._steps[1])} | reasons
        fitting = [text for text, value in reasons.items() if value != 1 and abs(ratio / value - 1) < near]
        return f"every gradient is {ratio:.4g} times as large{': ' if fitting else ''}{', or '.join(fitting)}"

    def _changed_between(self) -> str:
        between = self._b.all("between")
        return next((text for what, text in _BETWEEN.items() if what in between), "")

    def _mean_of_means(self) -> str:
        """Solve for the weights by which the parts that micro-batches added would be the whole gradient."""
        counts = {len(one["parts"]) for one in self._b.seen}
        if len(counts) > 1 or max(counts) <= 1 or self._b.gradient.numel() < 2 * max(counts):
            return ""
        parts = torch.cat([torch.tensor(one["parts"], dtype=torch.float64) for one in self._b.seen], dim=1)
        weights = torch.linalg.lstsq(parts.flatten(1).T, self._a.gradient.reshape(-1, 1), driver="gelsd").solution
        total = (parts * weights.reshape(-1, 1, 1)).sum(0)
        share = weights.flatten() / weights.mean()
        differ = float((share - 1).abs().max()) > _NEAR and float(share.min()) > _NEAR
        if _off(total, self._a.gradient) > self._tolerance or not differ:
            return ""
        labels = torch.tensor(self._b.seen[0]["labels"], dtype=torch.float64)
        is_by_labels = labels.shape == share.shape and float((labels / labels.mean() - share).abs().max()) < 10 * _NEAR
        return (
            f"a mean of means: micro-batches count alike, and should count {share.min():.2f} to {share.max():.2f} "
            f"times as much{', by their labels' if is_by_labels else ''}"
        )

    def _modules_off(self) -> dict[str, float]:
        """Return how large the gradient of each module is that differs, relative to the whole batch's; worst first."""
        off = {}
        for owner in dict.fromkeys(self._a.owners):
            places = [place for place, name in enumerate(self._a.owners) if name == owner]
            a, b, again = (one.gradient[places] for one in (self._a, self._b, self._again))
            rounding = self._base * float(_OF_MODULE * a.norm() + _OF_WHOLE * self._a.gradient.norm())
            difference, size = float((b - a).norm()), float(a.norm())
            if difference > rounding + _OF_MODULE * float((again - a).norm()):
                off[owner] = (difference, float(b.norm()) / size if size else math.inf)
        return {owner: ratio for owner, (_, ratio) in sorted(off.items(), key=lambda one: -one[1][0])}

    def _of_modules(self, off: dict[str, float]) -> str:
        right = [place for place, owner in enumerate(self._a.owners) if owner not in off]
        a, b = self._a.gradient[right], self._b.gradient[right]
        if not off or a.norm() <= self._base * self._a.gradient.norm() or _off(b, a) > self._tolerance:
            return ""
        lacking = self._b.lacking - self._a.lacking
        ratios = [f"{one} ({'no gradient' if one in lacking else f'{off[one]:.3g} times as large'})" for one in off]
        return f"only some modules are off: {listed(ratios)}"

    def _other_samples(self) -> str:
        if sorted(self._a.all("samples")) == sorted(self._b.all("samples")):
            return ""
        return (
            "the splits saw other samples, or noise, so nothing can be said of the accumulation; shuffle with a fixed "
            "seed, whatever the batch size, or not at all"
        )
