"""Rows of tests on several ranks: a training, where it runs, and what must hold of it.

    ROWS = table(__file__, Row("gradients are clipped as in one process", {"clip_grad_norm": 0.1}, on=(TWO, SPREAD)))

    @pytest.mark.parametrize("row", ROWS)
    def test_ranks(rank_pool, row, tmp_path):
        row.check(rank_pool, tmp_path)

Each rank trains by `train` of `training.py` (or of `loops.py`: `by=`), with what a row gives; it finds the row in its
file, so that a row may hold models, losses and functions. What must hold (`expect.py`) is by default `as_alone`: ranks
end alike, and as one process that trains each window at once.
"""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from support.models.small import a_few_of
from support.processes.folders import TESTS
from support.ranks import expect


@dataclass(frozen=True)
class Place:
    """So many ranks, with whole models or one that `fully_shard` has spread over them."""

    size: int
    is_spread: bool = False
    marks: tuple = ()

    def __str__(self):
        return f"spread over {self.size}" if self.is_spread else f"{self.size} ranks"


TWO, THREE, FOUR = map(Place, (2, 3, 4))
SPREAD_1, SPREAD, SPREAD_3, SPREAD_4 = (Place(size, is_spread=True) for size in (1, 2, 3, 4))


def sweep(place):
    return replace(place, marks=(pytest.mark.sweep,))


def slow(place):
    return replace(place, marks=(pytest.mark.slow,))


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A claim, and the training of which it is made.

    Arguments are a mapping, or a function of rank and size that returns one (alone they are 0 and 1). They are those of
    `fit` and of the function that trains; `by` names its module, and `during` is a context in which it is called.
    """

    claim: str
    given: dict | Callable = field(default_factory=dict)
    on: tuple = (TWO,)
    holds: Callable = field(default_factory=expect.as_alone)
    marks: tuple = ()

    def arguments(self, rank, size):
        return self.given(rank, size) if callable(self.given) else self.given


def table(file, *rows):
    """Rows for `parametrize`, one for each place that a row names."""
    assert len({row.claim for row in rows}) == len(rows), "claims are names, by which ranks find rows"
    module = ".".join(Path(file).relative_to(TESTS).with_suffix("").parts)
    return [
        pytest.param(_Case(module, row, place), id=f"{row.claim}, {place}", marks=(*row.marks, *place.marks))
        for row in rows
        for place in row.on
    ]


def a_few_rows(make, *axes):
    """A row for each combination, of which the quick tests take a few."""
    return [replace(made := make(*one.values), marks=(*made.marks, *one.marks)) for one in a_few_of(*axes)]


@dataclass(frozen=True)
class _Case:
    module: str
    row: Row
    place: Place

    def check(self, pool, folder):
        self.row.holds(Run(pool, folder, self))


class Run:
    """Trains what a row says, on its ranks when it is called."""

    def __init__(self, pool, folder, case):
        self._pool, self._case, self.folder, self.size = pool, case, str(folder), case.place.size

    def __call__(self, **changes):
        return self._on_ranks(self._pool.run, changes)

    def answers(self, **changes):
        return self._on_ranks(self._pool.answers, changes)

    def alone(self, **changes):
        return trained(self._case.row, 0, 1, {"micro_batch": None, **changes})

    def _on_ranks(self, run, changes):
        changes = {"is_spread": self._case.place.is_spread, **changes}
        size = changes.pop("size", None) or self.size
        waits = {"wait_s": changes.pop("wait_s")} if "wait_s" in changes else {}
        return run("rows:on_rank", self._case.module, self._case.row.claim, changes, size=size, **waits)


def on_rank(rank, size, module, claim, changes):
    rows = {param.values[0].row.claim: param.values[0].row for param in importlib.import_module(module).ROWS}
    return trained(rows[claim], rank, size, changes)


def trained(row, rank, size, changes):
    asked = row.arguments(rank, size) | changes
    trainer = importlib.import_module(f"support.ranks.{asked.pop('by', 'training')}")
    asked = trainer.GIVEN | asked
    if asked["micro_batch"] is None:  # a whole window
        asked["micro_batch"] = asked.get("target_batch") or trainer.BATCH
    with asked.pop("during", contextlib.nullcontext()):
        return trainer.train(rank, size, **asked)
