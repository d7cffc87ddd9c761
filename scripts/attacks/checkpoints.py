"""Damages checkpoint files: bits, headers, single fields of an intact file, and pickles that would run code."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from attacks.row import Row

import damaged_checkpoints as damaged
from autoaccum import AutoaccumError
from autoaccum._system.notices import Notices
from autoaccum._training.checkpoint_files import Storage
from autoaccum._training.packing import packed

_FLIPS, _FIELDS = 22_000, 600


def attack(folder: Path, seed: int, share: float) -> list[Row]:
    """Damage checkpoints of small runs, and read or resume them."""
    contents = {
        name: damaged.written(name, folder / f"run{number}") for number, name in enumerate(damaged.CONFIGURATIONS)
    }
    return [
        _flips(folder / "run0", folder / "flips", seed, share),
        _fields(contents, folder / "fields", seed, share),
        _hostile(next(iter(contents.values())), folder / "hostile"),
    ]


def _flips(run: Path, folder: Path, seed: int, share: float) -> Row:
    folder.mkdir()
    path, content = Storage(run).read_newest(Notices(silent=True))
    whole = path.read_bytes()
    count = min(8 * len(whole), max(1, int(_FLIPS * share)))
    chosen = random.Random(seed).sample(range(8 * len(whole)), count)  # noqa: S311
    losses = tuple(damaged.flips(folder / path.name, whole, content, chosen))
    return Row("one bit of a checkpoint flipped", count, losses, f"{8 * len(whole):,} bits")


def _fields(contents: dict, folder: Path, seed: int, share: float) -> Row:
    count = max(1, int(_FIELDS * share))
    words: Counter[str] = Counter()
    losses = []
    for name, path, damage, content in damaged.draw(contents, seed, count):
        word, loss = damaged.outcome(name, content, folder)
        words[word] += 1
        if loss is not None:
            losses.append(f"{name}: {'/'.join(map(str, path))}: {damage}: {loss}")
    note = ", ".join(f"{number} {word}" for word, number in sorted(words.items()))
    return Row("one field of a checkpoint replaced or deleted", count, tuple(losses), note)


def _hostile(content: dict, folder: Path) -> Row:
    folder.mkdir()
    mark, path = folder / "mark", folder / "step-00000001.pt"
    losses, tries = [], 0
    plain = packed(content)
    for name, payload in damaged.hostile(mark).items():
        for sealed in (True, False):
            tries += 1
            damaged.write_hostile(path, plain, payload, sealed=sealed)
            try:
                Storage(folder).read_newest(Notices(silent=True))
            except AutoaccumError as error:
                if "weights_only" in str(error):
                    losses.append(f"{name}: the message advises to turn weights_only off")
            else:
                losses.append(f"{name} was loaded")
            if mark.exists():
                losses.append(f"{name} ran")
                mark.unlink()
    return Row("a pickle that runs code", tries, tuple(losses), f"torch {torch.__version__}")
