"""Runs a training script up to its first call of `fit`, `Runner.step` or `Accumulator.backward`, for a report on it.

The script finds these names in `autoaccum` as always; the first such call ends it, and becomes a `Job`.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import runpy
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import autoaccum
from autoaccum._data.batches import as_window
from autoaccum._engine.runner import Runner
from autoaccum._launch.job import Job
from autoaccum._launch.recipe import DEFAULT_FUNCTION, errors_explained, importable, load_recipe, parts_of
from autoaccum._training.accumulator import Accumulator
from autoaccum._training.api import fit
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


class _ReachedError(BaseException):
    """The script has come to the call; not an Exception, which the script may catch."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job


class _AdapterError(BaseException):
    """The script trains by an adapter, whose trainer is no job."""


def load_job(recipe: str, arguments: Sequence[str] = ()) -> Job:
    """Return the job of a recipe, or of a script.

    Args:
        recipe: "RECIPE.py:function", or "RECIPE.py" for the function named `job`; a file without it is a script.
        arguments: Those of the script, as in `sys.argv[1:]`.

    Raises:
        InvalidInputError: As for `load_recipe` and `job_of_script`.
        RecipeError: The file raised, or exited.
    """
    path, name = parts_of(recipe)
    return job_of_script(path, arguments) if name == DEFAULT_FUNCTION and _is_script(path) else load_recipe(recipe)


def _is_script(path: Path) -> bool:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return False  # the import will tell
    return not any(isinstance(one, ast.FunctionDef) and one.name == DEFAULT_FUNCTION for one in tree.body)


def job_of_script(path: Path, arguments: Sequence[str]) -> Job:
    """Run a script, as `python SCRIPT ARGUMENTS` would, up to the first call that trains; return that call.

    Raises:
        InvalidInputError: It ended without such a call, or makes one that a report cannot take.
        RecipeError: It raised, or exited.
    """
    given = sys.argv
    sys.argv = [str(path), *arguments]
    try:
        with importable(path.parent), _ends_in_calls(), errors_explained(f"the script {str(path)!r}"):
            runpy.run_path(str(path), run_name="__main__")
    except _ReachedError as reached:
        return reached.job
    except _AdapterError:
        raise InvalidInputError(
            f"the script {str(path)!r} trains by an adapter of autoaccum.integrations, which a report cannot read; "
            "write a function job() that returns autoaccum.Job(model, loader, target_batch, ...)"
        ) from None
    finally:
        sys.argv = given
    raise InvalidInputError(
        f"the script {str(path)!r} ended without a call of autoaccum.fit, Runner.step or Accumulator.backward; call "
        "one from it, or write a function job() that returns autoaccum.Job(model, loader, target_batch, ...)"
    )


@contextlib.contextmanager
def _ends_in_calls() -> Iterator[None]:
    stands_for: dict[str, Any] = {"fit": _fit, "Runner": _Runner, "Accumulator": _Accumulator}
    before, backward = {name: getattr(autoaccum, name) for name in stands_for}, Accumulator.backward
    try:
        for name, other in stands_for.items():
            setattr(autoaccum, name, other)
        Accumulator.backward = _backward_of_an_adapter  # type: ignore[method-assign]
        yield
    finally:
        Accumulator.backward = backward  # type: ignore[method-assign]
        for name, own in before.items():
            setattr(autoaccum, name, own)


def _backward_of_an_adapter(*_: Any, **__: Any) -> NoReturn:
    raise _AdapterError


def _fit(*args: Any, **kwargs: Any) -> NoReturn:
    raise _ReachedError(Job(*args, **kwargs))


def _reached(arguments: dict[str, Any], batch: Any, target_batch: int | None) -> NoReturn:
    """End the script with the call of `fit` that its window would be."""
    window = as_window(batch, arguments.get("split"))
    if arguments.get("closure") is not None:
        raise InvalidInputError(
            "closure=: a report cannot run it; write a function job() that returns an autoaccum.Job"
        )
    known = inspect.signature(fit).parameters.keys() & arguments.keys() - {"callbacks", "plan"}
    named = {name: arguments[name] for name in known}
    raise _ReachedError(Job(loader=[window[0]], target_batch=target_batch or window.samples, **named))


def _bound(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return arguments by name, without defaults; raise as the call would."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


class _Runner:
    """Stands for a `Runner` until its first step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._arguments = _bound(Runner, args, kwargs)
        self.plan = self._arguments["plan"]

    def step(self, window: Any, *_: Any) -> NoReturn:
        _reached(self._arguments, window, self.plan.target_batch)


class _Accumulator:
    """Stands for an `Accumulator` until its first backward pass; its optimizer is not known."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._arguments = _bound(Accumulator, args, kwargs)

    def backward(self, batch: Any, *_: Any, **_options: Any) -> NoReturn:
        _reached(self._arguments, batch, None)
