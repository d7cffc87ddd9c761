"""Draws invalid values for every public argument and every option of the command line.

A try is lost if the error is a raw one or does not name the argument, if anything changes, or if the value is accepted.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import bad_inputs
import bad_options
from attacks import Row

_TRIES = 300
_OF_OPTIONS = 100


def attack(folder: Path, seed: int, share: float) -> list[Row]:
    """Draw bad input with `seed`, each try in its own folder."""
    before = Path.cwd()
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return [
                _of_arguments(folder / "arguments", seed, max(1, round((_TRIES - _OF_OPTIONS) * share))),
                _of_options(folder / "options", seed, max(1, round(_OF_OPTIONS * share))),
            ]
    finally:
        os.chdir(before)


def _of_arguments(folder: Path, seed: int, tries: int) -> Row:
    found: list[str] = []

    @seeded(seed)
    @settings(
        max_examples=tries,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(bad_inputs.cases())
    def go_through(case: bad_inputs.Case) -> None:
        found.append(bad_inputs.judge(case, _entered(folder / str(len(found)))))

    go_through()
    return Row("bad input, Python", len(found), tuple(loss for loss in found if loss), _covered())


def _of_options(folder: Path, seed: int, tries: int) -> Row:
    listed = bad_options.cases()
    cases = random.Random(seed).sample(listed, k=min(tries, len(listed)))  # noqa: S311 - not for secrets
    found = [bad_options.judge(case, _entered(folder / str(number))) for number, case in enumerate(cases)]
    return Row("bad input, command line", len(found), tuple(loss for loss in found if loss))


def _entered(folder: Path) -> Path:
    folder.mkdir(parents=True)
    os.chdir(folder)
    return folder


def _covered() -> str:
    arguments = sum(len(bad_inputs.arguments_of(call)) for call in bad_inputs.CALLS.values())
    return f"{arguments} arguments of {len(bad_inputs.CALLS)} callables"
