"""Finds the job of "FILE.py" or "FILE.py:function", for a report on it.

A file with such a function (by default `job`) is imported by path, and the function returns the `Job`. Any other is a
training script: it runs up to its first call of `fit`, `Runner.step` or `Accumulator.backward`, names that it finds in
`autoaccum` as always, and that call becomes a `Job`. Either can import its neighbours as under `python FILE.py`. An
error in it keeps its traceback, as the cause of the error raised here. An exit (`sys.exit`) in it is an error:
otherwise `sys.exit(0)` would mean "it fits".
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from autoaccum._data.batches import as_window
from autoaccum._launch.job import Job
from autoaccum._system.attributes import replaced
from autoaccum._system.own_code import is_own_file
from autoaccum._training.accumulator import Accumulator
from autoaccum._training.api import fit
from autoaccum._training.runner import Runner
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType, TracebackType

_DEFAULT_FUNCTION = "job"


class RecipeError(InvalidInputError):
    """A recipe's own code raised or exited; the cause is what it raised."""


class _ReachedError(BaseException):
    """The script has come to the call, or to one of an adapter; not an Exception, which the script may catch."""

    def __init__(self, job: Job | None) -> None:
        super().__init__()
        self.job = job


def load_job(recipe: str, arguments: Sequence[str] = ()) -> Job:
    """Return the job of a file.

    Args:
        recipe: "FILE.py:function", or "FILE.py" for the function named `job`; a file without it is a script. The
            function needs no arguments.
        arguments: Those of the script, as in `sys.argv[1:]`.

    Raises:
        InvalidInputError: There is no such file or function, the function did not return a Job, or the script ended
            without a call that trains, or with one that a report cannot take.
        RecipeError: It raised or exited.
    """
    path, name = _parts_of(recipe)
    if name == _DEFAULT_FUNCTION and _is_script(path):
        return _job_of_script(path, arguments)
    with _importable(path.parent):  # for the call too: the function may import its neighbours
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
def errors_explained(what: str, *, go_on: str = "return, or raise an exception") -> Iterator[None]:
    """Turn an exception of a recipe's code, exits included, into an error that says where; Ctrl-C passes.

    Args:
        what: The code.
        go_on: What it should do instead of an exit.

    Raises:
        RecipeError: The code raised.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        trace = error.__traceback__  # without our frames and the import system's
        while trace is not None and (is_own_file(name := trace.tb_frame.f_code.co_filename) or name.startswith("<")):
            trace = trace.tb_next
        error.__traceback__ = trace
        if isinstance(error, SystemExit):
            raise RecipeError(f"{what} exited by sys.exit({error.code!r}){_line(trace)}; {go_on}") from error
        raise RecipeError(f"{what} raised {type(error).__name__}: {error}; correct the script") from error


def _line(trace: TracebackType | None) -> str:
    """Return the last line of the first frame's file that was in work."""
    frames = traceback.extract_tb(trace)
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    return f" in line {lines[-1]}" if lines else ""


def _parts_of(recipe: str) -> tuple[Path, str]:
    """Return the file and the name of the function."""
    path, name = Path(recipe), _DEFAULT_FUNCTION
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
def _importable(folder: Path) -> Iterator[None]:
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


def _is_script(path: Path) -> bool:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return False  # the import will tell
    return not any(isinstance(one, ast.FunctionDef) and one.name == _DEFAULT_FUNCTION for one in tree.body)


def _job_of_script(path: Path, arguments: Sequence[str]) -> Job:
    """Run a script, as `python SCRIPT ARGUMENTS` would, up to the first call that trains; return that call."""
    root = sys.modules["autoaccum"]  # an import would be one of everything that it names
    stands_for = [
        (sys, "argv", [str(path), *arguments]),
        (root, "fit", _fit),
        (root, "Runner", _Runner),
        (root, "Accumulator", _Accumulator),
        (Accumulator, "backward", _backward_of_an_adapter),
    ]
    try:
        go_on = "it must go on to its first call that trains; its own arguments follow --"
        explained = errors_explained(f"the script {str(path)!r}", go_on=go_on)
        with _importable(path.parent), replaced(*stands_for), explained:
            runpy.run_path(str(path), run_name="__main__")
    except _ReachedError as reached:
        if reached.job is not None:
            return reached.job
        raise InvalidInputError(
            f"the script {str(path)!r} trains by an adapter of autoaccum.integrations, which a report cannot read; "
            "write a function job() that returns autoaccum.Job(model, loader, target_batch, ...)"
        ) from None
    raise InvalidInputError(
        f"the script {str(path)!r} ended without a call of autoaccum.fit, Runner.step or Accumulator.backward; call "
        "one from it, or write a function job() that returns autoaccum.Job(model, loader, target_batch, ...)"
    )


def _backward_of_an_adapter(*_: Any, **__: Any) -> NoReturn:
    raise _ReachedError(None)


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
