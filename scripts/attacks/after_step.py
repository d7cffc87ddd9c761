"""Raises out-of-memory errors after the optimizer step, at every Python call and every operator, on one or two ranks.

A try is lost if an optimizer step is made twice or not at all, parameters differ from those of the undisturbed training
(on two ranks: from each other), an error within the step does not name it, or a checkpoint leads to another result.
tests/support/faults/after_step.py has the trainings; tests/across/test_after_the_optimizer_step.py makes a few tries.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests"))

from attacks import Row
from support.faults import after_step
from support.ranks.pool import RankPool

# The first window creates the optimizer's state, with a copy to restore; the third is ordinary, between checkpoints;
# the second is followed by a checkpoint, written while memory runs out.
_ALONE = ((1, 9, 1.0), (3, 2, 1.0), (2, 2, 0.05))
_TOGETHER = ((3, 0.3), (1, 0.1))
_POINTS = ("operator", "call")


def attack(folder: Path, seed: int, share: float) -> list[Row]:
    """Make the tries: at a share of 1 all, but a twentieth of those during the writing of a checkpoint."""
    torch.set_num_threads(1)
    chance = random.Random(seed)  # noqa: S311
    return [_alone(folder / "alone", chance, share), _together(folder / "together", chance, share)]


def _alone(folder: Path, chance: random.Random, share: float) -> Row:
    expected = after_step.after_each_window()
    losses: list[str] = []
    ends: Counter[str] = Counter()
    for window, every, part in _ALONE:
        for kind in _POINTS:
            where = folder / f"{window}-{kind}"
            where.mkdir(parents=True)
            points = after_step.points_of(where / "counted", window, kind, checkpoint_every=every)
            for point in _drawn(points, chance, share * part):
                found, end = after_step.judged(
                    where / str(point), window, point, kind, expected, checkpoint_every=every
                )
                losses += found
                ends[end or "went on"] += 1
    return Row("no memory after the step", ends.total(), tuple(losses), _told(ends))


def _together(folder: Path, chance: random.Random, share: float) -> Row:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    losses: list[str] = []
    ends: Counter[str] = Counter()
    rank_pool = RankPool(2)
    try:
        for who in (0, 1):
            counting = [(window, None, kind) for window, _ in _TOGETHER for kind in _POINTS]
            counted = _run(rank_pool, folder / f"{who}-counted", who, counting)[who]
            tries = [
                (window, point, kind)
                for (window, _, kind), one in zip(counting, counted, strict=True)
                for point in _drawn(one.fault["count"], chance, share * dict(_TOGETHER)[window])
            ]
            answers = _run(rank_pool, folder / str(who), who, tries)
            losses += after_step.judged_on_ranks(tries, answers, who)
            ends.update(one.kind or "went on" for one in answers[who])
    finally:
        rank_pool.close()
    return Row("no memory after the step, on one of two ranks", ends.total(), tuple(losses), _told(ends))


def _run(rank_pool: RankPool, folder: Path, who: int, tries: list[Any]) -> list[list[Any]]:
    folder.mkdir(parents=True)
    answers: list[list[Any]] = rank_pool.run("support.faults.after_step:on_ranks", str(folder), who, tries, size=2)
    return answers


def _drawn(points: int, chance: random.Random, share: float) -> list[int]:
    number = min(points, max(1, round(points * share)))
    return sorted(chance.sample(range(1, points + 1), number))


def _told(ends: Counter[str]) -> str:
    return ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
