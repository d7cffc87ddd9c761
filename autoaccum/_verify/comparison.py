"""Compares what was seen of the splits of a batch, and says what is wrong with those that differ. Runs nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._arguments import listed
from autoaccum._records import SplitCheck
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

# The relative difference that rounding explains, by the least precise numbers seen. In float32 the gradient of a whole
# batch is itself up to 7e-5 from float64's (docs/dev/design.md); half precision keeps 11 and 8 bits.
_TOLERANCES = {"torch.bfloat16": 5e-2, "torch.float16": 1e-2, "tf32": 1e-2, "torch.float64": 1e-7}
_TOLERANCE = 3e-4  # of float32
# Of a single module, rounding is larger, also by what cancels in the whole.
_OF_MODULE, _OF_WHOLE = 10.0, 0.1
# Two equal runs may differ by this much, and a split by three times as much, before nothing can be said.
_MOST_NOISE, _NOISES = 0.3, 3.0
Ranks = list[dict[str, Any]]


@dataclass(frozen=True)
class _Step:
    """A step of one optimizer, the ranks one after the other.

    Attributes:
        names: Of the parameters.
        gradient: Projections: (parameters, projections); zeros where there is no gradient.
        missing: The parameters without a gradient.
        parts: What each backward pass added; None where ranks differ in their number.
        seen: What each rank saw of its window.
    """

    names: list[str]
    gradient: torch.Tensor
    missing: frozenset[str]
    parts: torch.Tensor | None
    seen: Sequence[dict[str, Any]]

    def total(self, what: str) -> int:
        return sum(sum(one[what]) for one in self.seen)


class Run:
    """What was seen of one run, of its ranks in order."""

    def __init__(self, micro_batch: int, accum_steps: int, ranks: Ranks) -> None:
        self.micro_batch, self.accum_steps, self.ranks = micro_batch, accum_steps, ranks
        self.name = f"{micro_batch} x {accum_steps}"

    def steps(self, place: int) -> list[_Step]:
        """Return the steps of one optimizer."""
        by_rank = [rank["optimizers"][place]["steps"] for rank in self.ranks if place < len(rank["optimizers"])]
        return [_joined(one) for one in zip(*by_rank, strict=False)]

    def passes(self) -> list[list[int]]:
        """Return the rows of each forward pass, and how many backward passes there were, of all first steps."""
        first = [one["steps"][0] for rank in self.ranks for one in rank["optimizers"] if one["steps"]]
        return [[*one["rows"], -len(one["parts"])] for one in first]


def _joined(seen: Sequence[dict[str, Any]]) -> _Step:
    rows = [row for one in seen for row in one["gradients"]]
    gradient = torch.tensor([row[1] or [0.0] * 8 for row in rows], dtype=torch.float64).reshape(len(rows), -1)
    parts = None
    if len({len(one["parts"]) for one in seen}) == 1:
        parts = torch.cat([torch.tensor(one["parts"], dtype=torch.float64) for one in seen], dim=1)
        parts = parts if parts.numel() else None
    missing = frozenset(row[0] for row in rows if row[1] is None)
    return _Step([row[0] for row in rows], gradient, missing, parts, seen)


def compare(
    whole: Run, again: Run, splits: Sequence[Run], world_size: int
) -> tuple[list[SplitCheck], float, list[str]]:
    """Return what each split shows, by how much two equal runs differ, and what else is to be said.

    Raises:
        InvalidInputError: Nothing can be said: gradients are NaN, or two equal runs differ too much.
    """
    notes = []
    found = [(place, one["name"]) for place, one in enumerate(whole.ranks[0]["optimizers"])]
    for place, name in found:
        if not whole.steps(place):
            notes.append(f"optimizer {place + 1} of {len(found)} ({name}) made no step, and was not compared")
    noises = {
        place: [_size(b.gradient - a.gradient, a.gradient) for a, b in _pairs(whole, again, place)]
        for place, _ in found
    }
    for run in (whole, again, *splits):
        _check_finite(run, found)
    noise = max((of_steps[0] for of_steps in noises.values() if of_steps), default=0.0)
    if noise > _MOST_NOISE:
        raise InvalidInputError(
            f"two equal runs ({whole.name}) differ by {noise:.0%}, too much to compare splits; fix the seed of the "
            "weights and the order of the samples"
        )
    if noise > _tolerance(whole):
        notes.append(
            f"two equal runs differ by {noise:.1e}: something other than dropout is random; it counts as noise"
        )
    kinds = sorted({kind for rank in whole.ranks for kind in rank["batchnorm"]})
    if kinds:
        notes.append(
            f"{listed(kinds)} is in training mode: its statistics depend on the micro-batch, whatever the accumulation "
            "does; it was compared with running statistics"
        )
    checks = []
    for split in splits:
        check = None
        for place, name in found:
            of = f"{name} (optimizer {place + 1}): " if len(found) > 1 else ""
            for number, ((a, b), (_, c)) in enumerate(
                zip(_pairs(whole, split, place), _pairs(whole, again, place), strict=False)
            ):
                if noises[place][number] > _MOST_NOISE:
                    notes.append(f"{of}from step {number + 1} on, rounding alone changes gradients too much to compare")
                    break
                difference, diagnosis = _Pair(whole, split, a, b, c, world_size).judge()
                if diagnosis and (check is None or check.is_right):
                    at = f"step {number + 1}: " if number else ""
                    check = SplitCheck(split.micro_batch, split.accum_steps, False, difference, of + at + diagnosis)
                elif check is None or (check.is_right and difference > check.difference):
                    check = SplitCheck(split.micro_batch, split.accum_steps, True, difference, "")
        assert check is not None
        checks.append(check)
    return checks, noise, list(dict.fromkeys(notes))


def _pairs(first: Run, second: Run, place: int) -> list[tuple[_Step, _Step]]:
    pairs = list(zip(first.steps(place), second.steps(place), strict=False))
    for a, b in pairs:
        if a.names != b.names:
            raise InvalidInputError(
                f"the optimizer has other parameters in {second.name} than in {first.name}; the model must not depend "
                "on how the batch is split"
            )
    return pairs


def _check_finite(run: Run, found: list[tuple[int, str]]) -> None:
    for place, _ in found:
        for number, step in enumerate(run.steps(place)):
            bad = [name for name, row in zip(step.names, step.gradient, strict=True) if not bool(row.isfinite().all())]
            if bad:
                raise InvalidInputError(
                    f"gradients of step {number + 1} are NaN or infinite in {run.name} ({listed(bad)}); find out why "
                    "before splits are compared"
                )


def _tolerance(*runs: Run) -> float:
    return max(_TOLERANCES.get(kind, _TOLERANCE) for run in runs for rank in run.ranks for kind in rank["types"])


def _size(difference: torch.Tensor, of: torch.Tensor) -> float:
    """Return the norm of a difference, relative to that of a gradient."""
    norms = float(difference.norm()), float(of.norm())
    return norms[0] / norms[1] if norms[1] else math.inf if norms[0] else 0.0


class _Pair:
    """One optimizer step, of the whole batch and of a split.

    Args:
        whole: The run of the whole batch.
        split: The run of the split.
        a: The step in the former.
        b: The step in the latter.
        again: The step in the second run of the whole batch.
        world_size: Ranks.
    """

    def __init__(self, whole: Run, split: Run, a: _Step, b: _Step, again: _Step, world_size: int) -> None:
        self._a, self._b, self._again, self._world = a, b, again, world_size
        self._parts = split.accum_steps / whole.accum_steps  # how many times as many
        self._accum_steps, self._micro_batch = split.accum_steps, split.micro_batch
        self._target = whole.micro_batch * whole.accum_steps * world_size
        self._base = _tolerance(whole, split)
        self._tolerance = max(self._base, _NOISES * _size(again.gradient - a.gradient, a.gradient))

    def judge(self) -> tuple[float, str]:
        """Return the relative difference, and what is wrong; "" if nothing is."""
        a, b = self._a.gradient, self._b.gradient
        difference = _size(b - a, a)
        off = self._modules_off()
        if difference <= self._tolerance and not off:
            return difference, self._perhaps_clipped()
        return difference, next(
            text
            for text in (
                self._stepped_inside(),
                self._uniform(),
                self._changed_between(),
                self._weighed(),
                self._of_modules(off),
                self._other_samples(),
                f"gradients are off by {difference:.1%}",
            )
            if text
        )

    # --- one diagnosis each; "" where it does not fit -----------------------------------------------------------------

    def _perhaps_clipped(self) -> str:
        """Equal gradients were perhaps made equal by a clip that was not seen."""
        factors = [(x["factor"], y["factor"]) for x, y in zip(self._a.seen, self._b.seen, strict=False)]
        for before, after in factors:
            if before and after and abs(before - 1) > self._base and abs(after / before - 1) > self._tolerance:
                return (
                    "perhaps clipped: the loop scales gradients to equal norms after the last backward pass, where "
                    f"they are {before / after:.3g} times as large{self._named(before / after)}"
                )
        return ""

    def _stepped_inside(self) -> str:
        rows, passes = self._b.total("rows"), len(self._b.seen[0]["parts"])
        if self._accum_steps > 1 and passes == 1 < self._parts and rows and rows < self._a.total("rows"):
            return f"the optimizer steps inside the window: after {rows} of {self._a.total('rows')} samples"
        return ""

    def _uniform(self) -> str:
        a, b = self._a.gradient, self._b.gradient
        ratio = float((a * b).sum() / (a * a).sum()) if bool(a.any()) else 0.0
        if ratio > 0 and _size(b - ratio * a, ratio * a) <= self._tolerance:
            return f"every gradient is {ratio:.4g} times as large{self._named(ratio)}"
        return ""

    def _named(self, ratio: float) -> str:
        def is_near(value: float) -> bool:
            return abs(ratio / value - 1) <= max(self._tolerance, 1e-3)

        if is_near(self._parts):
            return ": the loss is not divided by the accumulation steps"
        if is_near(1 / self._parts):
            return ": the loss is divided by the accumulation steps twice"
        if self._world > 1 and (is_near(self._world) or is_near(1 / self._world)):
            return f": the ratio is that of the world size ({self._world} ranks)"
        return ""

    def _changed_between(self) -> str:
        seen = self._b.seen
        if any(one["cleared"] for one in seen):
            return "gradients are cleared inside the window: only its last micro-batches count"
        if any(one["clipped_between"] for one in seen):
            return "gradients are clipped between micro-batches, not once before the step"
        if any(one["changed_between"] for one in seen):
            return "gradients are scaled between micro-batches"
        return ""

    def _weighed(self) -> str:
        """Whether the whole gradient is a sum of what the micro-batches added, by other weights than 1."""
        a, parts = self._a.gradient, self._b.parts
        if parts is None or len(parts) < 2 or parts[0].shape != a.shape or parts[0].numel() < 2 * len(parts):  # noqa: PLR2004
            return ""
        columns = parts.flatten(1).T
        weights = torch.linalg.lstsq(columns, a.reshape(-1, 1)).solution.flatten()
        if not bool(weights.isfinite().all()) or _size(columns @ weights - a.flatten(), a) > self._tolerance:
            return ""
        spread = f"{float(weights.min() / weights.mean()):.2f} to {float(weights.max() / weights.mean()):.2f} times"
        for what, unit in (("tokens", "labels that are not ignored"), ("rows", "samples")):
            counts = torch.tensor(self._b.seen[0][what], dtype=torch.float64)
            if len(self._b.seen) == 1 and len(counts) == len(weights) and float(counts.sum()):
                expected = counts / counts.mean()
                if float((weights / weights.mean() - expected).abs().max()) <= max(10 * self._tolerance, 1e-2):
                    return (
                        f"a mean of means: micro-batches count alike, and should count {spread} as much, by their "
                        f"{unit} ({', '.join(str(int(one)) for one in counts[:8])})"
                    )
        return f"a mean of means: micro-batches should count {spread} as much as they do, on average 1"

    def _modules_off(self) -> dict[str, tuple[float, float]]:
        """Return, of each module that differs, its share of the difference and how large its gradient is; worst first."""
        a, b, noise = self._a.gradient, self._b.gradient, self._again.gradient - self._a.gradient
        owners: dict[str, list[int]] = {}
        for place, name in enumerate(self._a.names):
            owners.setdefault(name.rpartition(".")[0] or name, []).append(place)
        off = {}
        for owner, places in owners.items():
            difference, norm = float((b - a)[places].norm()), float(a[places].norm())
            most = self._base * (_OF_MODULE * norm + _OF_WHOLE * float(a.norm())) + 10 * float(noise[places].norm())
            if difference > most:
                off[owner] = (difference, float(b[places].norm()) / norm if norm else math.inf)
        return dict(sorted(off.items(), key=lambda item: -item[1][0]))

    def _of_modules(self, off: dict[str, tuple[float, float]]) -> str:
        owners = {name.rpartition(".")[0] or name for name in self._a.names}
        lacking = {name.rpartition(".")[0] or name for name in self._b.missing - self._a.missing}
        floor = self._base * float(self._a.gradient.norm())
        right = [one for one in owners - set(off) if self._norm_of(one) > floor]
        if not off or not right:
            return ""
        told = []
        for owner, (_, ratio) in off.items():
            told.append(f"{owner} (no gradient)" if owner in lacking else f"{owner} ({ratio:.3g} times as large)")
        return f"only some modules are off: {listed(told)}; the other {len(owners) - len(off)} are right"

    def _norm_of(self, owner: str) -> float:
        places = [n for n, name in enumerate(self._a.names) if (name.rpartition(".")[0] or name) == owner]
        return float(self._a.gradient[places].norm())

    def _other_samples(self) -> str:
        if self._samples(self._a) != self._samples(self._b):
            return (
                "the splits saw other samples, so nothing can be said of the accumulation: the loader, or the noise "
                "that the loop adds, depends on the batch size; shuffle with a fixed seed, or not at all"
            )
        return ""

    @staticmethod
    def _samples(step: _Step) -> list[str]:
        return sorted(one for rank in step.seen for one in rank["samples"])
