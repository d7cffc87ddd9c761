"""Loads "RECIPE.py:function", and returns the Job that the function returns.

A recipe is the user's Python file. It is imported by path, and can import its neighbours as under `python RECIPE.py`.
An error in it keeps its traceback, as the cause of the error raised here. An exit (`sys.exit`) in it is an error:
otherwise `sys.exit(0)` would mean "it fits".
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum._launch.job import Job
from autoaccum._system.own_code import is_own_file
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

DEFAULT_FUNCTION = "job"


class RecipeError(InvalidInputError):
    """A recipe's own code raised or exited; the cause is what it raised."""


def load_recipe(recipe: str) -> Job:
    """Import a recipe and call its function.

    Args:
        recipe: "RECIPE.py:function", or "RECIPE.py" for the function named `job`. The function needs no
            arguments and returns a `Job`.

    Raises:
        InvalidInputError: There is no such file or function, or it did not return a Job.
        RecipeError: It raised or exited.
    """
    path, name = parts_of(recipe)
    with importable(path.parent):  # for the call too: the function may import its neighbours
        with errors_explained(f"the script {str(path)!r}"):
            module = _imported(path)
        function = _function(module, name, path)
        with errors_explained(f"{name}() of the script {str(path)!r}"):
            job = function()
    if not isinstance(job, Job):
        raise InvalidInputError(
            f"{name}() of the script {str(path)!r} returned {type(job).__name__}; "
            "return autoaccum.Job(model, loader, target_batch, ...)"
        )
    return job


@contextlib.contextmanager
def errors_explained(what: str) -> Iterator[None]:
    """Turn an exception of a recipe's code, exits included, into an error that says where; Ctrl-C passes.

    Raises:
        RecipeError: The code raised.
    """
    try:
        yield
    except SystemExit as error:
        raise RecipeError(f"{what} exited by sys.exit({error.code!r}); return, or raise an exception") from error
    except Exception as error:
        trace = error.__traceback__  # without our frames and the import system's
        while trace is not None and (is_own_file(name := trace.tb_frame.f_code.co_filename) or name.startswith("<")):
            trace = trace.tb_next
        error.__traceback__ = trace
        raise RecipeError(f"{what} raised {type(error).__name__}: {error}; correct the script") from error


def parts_of(recipe: str) -> tuple[Path, str]:
    """Return the file and the name of the function of "RECIPE.py:function".

    Raises:
        InvalidInputError: There is no such file, or the name is none.
    """
    path, name = Path(recipe), DEFAULT_FUNCTION
    before, colon, after = recipe.rpartition(":")
    if colon and not path.exists():
        path, name = Path(before), after
    if not name.isidentifier():
        raise InvalidInputError(f"{recipe!r} names no function; the script is written SCRIPT.py or SCRIPT.py:FUNCTION")
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        remedy = "pass the path of a Python file that calls fit, or has a job()"
        raise InvalidInputError(f"the script {str(path)!r} {found}; {remedy}")
    if path.suffix != ".py":
        raise InvalidInputError(f"the script {str(path)!r} is not a Python file; its name must end in .py")
    return path.resolve(), name


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let a file of the user's import its neighbours while entered."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the recipe may have changed sys.path
            sys.path.remove(str(folder))


def _imported(path: Path) -> ModuleType:
    # A recipe named torch.py must not become `torch`. Its classes are pickled under this name for a loader's workers.
    name = f"autoaccum_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "there is a loader for .py"
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _function(module: ModuleType, name: str, path: Path) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if not callable(function):
        there = [
            other
            for other, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not other.startswith("_")
        ]
        raise InvalidInputError(
            f"the script {str(path)!r} has no function {name}(); its functions: "
            f"{', '.join(f'{other}()' for other in there) or 'none'}; name one ({path.name}:FUNCTION), or write "
            f"a function {name}() that returns an autoaccum.Job"
        )
    needed = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    ]
    if needed:
        raise InvalidInputError(
            f"{name}() of the script {str(path)!r} needs arguments ({', '.join(needed)}), "
            "but it is called without any; give them defaults"
        )
    return function  # type: ignore[no-any-return]
