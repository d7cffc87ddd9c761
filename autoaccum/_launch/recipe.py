"""Loads "RECIPE.py:function", and returns the Job that the function returns.

A recipe is the user's Python file. It is imported by path, so it needs no package, and can import its neighbours as
under `python RECIPE.py`. An error in it keeps its traceback, as the cause of the error raised here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum._launch.job import Job
from autoaccum._launch.recipe_exit_guard import exit_error, is_exit
from autoaccum._system.exceptions import contextmanager
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType, TracebackType

DEFAULT_FUNCTION = "job"


def load_recipe(recipe: str) -> Job:
    """Import a recipe and call its function.

    Args:
        recipe: "RECIPE.py:function", or "RECIPE.py" for the function named `job`. The function needs no
            arguments and returns a `Job`.

    Raises:
        InvalidInputError: There is no such file or function, it raised or exited (then the cause is what it raised),
            or it did not return a Job.
    """
    path, name = _split(recipe)
    # For the call too: the function may import its neighbours.
    with _importable(path.parent):
        module = _imported(path)
        function = _function(module, name, path)
        try:
            job = function()
        except BaseException as error:
            if not isinstance(error, Exception) and not is_exit(error):
                raise
            raise _recipe_error(f"{name}() of the recipe {str(path)!r}", error, path) from error
    if not isinstance(job, Job):
        raise InvalidInputError(
            f"{name}() of the recipe {str(path)!r} returned {type(job).__name__}; "
            "return autoaccum.Job(model, loader, target_batch, ...)"
        )
    return job


def check_recipe(recipe: str) -> str:
    """Import a recipe without calling its function, which may be slow, and return it with its absolute path.

    Raises:
        InvalidInputError: There is no such file or function, or the file raised or exited (then the cause is
            what it raised).
    """
    path, name = _split(recipe)
    with _importable(path.parent):
        _function(_imported(path), name, path)
    return f"{path}:{name}"


def _split(recipe: str) -> tuple[Path, str]:
    path, name = Path(recipe), DEFAULT_FUNCTION
    before, colon, after = recipe.rpartition(":")
    if colon and not path.exists():
        path, name = Path(before), after
    if not name.isidentifier():
        raise InvalidInputError(f"{recipe!r} names no function; write RECIPE.py or RECIPE.py:function")
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise InvalidInputError(f"the recipe {str(path)!r} {found}; pass the path of a Python file with a job() in it")
    if path.suffix != ".py":
        raise InvalidInputError(f"the recipe {str(path)!r} is not a Python file; its name must end in .py")
    return path.resolve(), name


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        # The recipe may have changed sys.path, so the entry may have moved.
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def _imported(path: Path) -> ModuleType:
    # A recipe named torch.py must not become `torch` for later imports.
    name = f"autoaccum_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "there is a loader for .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The recipe's classes are pickled under this name for a loader's workers.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception) and not is_exit(error):
            raise
        raise _recipe_error(f"the recipe {str(path)!r}", error, path) from error
    return module


def _function(module: ModuleType, name: str, path: Path) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if not callable(function):
        there = _own_functions(module)
        listed = ", ".join(f"{other}()" for other in there) or "none"
        fit = [other for other in there if not _needed(getattr(module, other))]
        remedy = f"{path.name}:{fit[0]}" if fit else f"a function {name}() that returns an autoaccum.Job"
        raise InvalidInputError(
            f"the recipe {str(path)!r} has no function {name}(); its functions: {listed}; try {remedy}"
        )
    needed = _needed(function)
    if needed:
        raise InvalidInputError(
            f"{name}() of the recipe {str(path)!r} needs arguments ({', '.join(needed)}), "
            "but it is called without any; give them defaults"
        )
    return function  # type: ignore[no-any-return]


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's required arguments."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    ]


def _own_functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _recipe_error(what: str, error: BaseException, path: Path) -> InvalidInputError:
    if is_exit(error):
        made = exit_error(path, error)
    else:
        made = InvalidInputError(f"{what} raised {type(error).__name__}: {error}; correct the recipe")
    # Only the recipe's frames: those before are the import system's and ours.
    error.with_traceback(_from_file(error.__traceback__, path))
    return made


def _from_file(traceback: TracebackType | None, path: Path) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename != str(path):
        traceback = traceback.tb_next
    return traceback
