"""Runs a training script up to its first call that trains, for a report on that call.

The call is of `fit`, `Runner.step` or `Accumulator.backward`, names that the script finds in `autoaccum` as always. The
script can import its neighbours as under `python FILE.py`. An error in it keeps its traceback, as the cause of the
error raised here. An exit (`sys.exit`) in it is an error: otherwise `sys.exit(0)` would mean "it fits".
"""

from __future__ import annotations

import contextlib
import inspect
import math
import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from autoaccum._data.batches import as_window
from autoaccum._data.regrouping import TOKENS_ARE, check_target, tokens_of
from autoaccum._data.splits import piece_of
from autoaccum._engine.optimizers import resolve
from autoaccum._system.attributes import replaced
from autoaccum._system.notices import Notices
from autoaccum._system.own_code import is_own_file
from autoaccum._training.accumulator import Accumulator
from autoaccum._training.api import fit
from autoaccum._training.runner import Runner
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

_TARGETS = {"target_batch": "target_tokens", "target_tokens": "target_batch"}
_PREFLIGHT = "call autoaccum.preflight(model, batch, target_batch, ...) in Python"


class ScriptError(InvalidInputError):
    """A script's own code raised or exited; the cause is what it raised."""


class FitCall:
    """The arguments of a call of `fit`, which are not checked.

    Args:
        arguments: By name.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = dict(arguments)

    def get(self, name: str) -> Any:
        """Return an argument, by default the one of `fit`; None where `fit` has no default."""
        default = inspect.signature(fit).parameters[name].default
        return self.arguments.get(name, None if default is inspect.Parameter.empty else default)

    def with_arguments(self, given: Mapping[str, Any]) -> FitCall:
        """Return the call with other arguments; a target in tokens replaces one in samples, and the reverse."""
        replaced_ones = {_TARGETS[name] for name in given.keys() & _TARGETS.keys()} - given.keys()
        return FitCall({name: one for name, one in self.arguments.items() if name not in replaced_ones} | dict(given))

    def samples_of_target(self, batch: Any) -> int:
        """Return the samples of an optimizer step; with `target_tokens`, how many of a batch's average length.

        Raises:
            InvalidInputError: There is no target, or the batch does not tell its tokens, or has none.
        """
        target_batch, target_tokens = self.get("target_batch"), self.get("target_tokens")
        check_target(target_batch, target_tokens)
        if target_tokens is None:
            return int(target_batch)
        counts = tokens_of(piece_of(batch, self.get("split")))
        if not sum(counts):
            raise InvalidInputError(f"target_tokens={target_tokens} finds no token in the first batch: {TOKENS_ARE}")
        return max(1, round(int(target_tokens) * len(counts) / sum(counts)))


class _ReachedError(BaseException):
    """The script has come to the call, or to one of an adapter; not an Exception, which the script may catch."""

    def __init__(self, call: FitCall | None) -> None:
        super().__init__()
        self.call = call


def first_call(script: str, arguments: Sequence[str] = ()) -> FitCall:
    """Run a script, as `python SCRIPT ARGUMENTS` would, up to its first call that trains; return that call.

    Args:
        script: The path of a Python file.
        arguments: Those of the script, as in `sys.argv[1:]`.

    Raises:
        InvalidInputError: There is no such file, or the script ended without a call that trains, or with one that a
            report cannot take.
        ScriptError: It raised or exited.
    """
    path = _checked(script)
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
        if reached.call is not None:
            return reached.call
        raise InvalidInputError(
            f"the script {str(path)!r} trains by an adapter of autoaccum.integrations, which a report cannot read; "
            f"{_PREFLIGHT}"
        ) from None
    raise InvalidInputError(
        f"the script {str(path)!r} ended without a call of autoaccum.fit, Runner.step or Accumulator.backward; call "
        f"one from it, or {_PREFLIGHT}"
    )


@contextlib.contextmanager
def errors_explained(what: str, *, go_on: str = "return, or raise an exception") -> Iterator[None]:
    """Turn an exception of a script's code, exits included, into an error that says where; Ctrl-C passes.

    Args:
        what: The code.
        go_on: What it should do instead of an exit.

    Raises:
        ScriptError: The code raised.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        trace = error.__traceback__  # without our frames and the import system's
        while trace is not None and (is_own_file(name := trace.tb_frame.f_code.co_filename) or name.startswith("<")):
            trace = trace.tb_next
        error.__traceback__ = trace
        if isinstance(error, SystemExit):
            raise ScriptError(f"{what} exited by sys.exit({error.code!r}){_line(trace)}; {go_on}") from error
        raise ScriptError(f"{what} raised {type(error).__name__}: {error}; correct the script") from error


def _line(trace: TracebackType | None) -> str:
    """Return the last line of the first frame's file that was in work."""
    frames = traceback.extract_tb(trace)
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    return f" in line {lines[-1]}" if lines else ""


def _checked(script: str) -> Path:
    path = Path(script)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise InvalidInputError(f"the script {script!r} {found}; pass the path of a Python file that trains")
    if path.suffix != ".py":
        raise InvalidInputError(f"the script {script!r} is not a Python file; its name must end in .py")
    return path.resolve()


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let a file of the user's import its neighbours while entered."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the script may have changed sys.path
            sys.path.remove(str(folder))


def _backward_of_an_adapter(*_: Any, **__: Any) -> NoReturn:
    raise _ReachedError(None)


def _fit(*args: Any, **kwargs: Any) -> NoReturn:
    raise _ReachedError(FitCall(_bound(fit, args, kwargs)))


def _reached(arguments: dict[str, Any], batch: Any, target_batch: int | None) -> NoReturn:
    """End the script with the call of `fit` that its window would be."""
    window = as_window(batch, arguments.get("split"))
    if arguments.get("closure") is not None:
        raise InvalidInputError(f"closure=: a report cannot run it; {_PREFLIGHT}")
    known = inspect.signature(fit).parameters.keys() & arguments.keys() - {"callbacks", "plan"}
    named = {name: arguments[name] for name in known}
    raise _ReachedError(FitCall({"loader": [window[0]], "target_batch": target_batch or window.samples} | named))


def _bound(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return arguments by name, without defaults; raise as the call would."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


class _Runner:
    """Stands for a `Runner` until its first step; an evaluation before it gives nothing."""

    savings, noise_scale = (), None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._arguments = _bound(Runner, args, kwargs)
        self.plan = self._arguments["plan"]
        model, optimizer = self._arguments["model"], self._arguments.get("optimizer")
        self.optimizer = self._arguments["optimizer"] = resolve(optimizer, [model], Notices(silent=True))

    def step(self, window: Any, *_: Any) -> NoReturn:
        _reached(self._arguments, window, self.plan.target_batch)

    def evaluate(self, *_: Any) -> float:
        return math.nan


class _Accumulator:
    """Stands for an `Accumulator` until its first backward pass; its optimizer is not known."""

    savings, plan = (), None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._arguments = _bound(Accumulator, args, kwargs)

    def backward(self, batch: Any, *_: Any, **_options: Any) -> NoReturn:
        _reached(self._arguments, batch, None)
