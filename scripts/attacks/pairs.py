"""Trains four small models with every pair of features of `fit`, and compares each with a plain loop.

A pair is lost if parameters, buffers or reported losses differ from the plain loop's, if a sample is left out or used
twice, or if anything else than an error of autoaccum refuses it.
tests/support/training/feature_pairs.py has the trainings.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests"))

from attacks import Row
from autoaccum._arguments import listed
from support.ranks.pool import RankPool
from support.training import feature_pairs

_NAMED = 5  # of the pairs that are refused


def attack(folder: Path, seed: int, share: float) -> list[Row]:
    """Train each pair, or a share of them; those with ranks on two processes."""
    torch.set_num_threads(1)
    os.environ["AUTOACCUM_CACHE_DIR"] = ""
    chance = random.Random(seed)  # noqa: S311
    rank_pool = RankPool(2)
    try:
        return [_of_model(rank_pool, name, folder / name, chance, share) for name in feature_pairs.MODELS]
    finally:
        rank_pool.close()


def _of_model(rank_pool: RankPool, name: str, folder: Path, chance: random.Random, share: float) -> Row:
    chosen = [pair for pair in feature_pairs.pairs(name) if chance.random() < share]
    losses: list[str] = []
    refused: list[str] = []
    for number, features in enumerate(chosen):
        try:
            outcomes = feature_pairs.outcomes_of(rank_pool, name, features, str(folder / str(number)))
            wrong = feature_pairs.judged(name, features, outcomes)
        except Exception as error:  # noqa: BLE001 - it is the result
            wrong = [f"{type(error).__name__}: {error}"]
        else:
            refused += [" and ".join(features)] if outcomes[0].error else []
        losses += [f"{name}, {' and '.join(features) or 'nothing'}: {one}" for one in wrong]
    return Row(
        f"pairs of features, {name}", len(chosen), tuple(losses), f"{len(refused)} refused: {listed(refused, _NAMED)}"
    )
